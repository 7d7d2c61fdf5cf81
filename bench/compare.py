"""Two versions side by side: rounds of fresh processes, interleaved, with A twice as a control.

A round starts three processes: A, A again, and B. For each case every process makes its call, and then they take turns,
in shuffled order, a few tens of milliseconds each. What drifts (clocks, neighbours, heat) touches neighbours in time
alike and goes out of their ratio; what differs from process to process (memory, alignment) shows between rounds.

On a CPU each process is pinned to one core and timed by processor time; rounds take turns with the cores. Addresses are
not random there, but differ from round to round: what they make faster or slower, they do to all three.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qla.bench.isolate import Process, Setup, WorkerError
from qla.bench.runner import append
from qla.bench.subjects import Subject, SubjectError
from qla.bench.verdict import Interval, Verdict, classify, conclude, paired, unpaired
from qla.bench.worker import CPU_TOKENS, CPU_VALUE_HEADS
from qla.bench.workloads import Case

__all__ = ["Comparer", "Line", "between_files", "distinct", "lines"]

Row = dict[str, Any]
SIDES = ("A", "control", "B")
_PAD, _PAGE = "QLA_BENCH_PAD", 4096


@dataclass(frozen=True)
class Line:
    """What came out for one case.

    Parameters
    ----------
    op, workload, dtype : of the case.
    a, b : milliseconds.
    ratio : logarithm of b to a.
    control : of a to itself; None where there was none.
    verdict : on b.
    """

    op: str
    workload: str
    dtype: str
    a: float
    b: float
    ratio: Interval
    control: Interval | None
    verdict: Verdict


def distinct(cases: Sequence[Case]) -> list[Case]:
    """Cases that differ when reduced for a CPU, the first of each kind."""
    found: dict[str, Case] = {}
    for case in cases:
        small = case.shrink(CPU_TOKENS, CPU_VALUE_HEADS)
        work = [small.op, small.dtype, sorted(small.shapes.items()), small.lengths, sorted(small.options.items())]
        found.setdefault(json.dumps(work), case)
    return list(found.values())


@dataclass
class Comparer:
    """Measures rounds.

    Parameters
    ----------
    a, b : the two sides.
    device : ``cuda`` or ``cpu``.
    samples : file that measurements are appended to and continued from; None keeps none.
    blocks : turns of each process per case and round.
    repetitions : of a call in a turn, on a GPU.
    patience : seconds after which a process that gives no answer is given up.
    budget : seconds after which no further round begins for a case.
    slowdown : factor by which calls of b are made longer.
    """

    a: Subject
    b: Subject
    device: str
    samples: Path | None = None
    blocks: int = 5
    repetitions: int = 5
    patience: float = 300.0
    budget: float = math.inf
    slowdown: float = 1.0
    seed: int = 0

    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by case, where a side cannot run it."""

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.budget
        self._random = random.Random(self.seed)
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._measured: dict[tuple[int, int, str], Row] = {}
        # Started at once, to learn what is compared; the first round takes them over.
        self._waiting = self._new(SIDES, 0)
        self.hello = {side: process.hello for side, process in self._waiting.items()}
        self._load()

    def __enter__(self) -> Comparer:
        return self

    def __exit__(self, *error: object) -> None:
        self._give_up()

    def _give_up(self) -> None:
        for process in self._waiting.values():
            process.close()
        self._waiting.clear()

    @property
    def identity(self) -> Row:
        """What samples must agree in to belong together."""
        machine = self.hello["A"]["machine"]
        return {
            "device": machine["device"], "a": machine["code"], "b": self.hello["B"]["machine"]["code"],
            "timer": self.hello["A"]["timer"], **({"slowdown": self.slowdown} if self.slowdown != 1 else {}),
        }  # fmt: skip

    def _load(self) -> None:
        if self.samples is None or not self.samples.exists():
            return
        for text in self.samples.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(text)
            except json.JSONDecodeError:  # cut short
                continue
            if {name: row.get(name) for name in self.identity} == self.identity:
                self._measured[row["pass"], row["round"], row["case"]] = row

    def _start(self, stack: ExitStack, processes: dict[str, Process], number: int) -> None:
        """Have a process of each side: those that wait, and new ones for what is missing or gone."""
        for side, process in self._waiting.items():
            processes[side] = process
            stack.callback(process.close)
        self._waiting.clear()
        missing = [side for side in self._shuffled() if side not in processes or not processes[side].running]
        for side, process in self._new(missing, number).items():
            processes[side] = process
            stack.callback(process.close)

    def _new(self, sides: Sequence[str], number: int) -> dict[str, Process]:
        """Processes of a round, which start at the same time."""
        found = {side: self._process(side, number) for side in sides}
        for side, process in found.items():
            subject, hello = self.b if side == "B" else self.a, process.hello
            reason = hello.get("reason", "Python imports qla from elsewhere")
            if hello["status"] != "ok" or not Path(hello["home"]).is_relative_to(subject.folder):
                for other in found.values():
                    other.close()
                raise SubjectError(f"{side} ({subject.label}): {reason}")
        return found

    def _process(self, side: str, number: int) -> Process:
        subject = self.b if side == "B" else self.a
        cpu = self.device == "cpu"
        core = self._cores[number % len(self._cores)] if cpu else -1
        slowdown = self.slowdown if side == "B" else 1.0
        setup = Setup("qla", self.device, self.repetitions, core, trace=False, slowdown=slowdown)
        # The environment lies above the stack, and so moves it.
        pad = {_PAD: "-" * random.Random(number).randrange(1, _PAGE)}
        return Process(setup, [str(subject.folder)], pad, subject.python, settled=cpu)

    def _warm(self, processes: Mapping[str, Process], cases: Sequence[Case]) -> None:
        """Have the kernels of both versions compiled; what cannot be, shows where it is called."""
        for side in ("A", "B"):
            with suppress(WorkerError):
                wait = min(self.patience, max(self._until - time.monotonic(), 1.0))
                processes[side].ask({"warm": [asdict(case) for case in cases]}, wait)

    def run(self, part: int, cases: Sequence[Case], rounds: int, done: Callable[[], None]) -> bool:
        """Measure what is missing of the rounds; returns whether nothing is missing any more.

        Parameters
        ----------
        part : 1, or 2 for the rerun.
        cases : to measure.
        rounds : of each.
        done : called after each case of each round, also where it was measured before.
        """
        for number in range(rounds):
            todo = []
            for case in cases:
                if case.name in self.failed or (part, number, case.name) in self._measured:
                    done()
                else:
                    todo.append(case)
            self._random.shuffle(todo)
            if todo and not self._round(part, number, todo, done):
                return False
        return True

    def _round(self, part: int, number: int, cases: Sequence[Case], done: Callable[[], None]) -> bool:
        if number or part > 1:
            self._give_up()  # theirs was another round
        if time.monotonic() > self._until:
            return False
        with ExitStack() as stack:
            processes: dict[str, Process] = {}
            self._start(stack, processes, number)
            if not number and part == 1:
                self._warm(processes, cases)
            for case in cases:
                if time.monotonic() > self._until:
                    return False
                self._start(stack, processes, number)
                try:
                    times = self._case(processes, case)
                except WorkerError as error:
                    self.failed[case.name] = str(error)
                else:
                    row = {**self.identity, "pass": part, "round": number, "case": case.name, **times}
                    self._measured[part, number, case.name] = row
                    if self.samples is not None:
                        append(self.samples, row)
                done()
        return True

    def _shuffled(self) -> list[str]:
        return self._random.sample(SIDES, len(SIDES))

    def _case(self, processes: Mapping[str, Process], case: Case) -> dict[str, list[float]]:
        """Turns of the three processes: milliseconds by side."""

        def ask(side: str, request: Row) -> Row:
            try:
                answer = processes[side].ask(request, self.patience)
            except WorkerError as error:
                raise WorkerError(f"{side}: {error}") from None
            if answer["status"] != "ok":
                raise WorkerError(f"{side}: {answer['reason']}")
            return answer

        for side in self._shuffled():
            ask(side, {"prepare": asdict(case)})
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(self.blocks):
            for side in self._shuffled():
                times[side].append(ask(side, {"block": True})["ms"])
        return times

    def rounds(self, case: Case, part: int = 0) -> list[Row]:
        """Measurements of a case, of one part or (0) of all."""
        rows = [row for (p, _, name), row in self._measured.items() if name == case.name and part in (0, p)]
        return sorted(rows, key=lambda row: (row["pass"], row["round"]))


