"""Machine code as blocks and loops: AMD assembly text and SASS, read into one form and counted per pass of a loop.

Blocks end at branches. A loop is a natural one: a branch goes back to a block that every way to the branch passes. So
blocks that a compiler has laid behind the kernel's end, and that jump back into it, are no loops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from qla.codegen.flow import Flow, flow_of

_RETRY = 12  # instructions, at most, of a loop that is there for retries


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Parameters
    ----------
    name : whole, with modifiers.
    operands : as text.
    target : label that it may branch to; empty for anything but a branch.
    ends : what stands after it is not reached from it.
    predicate : under which it runs (CUDA), with its @; empty for always.
    """

    name: str
    operands: str = ""
    target: str = ""
    ends: bool = False
    predicate: str = ""


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Parameters
    ----------
    header : block at which it begins.
    blocks : in it, those of inner loops included.
    passes : how often it runs, where that is known; else None.
    """

    header: int
    blocks: frozenset[int]
    passes: int | None = None


@dataclass(frozen=True)
class Count:
    """Instructions by name, along the longest way through some code.

    Parameters
    ----------
    instructions : inner loops as often as they run.
    open_loops : inner loops of which that is not known; they count once.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    open_loops: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.instructions + other.instructions, self.open_loops + other.open_loops)

    def times(self, n: int) -> Count:
        """Run so often."""
        return Count(Counter({name: n * count for name, count in self.instructions.items()}), self.open_loops)

    @property
    def total(self) -> int:
        """All of them."""
        return self.instructions.total()


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Parameters
    ----------
    instructions : in the order of their addresses.
    labels : where they stand among them.
    language : of the source, as in `Target`: "hip" or "cuda".
    threads : of a workgroup.
    bound : taken for a number that a loop's is compared with and that is not known, such as the value heads that a
        workgroup of `prepare` works on; None where such loops are to stay open.
    arguments : by their bytes' offset, words of the argument block whose values are given; ways that they rule out do
        not count.
    """

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    language: str
    threads: int
    bound: int | None = None
    arguments: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """Where blocks begin."""
        last = len(self.instructions)
        cuts = {0, *(self.labels[i.target] for i in self.instructions if i.target in self.labels)}
        cuts |= {n + 1 for n, i in enumerate(self.instructions) if i.target or i.ends}
        return sorted(cut for cut in cuts if cut < last)

    def block_of(self, label: str) -> int | None:
        """The block that a label begins; None for one that is not here."""
        return self._numbers.get(self.labels.get(label, -1))

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {start: n for n, start in enumerate(self.starts)}

    def block(self, number: int) -> tuple[Instruction, ...]:
        """Of this number."""
        ends = [*self.starts[1:], len(self.instructions)]
        return self.instructions[self.starts[number] : ends[number]]

    @cached_property
    def followers(self) -> list[list[int]]:
        """Of each block: the blocks that may come next."""
        found = []
        for n in range(len(self.starts)):
            last = self.block(n)[-1]
            after = [] if last.ends or n + 1 == len(self.starts) else [n + 1]
            to = self.block_of(last.target)
            after += [to] if to is not None else []
            found.append(list(dict.fromkeys(after)))
        return found

    @cached_property
    def order(self) -> list[int]:
        """Blocks that can be reached, each after all from which a way leads to it but along branches back."""
        seen, done, stack = {0}, [], [(0, iter(self.followers[0]))]
        while stack:
            block, after = stack[-1]
            for follower in after:
                if follower not in seen:
                    seen.add(follower)
                    stack.append((follower, iter(self.followers[follower])))
                    break
            else:
                done.append(block)
                stack.pop()
        return done[::-1]

    @cached_property
    def _dominators(self) -> dict[int, int]:
        """The last block before each that every way to it passes (Cooper, Harvey and Kennedy's iteration)."""
        place = {block: n for n, block in enumerate(self.order)}
        before = self._before
        last: dict[int, int] = {0: 0}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [b for b in before[block] if b in last]
                common = known[0]
                for other in known[1:]:
                    while other != common:
                        if place[other] > place[common]:
                            other = last[other]
                        else:
                            common = last[common]
                if last.get(block) != common:
                    last[block], changed = common, True
        return last

    @cached_property
    def _before(self) -> dict[int, list[int]]:
        before: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for follower in self.followers[block]:
                before[follower].append(block)
        return before

    def dominators(self, block: int) -> Iterator[int]:
        """Blocks that every way to this one passes, from the last to the first."""
        while block:
            block = self._dominators[block]
            yield block

    @cached_property
    def natural_loops(self) -> list[Loop]:
        """All of them, inner ones before those around them, without their passes."""
        bodies: dict[int, set[int]] = {}
        for block in self.order:
            for header in self.followers[block]:
                if header == block or header in self.dominators(block):
                    body = bodies.setdefault(header, {header})
                    todo = [block]
                    while todo:
                        inside = todo.pop()
                        if inside not in body:
                            body.add(inside)
                            todo += self._before[inside]
        return sorted((Loop(header, frozenset(body)) for header, body in bodies.items()), key=lambda x: len(x.blocks))

    @cached_property
    def loops(self) -> list[Loop]:
        """All of them, inner ones before those around them."""
        return [replace(loop, passes=self._flow.passes.get(loop.header)) for loop in self.natural_loops]

    @cached_property
    def _flow(self) -> Flow:
        return flow_of(self)

    def _after(self, block: int) -> list[int]:
        """Blocks that come next, with the arguments that are given."""
        return [f for f in self.followers[block] if (block, f) not in self._flow.dead]

    def named(self, loop: Loop, pattern: str) -> int:
        """How many instructions of a loop have a name that begins like this pattern."""
        match = re.compile(pattern).match
        return sum(bool(match(i.name)) for block in loop.blocks for i in self.block(block))

    def main_loop(self, pattern: str) -> Loop:
        """The outermost loop with the most instructions whose name begins like `pattern`; the shortest of equals."""
        outer = [x for x in self.loops if not any(x.blocks < other.blocks for other in self.loops)]
        found = [x for x in outer if self.named(x, pattern)]
        if not found:
            raise ValueError(f"no loop with {pattern}")
        return max(found, key=lambda x: (self.named(x, pattern), -len(x.blocks)))

    def count(self, loop: Loop | None = None) -> Count:
        """Instructions of one pass of a loop (without one: of the whole kernel) along the longest way through it.

        Parameters
        ----------
        loop : one of `loops`.
        """
        blocks = loop.blocks if loop else frozenset(self.order)
        inner = [x for x in self.loops if x.blocks < blocks or (loop is None and x.blocks == blocks)]
        top = [x for x in inner if not any(x.blocks < other.blocks for other in inner)]
        owner = {block: x.header for x in top for block in x.blocks}
        best: dict[int, Count] = {}
        entry = loop.header if loop else 0
        ways: dict[int, list[Count]] = {owner.get(entry, entry): [Count()]}
        longest = Count()
        whole = {x.header: x for x in top}
        for block in self.order:  # an inner loop's header comes before the rest of it
            if block not in blocks or owner.get(block, block) != block or block not in ways:
                continue
            way = max(ways[block], key=lambda count: count.total)
            if block in whole:
                way += self._runs(whole[block])
                after = [f for b in whole[block].blocks for f in self._after(b) if f not in whole[block].blocks]
            else:
                way += Count(Counter(i.name for i in self.block(block)))
                after = self._after(block)
            best[block] = way
            for follower in after:
                node = owner.get(follower, follower)
                if follower in blocks and follower != entry and node not in best:
                    ways.setdefault(node, []).append(way)
            longest = max(longest, way, key=lambda count: count.total)
        return longest

    def _runs(self, loop: Loop) -> Count:
        once = self.count(loop)
        if loop.passes is not None:
            return once.times(loop.passes)
        # Hopper asks again for a barrier that is not there yet, and goes round for uniform registers that differ.
        again = any("TRYWAIT" in name or name == "BRA.U.ANY" for name in once.instructions) and once.total <= _RETRY
        return once if again else once + Count(open_loops=1)


# ---- AMD assembly

_AMD = re.compile(r"\t([a-z]\w+)(?:[ \t]+([^;]*?))?\s*(?:;.*)?$")
_AMD_NAMES = ("s_", "v_", "ds_", "global_", "buffer_", "flat_", "scratch_")


def read_amd(text: str, threads: int, bound: int | None = None, arguments: Mapping[int, int] | None = None) -> Code:
    """Assembly as clang writes it; its comments are not looked at."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif (match := _AMD.match(line)) and match[1].startswith(_AMD_NAMES):
            name, operands = match[1], match[2] or ""
            target = operands if name == "s_branch" or name.startswith("s_cbranch") else ""
            instructions.append(Instruction(name, operands, target, name in ("s_branch", "s_endpgm")))
    return Code(tuple(instructions), labels, "hip", threads, bound, arguments or {})


# ---- SASS

_SASS = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*(?:\(\*.*\*\))?\s*;")


def read_sass(text: str, threads: int, bound: int | None = None, arguments: Mapping[int, int] | None = None) -> Code:
    """The text of nvdisasm. Ways that only threads take which have parted from their warp are left out."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif match := _SASS.match(line):
            predicate, name, operands = match.groups()
            to = re.fullmatch(r"(.*)`\((\.L_x_\d+)\)", operands) if name.startswith("BRA") else None
            target = to[2] if to and name != "BRA.DIV" else ""
            always = not predicate and not (to and to[1])
            ends = always and (name in ("EXIT", "BRA") or name.startswith("RET"))
            instructions.append(Instruction(name, operands, target, ends, predicate or ""))
    return Code(tuple(instructions), labels, "cuda", threads, bound, arguments or {})
