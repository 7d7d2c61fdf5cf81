"""What SASS instructions do to integers and predicates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from qla.codegen.steps import SHIFT, Machine, State, Value, operands_of

if TYPE_CHECKING:
    from qla.codegen.machine_code import Instruction

_ARGUMENTS = 0x210  # where they begin in the constant bank


class Sass(Machine):
    """Predicated instructions but branches make what they write unknown."""

    _KNOWN = re.compile(r"S2R|U?ISETP|U?LDC|P?LOP3|U?MOV|U?IADD3|VIADD|IMAD\.(MOV|IADD)|SHF\.R\.U32")
    _COMPARISON = re.compile(r"U?ISETP\.(LT|LE|GT|GE|EQ|NE)(?:\.U32)?\.AND")

    def start(self) -> State:
        zero = self.all(0)
        return {"RZ": zero, "URZ": zero, "PT": self.all(True), "UPT": self.all(True)}

    def writes(self, instruction: Instruction) -> list[str]:
        name, operands = instruction.name, operands_of(instruction.operands)
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
        name = instruction.name
        if instruction.predicate or not self._KNOWN.match(name):
            return {}
        operands = [x.removesuffix(".reuse") for x in operands_of(instruction.operands)]
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
            return {operands[0]: known[2] >> (known[1] & SHIFT)}
        return {}

    def taken(self, state: State, branch: Instruction) -> bool | None:
        condition = self._condition(state, branch)
        return None if condition is None else bool(condition.any())

    def all_take(self, state: State, branch: Instruction) -> bool | None:
        condition = self._condition(state, branch)
        return None if condition is None or condition.any() != condition.all() else bool(condition.all())

    def _condition(self, state: State, branch: Instruction) -> Value | None:
        """Of ``@!P0 BRA`` or ``BRA.U !UP0``, by thread."""
        text = branch.predicate.removeprefix("@") or branch.operands.split(",")[0].strip()
        value = state.get(text.removeprefix("!"))
        return value if value is None or not text.startswith("!") else ~value

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
            given = self.arguments.get(int(match[1], 16) - _ARGUMENTS)
            return None if given is None else self.all(given)
        value = state.get(text)
        return None if value is None or value.dtype == bool else value
