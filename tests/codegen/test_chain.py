"""The text that is emitted for a schedule keeps every promise.

Nothing here trusts the scheduler. The emitted text is read back and run on a small model of a Hopper warpgroup:
products are groups of work that retire in order, a ring's buffers land and are released, a register holds a symbolic
value. Where the text is right, no rule is broken and what is stored is the math of the design; where any one `land`,
`release` or `await` is taken out of it, the model must notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sources import SKEWED, declare

from qla.codegen.ops import OPS
from qla.codegen.schedule import Chain, build_chain
from qla.targets import TARGETS, Schedule

CHUNKS = range(1, 9)


class BrokenError(Exception):
    """The text breaks a rule."""


# Written down a second time, so that a mistake in the generator's own table shows. `d` is written and `x` read by
# work that goes on after the statement; `w` written, `r` read, `m` both, at once.
ASYNCHRONOUS = {"product": 1, "accumulate": 1, "product_rounded": 2}  # groups committed
AT_ONCE = {
    "to_operand": "wr", "load_operand": "wr", "load_rows": "wr", "add_scaled": "mrr", "subtract": "mr",
    "scaled_operand": "wrr", "scale_rows": "mr", "scale": "mr",
}  # fmt: skip


def place(part: str, index: int, line: str) -> str:
    return f"{part} line {index}: {line}"


@dataclass
class Group:
    """Products committed together."""

    writes: str
    reads: set[Any]  # registers, and buffers as (ring, chunk)


@dataclass
class Warpgroup:
    """A warpgroup that runs a chain for `chunks` chunks."""

    chain: Chain
    asynchronous: bool
    pending: list[Group] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # retired, but no await has named them yet
    landed: dict[str, int] = field(default_factory=dict)
    released: dict[str, set[int]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=lambda: {"S": "S0"})
    stored: dict[int, Any] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)
    useful: set[str] = field(default_factory=set)  # awaits that had something to wait for
    at: str = ""
    n: int = 0

    def run(self, chunks: int, unroll: int) -> None:
        """The loop as a target's template writes it."""
        chain = self.chain
        self.landed = {ring.name: 0 for ring in chain.rings}
        self.released = {ring.name: set() for ring in chain.rings}
        if not self.asynchronous:
            for self.n in range(chunks):
                self.lines("steady")
        else:
            self.lines("prologue")
            self.lines("drain")
            self.meet()
            ahead = bool(chain.prologue)
            while self.n + unroll + ahead <= chunks:
                for ring in chain.rings:
                    # The template tells the compiler the slot where the passes agree on it.
                    at_start = (self.landed[ring.name] - chain.landed_ahead[ring.name]) % ring.depth
                    if unroll % ring.depth == 0 and at_start:
                        raise BrokenError(f"ring {ring.name} starts a pass in another slot")
                for _ in range(unroll):
                    self.lines("steady")
                    self.n += 1
                self.lines("drain")
                self.meet()
            while self.n + ahead < chunks:
                self.lines("steady")
                self.n += 1
                self.lines("drain")
                self.meet()
            if ahead:
                self.lines("epilogue")
        self.meet()
        for ring, count in self.landed.items():
            if count != chunks:
                raise BrokenError(f"ring {ring} landed {count} times in {chunks} chunks")
            if len(self.released[ring]) != count:
                raise BrokenError(f"ring {ring} released {len(self.released[ring])} of {count} buffers")

    def meet(self) -> None:
        """Where paths meet nothing may be under way."""
        if self.pending or self.hidden:
            raise BrokenError("work is under way where paths meet")

    def lines(self, part: str) -> None:
        lines: list[str] = getattr(self.chain, part)
        for index, line in enumerate(lines):
            self.at = place(part, index, line)
            if line.startswith("//"):
                continue
            match = re.fullmatch(r"(\w+)(?:<([\d, ]+)>)?\((.*)\);", line)
            if match is None:
                raise BrokenError(f"cannot read {line}")
            numbers = [int(x) for x in match[2].split(",")] if match[2] else []
            arguments = [a.strip() for a in match[3].split(",") if a.strip()]
            if match[1] == "await":
                self.wait(numbers[0], arguments)
            elif match[1] == "land":
                self.land(arguments[0].removeprefix("ring_"))
            elif match[1] == "release":
                self.release(arguments[0].removeprefix("ring_"))
            else:
                self.verb(match[1], numbers, arguments)

    # ---- buffers

    def land(self, ring: str) -> None:
        depth = next(r.depth for r in self.chain.rings if r.name == ring)
        before = self.landed[ring] - depth
        if before >= 0 and before not in self.released[ring]:
            raise BrokenError(f"ring {ring} waits for ever: chunk {before} still has the buffer")
        self.landed[ring] += 1

    def release(self, ring: str) -> None:
        chunk = self.landed[ring] - 1
        if chunk < 0 or chunk in self.released[ring]:
            raise BrokenError(f"ring {ring} releases nothing")
        if any((ring, chunk) in group.reads for group in self.pending):
            raise BrokenError(f"ring {ring} is released while a product reads it")
        self.released[ring].add(chunk)

    # ---- work under way

    def wait(self, remaining: int, names: Sequence[str]) -> None:
        if len(self.pending) > remaining or self.hidden & set(names):
            self.useful.add(self.at)
        while len(self.pending) > remaining:
            self.hidden.add(self.pending.pop(0).writes)
        self.hidden -= {n for n in names if all(g.writes != n for g in self.pending)}

    def readable(self, name: str) -> None:
        if any(group.writes == name for group in self.pending):
            raise BrokenError(f"{name} is read while a product writes it")
        if name in self.hidden:
            raise BrokenError(f"{name} is read without an await that names it")
        if name not in self.values:
            raise BrokenError(f"{name} is read before it is written")

    def writable(self, name: str) -> None:
        if any(group.writes == name for group in self.pending) or name in self.hidden:
            raise BrokenError(f"{name} is written while a product writes it")
        if any(name in group.reads for group in self.pending):
            raise BrokenError(f"{name} is overwritten while a product reads it")

    def value(self, argument: str, buffers: set[Any]) -> Any:
        """What an argument holds; buffers that it lies in are added to the set."""
        transposed = re.fullmatch(r"transposed\((.*)\)", argument)
        inner = transposed[1] if transposed else argument
        of_ring = re.fullmatch(r"ring_(\w+)\.(\w+)\((?:stream)?\)(?:\.(\w+)\(\))?", inner)
        if of_ring is None:
            self.readable(argument)
            return self.values[argument]
        ring, tile, member = of_ring.groups()
        chunk = self.landed[ring] - 1
        if chunk < 0 or chunk in self.released[ring]:
            raise BrokenError(f"{tile} of chunk {chunk} is read outside its time")
        buffers.add((ring, chunk))
        return ("T" if transposed else "", member or tile, chunk)

    # ---- verbs

    def verb(self, verb: str, numbers: Sequence[int], arguments: Sequence[str]) -> None:
        part, parts = numbers or (0, 1)
        if verb in ("store_rows", "save_state"):
            self.readable(arguments[0])
            chunk = {"0": 0, "n": self.n, "n + 1": self.n + 1}[arguments[1]]
            kept = self.stored if verb == "store_rows" else self.saved
            if chunk in kept:
                raise BrokenError(f"chunk {chunk} is stored twice")
            kept[chunk] = self.values[arguments[0]]
        elif verb in ASYNCHRONOUS:
            self.product(verb, part, parts, arguments)
        else:
            self.at_once(verb, part, parts, arguments)

    def at_once(self, verb: str, part: int, parts: int, arguments: Sequence[str]) -> None:
        to, *others = arguments
        operands = [self.value(a, set()) for a in others]
        if AT_ONCE[verb][0] == "m":
            self.readable(to)
        self.writable(to)
        if verb in ("scale", "scale_rows"):
            self.values[to] = scaled(self.values[to], operands[0], part, parts)
            return
        if parts != 1:
            raise BrokenError(f"{verb} has no parts")
        before = (self.values[to],) if AT_ONCE[verb][0] == "m" else ()
        self.values[to] = (verb, *before, *operands)

    def product(self, verb: str, part: int, parts: int, arguments: Sequence[str]) -> None:
        to, tile, operand = arguments[:3]
        buffers: set[Any] = set()
        if verb == "product_rounded":
            block = self.value(arguments[3], buffers)
            self.writable(operand)
            self.values[operand] = ("to_operand", block)
        term = (self.value(tile, buffers), self.value(operand, set()), part, parts)
        if verb == "accumulate":
            # The products of one accumulator run in order; only its first value must be there.
            if to not in self.values:
                raise BrokenError(f"{to} accumulates on nothing")
            if to in self.hidden and all(group.writes != to for group in self.pending):
                raise BrokenError(f"{to} accumulates without an await that names it")
            self.values[to] = added(self.values[to], term)
        else:
            self.writable(to)
            self.values[to] = added(None, term)
        if self.asynchronous:
            self.pending += [Group(to, {operand, *buffers}) for _ in range(ASYNCHRONOUS[verb])]


