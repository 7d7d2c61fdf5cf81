"""What AMD instructions do to integers, masks and conditions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from qla.codegen.steps import SHIFT, Machine, State, Value, operands_of

if TYPE_CHECKING:
    from qla.codegen.machine_code import Instruction

_WORD = 0xFFFFFFFF
_WAVE = 64
_ARGUMENTS = 1 << 40  # stands for their address

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
    "lshl": lambda a, b: a << (b & SHIFT),
    "lshr": lambda a, b: (a & _WORD) >> (b & SHIFT),
    "lshlrev": lambda a, b: b << (a & SHIFT),
    "lshrrev": lambda a, b: (b & _WORD) >> (a & SHIFT),
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "add3": lambda a, b, c: a + b + c,
    "or3": lambda a, b, c: a | b | c,
    "lshl_or": lambda a, b, c: a << (b & SHIFT) | c,
    "lshl_add": lambda a, b, c: (a << (b & SHIFT)) + c,
    "and_or": lambda a, b, c: a & b | c,
    "bfe": lambda a, b, c: (a & _WORD) >> (b & SHIFT) & ((1 << (c & SHIFT)) - 1),
}
_MASK: dict[str, Callable[..., Value]] = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
}


class Amd(Machine):
    """A wave has 64 threads, whose masks are pairs of scalar registers that go by the first."""

    _NAME = re.compile(r"([sv])_(\w+?)(?:_lo)?(_co)?_([biu])(16|32|64)(?:_u24)?(?:_e32|_e64)?$")
    _STORES = ("ds_write", "global_store", "buffer_store", "flat_store", "s_barrier", "s_waitcnt", "s_nop", "s_branch")

    def start(self) -> State:
        return {"v0": np.arange(self.threads), "exec": self.all(True), "s0": self.all(_ARGUMENTS)}

    def writes(self, instruction: Instruction) -> list[str]:
        name, operands = instruction.name, operands_of(instruction.operands)
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
        name, operands = instruction.name, operands_of(instruction.operands)
        if not name.startswith(("s_", "v_")) or name.startswith("v_mfma") or "_f32" in name:
            return {}
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
            return {} if value is None else {_registers(operands[0])[0]: value & self._active(state)}
        if name == "s_and_saveexec_b64":
            mask, before = self._mask(state, operands[1]), self._active(state)
            saved = {_registers(operands[0])[0]: before}
            return saved if mask is None else {**saved, "exec": before & mask}
        if name == "s_cselect_b64":
            scc, a, b = state.get("scc"), self._mask(state, operands[1]), self._mask(state, operands[2])
            if scc is None or a is None or b is None:
                return {}
            return {_registers(operands[0])[0]: np.where(scc, a, b)}
        if name.startswith("v_cndmask_b32") and len(operands) in (3, 4):
            a, b = self._number(state, operands[1]), self._number(state, operands[2])
            mask = self._mask(state, operands[3] if len(operands) == 4 else "vcc")
            return {} if a is None or b is None or mask is None else {operands[0]: np.where(mask, b, a)}
        if name == "v_readfirstlane_b32":
            value = self._number(state, operands[1])
            if value is None:
                return {}
            return {operands[0]: value.reshape(-1, _WAVE)[:, :1].repeat(_WAVE, axis=1).ravel()}
        match = self._NAME.match(name)
        if match is None or not operands:
            return {}
        unit, what, carry, _, bits = match.groups()
        to, given = operands[0], list(operands[1:])
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
        condition = self._condition(state, branch)
        return None if condition is None else bool(condition.any()) == branch.name.endswith(("nz", "1"))

    def all_take(self, state: State, branch: Instruction) -> bool | None:
        condition = self._condition(state, branch)
        if condition is None:
            return None
        any_of_wave = condition.reshape(-1, _WAVE).any(axis=1)
        return None if any_of_wave.any() != any_of_wave.all() else self.taken(state, branch)

    def _condition(self, state: State, branch: Instruction) -> Value | None:
        """What ``s_cbranch_scc0``, ``…_vccnz`` and the like look at."""
        return state.get(branch.name.removeprefix("s_cbranch_").rstrip("nz01"))

    def _loaded(self, state: State, operands: tuple[str, ...], words: int) -> dict[str, Value]:
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


def _registers(text: str) -> list[str]:
    """The registers of ``v3``, ``s[6:7]`` or ``vcc``; a mask goes by its first."""
    if match := re.fullmatch(r"([sva])\[(\d+):(\d+)\]", text):
        return [f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1)]
    return [text.split()[0]]


def _signed(value: Value) -> Value:
    return ((value & _WORD) ^ 0x80000000) - 0x80000000
