"""Integers, masks and conditions of all threads, and what instructions of some machine do to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from qla.codegen.machine_code import Code, Instruction

# A number per thread; masks and predicates are booleans. What is unknown is not in the state.
Value = npt.NDArray[np.int64] | npt.NDArray[np.bool_]
State = dict[str, Value]

SHIFT = 31

COMPARE: dict[str, Callable[[Value, Value], Value]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "lg": np.not_equal,
}  # fmt: skip


class Machine:
    """What instructions do to a state. Whatever is not listed makes what it writes unknown."""

    def __init__(self, code: Code) -> None:
        self.threads, self.arguments, self.bound = code.threads, code.arguments, code.bound
        self.guesses = False  # whether `bound` is taken for what is not known
        self._written: dict[Instruction, tuple[str, ...]] = {}

    def compared(self, kind: str, a: Value | None, b: Value | None) -> Value | None:
        """Of two numbers one of which may be unknown: see `Code.bound`."""
        if self.guesses and self.bound is not None and (a is None) != (b is None):
            a, b = (self.all(self.bound) if x is None else x for x in (a, b))
        return None if a is None or b is None else COMPARE[kind](a, b)

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
        for name in self.written(instruction):
            state.pop(name, None)
        state.update(known)

    def written(self, instruction: Instruction) -> tuple[str, ...]:
        """What `writes` says, remembered: loops run the same instructions again and again."""
        found = self._written.get(instruction)
        if found is None:
            found = self._written[instruction] = tuple(self.writes(instruction))
        return found

    def all(self, number: int | bool) -> Value:
        """The same for all threads."""
        return np.full(self.threads, number)


@lru_cache(1 << 14)
def operands_of(text: str) -> tuple[str, ...]:
    """The parts of what stands after an instruction's name."""
    return tuple(x.strip() for x in re.split(r",(?![^\[]*\])", text) if x.strip())
