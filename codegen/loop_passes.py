"""How often a loop of machine code runs, by running what decides it: integers, masks and conditions, for all threads.

Only what follows from constants and the thread's number is known; arguments and memory are not, nor is a register whose
value depends on the way taken. A loop that such a value ends has no known number of passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from qla.codegen.machine_code import Code, Instruction, Loop

# A number per thread; masks and predicates are booleans. What is unknown is not in the state.
Value = npt.NDArray[np.int64] | npt.NDArray[np.bool_]
State = dict[str, Value]

_MOST = 300  # a loop that runs longer is taken for unknown
_WORD = 0xFFFFFFFF
_WAVE = 64
_ARGUMENTS = 1 << 40  # stands for their address
_CUDA_ARGUMENTS = 0x210  # where they begin in the constant bank


@dataclass(frozen=True)
class Flow:
    """What is known of the ways through a kernel.

    Parameters
    ----------
    passes : by the header, of loops that always run equally often; most of all threads, where these differ.
    dead : pairs of a block and one after it, where no thread goes.
    """

    passes: dict[int, int]
    dead: frozenset[tuple[int, int]]


def flow_of(code: Code) -> Flow:
    """Run what decides ways, with the arguments that are given."""
    machine = _Amd if code.language == "hip" else _Sass
    run = _Run(code, machine(code))
    passes = run.passes()
    return Flow(passes, frozenset(run.dead))


class _Run:
    """One way through a kernel, in which each block begins with what all ways to it agree on."""

    def __init__(self, code: Code, machine: _Machine) -> None:
        self.code, self.machine = code, machine
        self.dead: set[tuple[int, int]] = set()
        self.place = {block: n for n, block in enumerate(code.order)}
        self.inside = {loop.header: loop for loop in code.natural_loops}
        self.written = {
            loop.header: {
                name for block in loop.blocks for i in code.block(block) for name in machine.writes(i)
            }
            for loop in code.natural_loops
        }  # fmt: skip

    def passes(self) -> dict[int, int]:
        once: dict[int, State] = {}
        self._walk(self.code.order, 0, self.machine.start(), once, prune=True)
        self.machine.guesses = True
        entries = {header: [state] for header, state in once.items()}
        found = {}
        for loop in reversed(self.code.natural_loops):  # outer ones first: inner ones may depend on their pass
            within: dict[int, list[State]] = {}
            counts = [self._simulate(loop, state, within) for state in entries.get(loop.header, [])]
            known = [count for count in counts if count is not None]
            if counts and len(known) == len(counts):
                found[loop.header] = max(known)
                # Of a loop that ends where it is known to, all passes have been seen.
                entries |= within
        return found

    def _walk(
        self, blocks: Iterable[int], entry: int, start: State, entries: dict[int, State], prune: bool = False
    ) -> dict[int, State]:
        """States at the end of these blocks, in order; `entries` gets those before each loop, `dead` ways not taken."""
        states: dict[int, State] = {entry: dict(start)}
        ends: dict[int, State] = {}
        for block in blocks:
            state = states.get(block)
            if state is None:
                continue
            if block in self.inside:
                entries[block] = dict(state)
                if block != entry:
                    for name in self.written[block]:
                        state.pop(name, None)
            for instruction in self.code.block(block):
                self.machine.step(state, instruction)
            ends[block] = state
            if prune:
                self.dead |= {(block, follower) for follower in self._not_taken(block, state)}
            for follower in self.code.followers[block]:
                if self.place[follower] > self.place[block] and (block, follower) not in self.dead:
                    before = states.get(follower)
                    states[follower] = dict(state) if before is None else _agreed(before, state)
        return ends

    def _simulate(self, loop: Loop, state: State, entries: dict[int, list[State]]) -> int | None:
        """Passes of a loop that begins with this state; `entries` gets the states before the loops in it."""
        inner = [block for block in self.code.order if block in loop.blocks]
        running, last = -1, None
        for count in range(1, _MOST):
            before: dict[int, State] = {}
            ends = self._walk(inner, loop.header, state, before)
            for header, entry in before.items():
                if header != loop.header:
                    entries.setdefault(header, []).append(entry)
            following: State | None = None
            for block in inner:
                if block not in ends:
                    continue
                followers = [f for f in self.code.followers[block] if (block, f) not in self.dead]
                out = [f for f in followers if f not in loop.blocks]
                leaves = self._leaves(block, out, ends[block]) if out else False
                if leaves is None:
                    return None
                if leaves:
                    return count
                if loop.header in followers:
                    following = ends[block] if following is None else _agreed(following, ends[block])
            if following is None:
                return None
            state = following
            left = int(state["exec"].sum()) if "exec" in state else running
            if left < running:
                last = count
            running = left
        # Threads that never entered may seem to go round for ever; those that did are out.
        return last

    def _leaves(self, block: int, out: list[int], state: State) -> bool | None:
        """Whether the loop ends after this block, which has a way out of it."""
        last = self.code.block(block)[-1]
        if all(f in out or (block, f) in self.dead for f in self.code.followers[block]):
            return True
        taken = self.machine.taken(state, last)
        to = self.code.block_of(last.target)
        return None if taken is None else taken == (to in out)


    def _not_taken(self, block: int, state: State) -> list[int]:
        """Of two blocks after this one, the one to which no thread goes, where that is known."""
        followers, last = self.code.followers[block], self.code.block(block)[-1]
        if len(followers) < 2 or (taken := self.machine.all_take(state, last)) is None:
            return []
        to = self.code.block_of(last.target)
        return [f for f in followers if (f == to) != taken]


def _agreed(a: State, b: State) -> State:
    same = {}
    for name, value in a.items():
        other = b.get(name)
        if other is value or (other is not None and np.array_equal(other, value)):
            same[name] = value
    return same


class _Machine:
    """What instructions do to a state. Whatever is not listed makes what it writes unknown."""

    def __init__(self, code: Code) -> None:
        self.threads, self.arguments, self.bound = code.threads, code.arguments, code.bound
        self.guesses = False  # whether `bound` is taken for what is not known

    def compared(self, kind: str, a: Value | None, b: Value | None) -> Value | None:
        """Of two numbers one of which may be unknown: see `Code.bound`."""
        if self.guesses and self.bound is not None and (a is None) != (b is None):
            a, b = (self.all(self.bound) if x is None else x for x in (a, b))
        return None if a is None or b is None else _COMPARE[kind](a, b)

    def start(self) -> State:
        raise NotImplementedError

    def writes(self, instruction: Instruction) -> list[str]:
        """Registers that an instruction writes."""
        raise NotImplementedError

    def result(self, state: State, instruction: Instruction) -> dict[str, Value]:
        """What is known of them afterwards."""
        raise NotImplementedError

    def taken(self, state: State, branch: Instruction) -> bool | None:
        """Whether a branch is, by any thread; None where that is not known."""
        raise NotImplementedError

    def all_take(self, state: State, branch: Instruction) -> bool | None:
        """The same, where all waves do alike; None where not."""
        raise NotImplementedError

    def step(self, state: State, instruction: Instruction) -> None:
        """Run one instruction."""
        known = self.result(state, instruction)
        for name in self.writes(instruction):
            state.pop(name, None)
        state.update(known)

    def all(self, number: int | bool) -> Value:
        """The same for all threads."""
        return np.full(self.threads, number)


_COMPARE: dict[str, Callable[[Value, Value], Value]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "lg": np.not_equal,
}  # fmt: skip
_SHIFT = 31
# By name without its prefix and the type behind: operands in the order of the text.
_INTEGER: dict[str, Callable[..., Value]] = {
    "mov": lambda a: a,
    "movk": lambda a: a,
    "add": lambda a, b: a + b,
    "addk": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "subrev": lambda a, b: b - a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "lshl": lambda a, b: a << (b & _SHIFT),
    "lshr": lambda a, b: (a & _WORD) >> (b & _SHIFT),
    "lshlrev": lambda a, b: b << (a & _SHIFT),
    "lshrrev": lambda a, b: (b & _WORD) >> (a & _SHIFT),
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "add3": lambda a, b, c: a + b + c,
    "or3": lambda a, b, c: a | b | c,
    "lshl_or": lambda a, b, c: a << (b & _SHIFT) | c,
    "lshl_add": lambda a, b, c: (a << (b & _SHIFT)) + c,
    "and_or": lambda a, b, c: a & b | c,
    "bfe": lambda a, b, c: (a & _WORD) >> (b & _SHIFT) & ((1 << (c & _SHIFT)) - 1),
}
_MASK: dict[str, Callable[..., Value]] = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
}


class _Amd(_Machine):
    _NAME = re.compile(r"([sv])_(\w+?)(?:_lo)?(_co)?_([biu])(16|32|64)(?:_u24)?(?:_e32|_e64)?$")
    _STORES = ("ds_write", "global_store", "buffer_store", "flat_store", "s_barrier", "s_waitcnt", "s_nop", "s_branch")

    def start(self) -> State:
        return {"v0": np.arange(self.threads), "exec": self.all(True), "s0": self.all(_ARGUMENTS)}

    def writes(self, instruction: Instruction) -> list[str]:
        name, operands = instruction.name, _operands(instruction.operands)
        if name.startswith(("s_cmp", "s_bitcmp")):
            return ["scc"]
        if name.startswith((*self._STORES, "s_cbranch")) or not operands:
            return []
        found = _registers(operands[0])
        if name.startswith("v_cmp") and name.endswith("_e32"):
            return ["vcc"]
        if "_co_" in name and len(operands) > 1:
            found += _registers(operands[1])
        if "saveexec" in name:
            found.append("exec")
        quiet = ("s_mov", "s_cselect", "s_mul", "s_load")  # leave the condition as it is
        return found if name.startswith("v_") or name.startswith(quiet) else [*found, "scc"]

    def result(self, state: State, instruction: Instruction) -> dict[str, Value]:
        name, operands = instruction.name, _operands(instruction.operands)
        if match := re.fullmatch(r"s_load_dword(?:x(\d+))?", name):
            return self._loaded(state, operands, int(match[1] or 1))
        if match := re.fullmatch(r"s_bitcmp([01])_b32", name):
            a, b = (self._number(state, x) for x in operands)
            return {} if a is None or b is None else {"scc": (a >> b & 1) == int(match[1])}
        if match := re.fullmatch(r"s_cmpk?_(\w\w)_[iu]32", name):
            value = self.compared(match[1], *(self._number(state, x) for x in operands))
            return {} if value is None else {"scc": value}
        if match := re.fullmatch(r"v_cmp_(\w\w)_[iu]32(?:_e32|_e64)?", name):
            value = self.compared(match[1], *(self._number(state, x) for x in operands[1:]))
            return {} if value is None else {_registers(operands[0])[0]: value}
        if name == "s_and_saveexec_b64":
            mask, before = self._mask(state, operands[1]), self._active(state)
            saved = {_registers(operands[0])[0]: before}
            return saved if mask is None else {**saved, "exec": before & mask}
        if name == "s_cselect_b64":
            scc, a, b = state.get("scc"), self._mask(state, operands[1]), self._mask(state, operands[2])
            unknown = scc is None or a is None or b is None
            return {} if unknown else {_registers(operands[0])[0]: np.where(scc, a, b)}  # type: ignore[arg-type]
        if name.startswith("v_cndmask_b32") and len(operands) in (3, 4):
            a, b = self._number(state, operands[1]), self._number(state, operands[2])
            mask = self._mask(state, operands[3] if len(operands) == 4 else "vcc")
            unknown = a is None or b is None or mask is None
            return {} if unknown else {operands[0]: np.where(mask, b, a)}  # type: ignore[arg-type]
        if name == "v_readfirstlane_b32":
            value = self._number(state, operands[1])
            return {} if value is None else {operands[0]: value.reshape(-1, _WAVE)[:, :1].repeat(_WAVE, axis=1).ravel()}
        match = self._NAME.match(name)
        if match is None or not operands:
            return {}
        unit, what, carry, _, bits = match.groups()
        to, given = operands[0], operands[1:]
        if unit == "s" and bits == "64":
            # A loop takes threads out of all those that may run.
            leaves = to == "exec" and what == "andn2"
            masks = [self._active(state) if leaves and x == "exec" else self._mask(state, x) for x in given]
            if what not in _MASK or any(x is None for x in masks):
                return {"exec": self.all(True)} if to == "exec" and not leaves else {}  # threads come back
            return {_registers(to)[0]: _MASK[what](*masks)}
        if bits != "32" or (unit == "s" and what == "bfe"):
            return {}
        if carry:
            given = given[1:]
        if what == "addk":
            given = [to, *given]
        numbers = [self._number(state, x) for x in given]
        operation = _INTEGER.get(what)
        if operation is None or any(x is None for x in numbers):
            return {}
        value = operation(*numbers)
        known = {_registers(operands[1])[0]: value > _WORD} if carry else {}
        return {**known, to: _signed(value) if unit == "s" else value & _WORD}

    def taken(self, state: State, branch: Instruction) -> bool | None:
        kind = branch.name.removeprefix("s_cbranch_")
        condition = state.get(kind.rstrip("nz01"))
        if condition is None:
            return None
        return bool(condition.any()) == kind.endswith(("nz", "1"))

    def all_take(self, state: State, branch: Instruction) -> bool | None:
        condition = state.get(branch.name.removeprefix("s_cbranch_").rstrip("nz01"))
        if condition is None:
            return None
        any_of_wave = condition.reshape(-1, _WAVE).any(axis=1)
        return None if any_of_wave.any() != any_of_wave.all() else self.taken(state, branch)

    def _loaded(self, state: State, operands: list[str], words: int) -> dict[str, Value]:
        address, offset = state.get(_registers(operands[1])[0]), self._number(state, operands[2])
        if address is None or address[0] != _ARGUMENTS or offset is None:
            return {}
        names = _registers(operands[0])
        given = {name: self.arguments.get(int(offset[0]) + 4 * n) for n, name in enumerate(names[:words])}
        return {name: self.all(value) for name, value in given.items() if value is not None}

    def _active(self, state: State) -> Value:
        """The threads that may run: all, where that is not known."""
        return state.get("exec", self.all(True))

    def _number(self, state: State, text: str) -> Value | None:
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", text):
            return self.all(int(text, 0))
        value = state.get(text)
        return None if value is None or value.dtype == bool else value

    def _mask(self, state: State, text: str) -> Value | None:
        if text in ("0", "-1"):
            return self.all(text == "-1")
        value = state.get(_registers(text)[0])
        return value if value is not None and value.dtype == bool else None


def _operands(text: str) -> list[str]:
    return [x.strip() for x in re.split(r",(?![^\[]*\])", text) if x.strip()]


def _registers(text: str) -> list[str]:
    """The registers of ``v3``, ``s[6:7]`` or ``vcc``; a mask goes by its first."""
    if match := re.fullmatch(r"([sva])\[(\d+):(\d+)\]", text):
        return [f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1)]
    return [text.split()[0]]


def _signed(value: Value) -> Value:
    return ((value & _WORD) ^ 0x80000000) - 0x80000000


class _Sass(_Machine):
    _COMPARISON = re.compile(r"U?ISETP\.(LT|LE|GT|GE|EQ|NE)(?:\.U32)?\.AND")

    def start(self) -> State:
        zero = self.all(0)
        return {"RZ": zero, "URZ": zero, "PT": self.all(True), "UPT": self.all(True)}

    def writes(self, instruction: Instruction) -> list[str]:
        name, operands = instruction.name, _operands(instruction.operands)
        if name.startswith(("ST", "BRA", "RED", "BAR", "EXIT")):
            return []
        found = [x for x in operands[:1] if re.fullmatch(r"U?[RP]\d+", x)]
        found += [x for x in operands[1:2] if re.fullmatch(r"U?P\d+", x)]
        if found and "R" in found[0]:
            number, kind = int(found[0].lstrip("UR")), found[0].rstrip("0123456789")
            width = 4 if any(x in name for x in ("128", "MMA", "LDSM")) else 2 if "64" in name or "WIDE" in name else 1
            found += [f"{kind}{number + n}" for n in range(1, width)]
        return found

    def result(self, state: State, instruction: Instruction) -> dict[str, Value]:
        name, operands = instruction.name, [x.removesuffix(".reuse") for x in _operands(instruction.operands)]
        if instruction.predicate or not operands:
            return {}
        if name == "S2R" and operands[1] == "SR_TID.X":
            return {operands[0]: np.arange(self.threads)}
        if (match := self._COMPARISON.match(name)) and operands[-1].endswith("PT"):
            value = self.compared(match[1].lower(), *(self._number(state, x) for x in operands[2:4]))
            return {} if value is None else {operands[0]: value}
        if name in ("LDC.64", "ULDC.64"):
            return self._loaded(state, operands)
        if name == "LOP3.LUT" and operands[0].startswith("P") and operands[5:] == ["0xc0", "!PT"]:
            a, b = (self._number(state, x) for x in operands[2:4])
            return {} if a is None or b is None else {operands[0]: (a & b) != 0}
        if name == "PLOP3.LUT" and operands[2:4] == ["PT", "PT"] and operands[5] == "0x80":
            value = state.get(operands[4])
            return {} if value is None else {operands[0]: value}
        given = [x for x in operands[1:] if not re.fullmatch(r"!?U?P[T\d]", x)]
        numbers = [self._number(state, x) for x in given]
        if any(x is None for x in numbers):
            return {}
        known = [x for x in numbers if x is not None]
        if name in ("MOV", "UMOV", "IMAD.MOV.U32", "LDC", "ULDC", "LDC.U8", "ULDC.U8"):
            return {operands[0]: known[-1] & 0xFF if name.endswith("U8") else known[-1]}
        if name in ("IADD3", "UIADD3", "VIADD", "IMAD.IADD"):
            factor = known[1:2] if name == "IMAD.IADD" else []
            return {operands[0]: sum(known, self.all(0)) - sum(factor, self.all(0))}
        if name == "LOP3.LUT" and given[-1] == "0xc0":
            return {operands[0]: known[0] & known[1]}
        if name == "SHF.R.U32.HI" and given[0] == "RZ":
            return {operands[0]: known[2] >> (known[1] & _SHIFT)}
        return {}

    def taken(self, state: State, branch: Instruction) -> bool | None:
        text = branch.predicate.removeprefix("@") or branch.operands.split(",")[0].strip()
        condition = state.get(text.removeprefix("!"))
        if condition is None:
            return None
        return bool((~condition if text.startswith("!") else condition).any())

    def all_take(self, state: State, branch: Instruction) -> bool | None:
        text = branch.predicate.removeprefix("@") or branch.operands.split(",")[0].strip()
        condition = state.get(text.removeprefix("!"))
        if condition is None or condition.any() != condition.all():
            return None
        return bool(condition.all()) != text.startswith("!")

    def _loaded(self, state: State, operands: list[str]) -> dict[str, Value]:
        """Two words of the constant bank."""
        place = re.fullmatch(r"c\[0x0\]\[0x([0-9a-f]+)\]", operands[1])
        if place is None:
            return {}
        first, kind = int(operands[0].lstrip("UR")), operands[0].rstrip("0123456789")
        words = ((n, self._number(state, f"c[0x0][{int(place[1], 16) + 4 * n:#x}]")) for n in range(2))
        return {f"{kind}{first + n}": word for n, word in words if word is not None}

    def _number(self, state: State, text: str) -> Value | None:
        if re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", text):
            return self.all(int(text, 0))
        if match := re.fullmatch(r"c\[0x0\]\[0x([0-9a-f]+)\]", text):
            given = self.arguments.get(int(match[1], 16) - _CUDA_ARGUMENTS)
            return None if given is None else self.all(given)
        value = state.get(text)
        return None if value is None or value.dtype == bool else value