def added(value: Any, term: tuple[Any, Any, int, int]) -> Any:
    """A sum with one more product; the parts of a product become one when the last of them arrives."""
    tile, operand, _, parts = term
    terms: frozenset[Any] = frozenset()
    if isinstance(value, tuple) and value[0] == "sum":
        value, terms = value[1:]
    if term in terms:
        raise BrokenError("a product is added twice")
    terms = terms | {term}
    siblings = {(tile, operand, part, parts) for part in range(parts)}
    if parts > 1 and siblings <= terms:
        terms = terms - siblings | {(tile, operand, 0, 1)}
    return ("sum", value, terms)


def scaled(value: Any, factor: Any, part: int, parts: int) -> Any:
    """A value times a factor; half of it where only one of two parts has been scaled."""
    if parts == 1:
        return ("scaled", factor, value)
    done: frozenset[int] = frozenset()
    if isinstance(value, tuple) and value[:2] == ("scaled in part", factor):
        done, value = value[2], value[3]
    if part in done:
        raise BrokenError("a part is scaled twice")
    done |= {part}
    return ("scaled", factor, value) if len(done) == parts else ("scaled in part", factor, done, value)


def expected(op: str, chunks: int) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """What is stored per chunk, the states at their starts, and the last state, by the formulas of the design."""
    delta, gate = OPS[op].delta, OPS[op].gate
    state: Any = "S0"
    stored, saved = {}, {}
    for n in range(chunks):
        saved[n] = state
        rounded = ("to_operand", state)
        out: Any = added(None, (("", "Q", n), rounded, 0, 1))
        values: Any = ("load_operand", ("", "V", n))
        if delta:
            U = added(None, (("", "K", n), rounded, 0, 1))
            minus_in = ("load_rows", ("", "minus_in", n))
            W = ("subtract", values, U) if gate == "channel" else ("add_scaled", values, minus_in, U)
            values = ("to_operand", added(None, (("", "A", n), W, 0, 1)))
        if gate != "channel":
            out = scaled(out, ("load_rows", ("", "out", n)), 0, 1)
        if gate != "none":
            state = scaled(state, ("", "decay", n), 0, 1)
        keys = "Kt" if gate == "channel" else "K"
        left = values if gate == "channel" else ("scaled_operand", ("load_rows", ("", "left", n)), values)
        state = added(state, (("T", keys, n), left, 0, 1))
        stored[n] = ("to_operand", added(out, (("", "P", n), values, 0, 1)))
    return stored, saved, state


