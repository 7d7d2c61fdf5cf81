"""How often loops run and which ways are taken, by running what decides it for all threads.

Only what follows from constants, from the thread's number and from given arguments is known; memory is not, nor is a
register whose value depends on the way taken. A loop that such a value ends has no known number of passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qla.codegen.steps import Machine, State
from qla.codegen.steps_amd import Amd
from qla.codegen.steps_sass import Sass

if TYPE_CHECKING:
    from qla.codegen.machine_code import Code, Loop

_MOST = 300  # a loop that runs longer is taken for unknown


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
    machine = Amd if code.language == "hip" else Sass
    run = _Run(code, machine(code))
    passes = run.passes()
    return Flow(passes, frozenset(run.dead))


class _Run:
    """One way through a kernel, in which each block begins with what all ways to it agree on."""

    def __init__(self, code: Code, machine: Machine) -> None:
        self.code, self.machine = code, machine
        self.dead: set[tuple[int, int]] = set()
        self.place = {block: n for n, block in enumerate(code.order)}
        self.inside = {loop.header: loop for loop in code.natural_loops}
        self.written = {
            loop.header: {name for block in loop.blocks for i in code.block(block) for name in machine.written(i)}
            for loop in code.natural_loops
        }

    def passes(self) -> dict[int, int]:
        """By loop header; ways that are never taken are in `dead` then."""
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