def _log_ratios(row: Row) -> tuple[list[float], list[float]]:
    """Of B to A, and of A to itself, of neighbouring turns. Both processes of A stand for it in the first."""
    turns = [[math.log(ms) for ms in turn] for turn in zip(*(row[side] for side in SIDES), strict=True)]
    return [b - (a + again) / 2 for a, again, b in turns], [again - a for a, again, _ in turns]


def _median(rows: Sequence[Row], *sides: str) -> float:
    return float(statistics.median(ms for row in rows for side in sides for ms in row[side]))


def lines(comparer: Comparer, cases: Sequence[Case], margin: float) -> list[Line]:
    """Verdicts of all cases that were measured."""
    found = []
    for case in cases:
        rows = comparer.rounds(case)
        if not rows or case.name in comparer.failed:
            continue
        ratio, control = (paired(list(part)) for part in zip(*map(_log_ratios, rows), strict=True))
        rerun = comparer.rounds(case, 2)
        again = paired([_log_ratios(row)[0] for row in rerun]) if rerun else None
        verdict = conclude(ratio, control, again, margin)
        a, b = _median(rows, "A", "control"), _median(rows, "B")
        found.append(Line(case.op, case.workload, case.dtype, a, b, ratio, control, verdict))
    return found


def undecided(comparer: Comparer, cases: Sequence[Case], margin: float) -> list[Case]:
    """Cases that a rerun is for: whatever the first rounds do not show to be the same."""
    chosen = []
    for case in cases:
        rows = comparer.rounds(case, 1)
        if rows and case.name not in comparer.failed:
            ratio = paired([_log_ratios(row)[0] for row in rows])
            if classify(ratio, margin) is not Verdict.SAME:
                chosen.append(case)
    return chosen


def between_files(a: Sequence[Row], b: Sequence[Row], margin: float) -> dict[str, list[Line]]:
    """Verdicts of the cases that two results files share, by device; there is no control and no rerun.

    Rows need the times of their repetitions.
    """

    def known(rows: Sequence[Row]) -> dict[tuple[str, ...], Row]:
        return {
            tuple(row[name] for name in ("device", "peer", "seed", "op", "workload", "dtype")): row
            for row in rows
            if row["status"] == "ok" and row.get("samples_ms")
        }

    first, second = known(a), known(b)
    found: dict[str, list[Line]] = {}
    for key in [key for key in first if key in second]:
        x, y = first[key], second[key]
        ratio = unpaired(x["samples_ms"], y["samples_ms"])
        workload = x["workload"] if x["peer"] == "qla" else f"{x['workload']} ({x['peer']})"
        line = Line(x["op"], workload, x["dtype"], x["device_ms"], y["device_ms"], ratio, None, classify(ratio, margin))
        found.setdefault(x["device"], []).append(line)
    return found