def check(op: str, saves: bool, chain: Chain, asynchronous: bool, unroll: int) -> set[str]:
    """Run the chain for several lengths; raise `BrokenError` where a rule is broken or a result is not the math.

    Returns the awaits that had something to wait for at least once.
    """
    useful: set[str] = set()
    for chunks in CHUNKS:
        group = Warpgroup(chain, asynchronous)
        group.run(chunks, unroll)
        stored, saved, state = expected(op, chunks)
        if group.stored != stored:
            raise BrokenError("another output")
        if group.saved != (saved if saves else {}):
            raise BrokenError("another saved state")
        if group.values["S"] != state:
            raise BrokenError("another state")
        useful |= group.useful
    return useful


def kernels() -> Iterator[Any]:
    for target in TARGETS.values():
        for schedule in target.schedules:
            for op in OPS:
                for saves in (False, True):
                    name = f"{target.name}-{schedule.name}-{op}{'-saves' if saves else ''}"
                    yield pytest.param(op, saves, schedule, target.asynchronous, id=name)


every_kernel = pytest.mark.parametrize(("op", "saves", "schedule", "asynchronous"), list(kernels()))


@every_kernel
def test_the_emitted_text_keeps_all_rules_and_is_the_math(
    op: str, saves: bool, schedule: Schedule, asynchronous: bool
) -> None:
    chain = build_chain(declare(op, saves), schedule, asynchronous)
    check(op, saves, chain, asynchronous, schedule.unroll)


def mutants(chain: Chain, pattern: str, change: Callable[[str], str]) -> Iterator[tuple[str, Chain]]:
    """The chain with one line changed (taken out where it becomes empty), for each line that matches."""
    for part in ("prologue", "steady", "drain", "epilogue"):
        lines: list[str] = getattr(chain, part)
        for at, line in enumerate(lines):
            if re.match(pattern, line):
                changed = change(line)
                text = [*lines[:at], *([changed] if changed else []), *lines[at + 1 :]]
                yield place(part, at, line), replace(chain, **{part: text})


def weaker(line: str) -> str:
    return re.sub(r"<(\d+)>", lambda m: f"<{int(m[1]) + 1}>", line)


def nameless(line: str) -> str:
    return re.sub(r"\(.*\)", "()", line)


@every_kernel
@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        pytest.param("land", lambda line: "", id="no-land"),
        pytest.param("release", lambda line: "", id="no-release"),
        pytest.param("await", lambda line: "", id="no-await"),
        pytest.param("await", weaker, id="weaker-await"),
        pytest.param(r"await<\d+>\(\w", nameless, id="nameless-await"),
    ],
)
def test_every_line_of_the_protocol_is_needed(
    op: str, saves: bool, schedule: Schedule, asynchronous: bool, pattern: str, change: Callable[[str], str]
) -> None:
    chain = build_chain(declare(op, saves), schedule, asynchronous)
    useful = check(op, saves, chain, asynchronous, schedule.unroll)
    unnoticed, count = [], 0
    for name, mutant in mutants(chain, pattern, change):
        count += 1
        try:
            check(op, saves, mutant, asynchronous, schedule.unroll)
        except BrokenError:
            continue
        unnoticed.append(name)
    # Before the rest of the last chunk everything has been awaited, so there the steady state's waits may find nothing
    # under way. No other line may be idle.
    idle = [name for name in unnoticed if name.startswith("epilogue line") and "await" in name and name not in useful]
    if idle:
        print(f"{len(idle)} awaits find nothing under way: {', '.join(idle)}")
    assert unnoticed == idle
    assert count or (not asynchronous and pattern.startswith("await"))


def test_products_are_not_awaited_sooner_than_needed() -> None:
    """The skewed order keeps work under way: no wait in its main loop but those that the math asks for."""
    for op in OPS:
        steady = build_chain(declare(op), SKEWED, True).steady
        waits = [line for line in steady if line.startswith("await")]
        assert any(not line.startswith("await<0>") for line in waits), waits


@pytest.mark.parametrize("op", OPS)
def test_a_tile_may_be_landed_before_its_first_use(op: str) -> None:
    """Where the order says so, and no differently otherwise."""
    order = list(SKEWED.order)
    order[order.index("O") : order.index("O")] = ["land P"]
    order.insert(0, "land P")
    schedule = replace(SKEWED, order=tuple(order))
    chain = build_chain(declare(op), schedule, True)
    assert chain.steady[0] == "land(ring_P);"
    assert chain.steady.count("land(ring_P);") == 1
    check(op, False, chain, True, schedule.unroll)
