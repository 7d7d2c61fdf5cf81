"""Measures cases one by one and appends a row per case to a JSONL file, which a later run continues."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from qla.bench import cost, inputs, reference
from qla.bench.machine import Machine, clocks
from qla.bench.timing import Timer
from qla.bench.workloads import Case
from qla.errors import UnsupportedError

__all__ = ["CPU_TOKENS", "CPU_VALUE_HEADS", "Row", "Runner", "pending", "read_rows"]

Row = dict[str, Any]

# A CPU measures `Case.shrink(CPU_TOKENS, CPU_VALUE_HEADS)`: a call of such a case takes a few hundredths of a second.
CPU_TOKENS, CPU_VALUE_HEADS = 256, 4
# Results are checked on `Case.shrink` of these, since the recurrence takes a step per token.
_CHECK = {"cuda": (512, 32), "cpu": (64, 4)}
_FREE_ABOVE = 1 << 30  # bytes of a case's tensors, beyond which memory goes back to the device after it


def read_rows(path: Path) -> list[Row]:
    """Rows of a results file, the latest of each key; a line cut short (by a kill) is left out."""
    rows: dict[str, Row] = {}
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["key"]] = row
    return list(rows.values())


def key(case: Case, machine: Machine) -> str:
    """What a row is found again by: the case, the device and the code."""
    return f"{case.name} | {machine.device} | {machine.version} {machine.code}"


def pending(cases: Iterable[Case], machine: Machine, rows: Sequence[Row], retry: bool = False) -> list[Case]:
    """Cases without a row of this device and code; with `retry`, also those whose row is an error."""
    done = {row["key"] for row in rows if not (retry and row["status"] == "error")}
    return [case for case in cases if key(case, machine) not in done]


def check_key(case: Case, machine: Machine) -> str:
    """Equal for cases whose results need one check only: the same op, options, dtype, head dims and kinds of input."""
    d = case.dims
    kind = [case.op, case.dtype, sorted(case.options.items()), d.dk, d.dv, case.lengths is not None]
    return json.dumps([*kind, "initial_state" in case.shapes, machine.device, machine.code])


@dataclass
class Runner:
    """Measures cases on one machine.

    Parameters
    ----------
    machine : this one.
    timer : for it.
    path : file that rows are appended to.

    Attributes
    ----------
    lost : the device failed for good (an illegal access, say), and only a new process can go on.
    """

    machine: Machine
    timer: Timer
    path: Path

    def __post_init__(self) -> None:
        self.lost = False
        known = [row for row in read_rows(self.path) if "check" in row]
        self._errors: dict[str, tuple[float, float]] = {
            row["check"]: (_number(row["output_error"]), _number(row["state_error"])) for row in known
        }

    def run(self, cases: Sequence[Case], budget: float, done: Callable[[Case, Row], None]) -> int:
        """Measure cases until all are done or the budget (seconds) would be exceeded; returns how many were done."""
        began, longest = time.monotonic(), 0.0
        self._end_last_line()
        for number, case in enumerate(cases):
            start = time.monotonic()
            if start - began + longest > budget:
                return number
            row = self.measure(case)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            longest = max(longest, time.monotonic() - start)
            done(case, row)
            if self.lost:
                return number + 1
        return len(cases)

    def _end_last_line(self) -> None:
        """Close a line that a killed run left open, so that the next row has a line of its own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and (data := self.path.read_bytes()) and not data.endswith(b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def measure(self, case: Case) -> Row:
        """Return the row of a case; what goes wrong is in it."""
        facts = asdict(self.machine)
        row: Row = {
            "key": key(case, self.machine),
            "seed": case.seed, "op": case.op, "workload": case.workload, "dtype": case.dtype,
            "status": "ok",
            **facts,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        if case.traits is None:
            return row | {"status": "unsupported", "reason": "not supported yet: backward and one-token kernels"}
        try:
            return row | self._measured(case)
        except UnsupportedError as error:
            row |= {"status": "unsupported", "reason": _first_line(error)}
        except Exception as error:  # out of memory, a kernel that does not compile: the others must still run
            row |= {"status": "error", "reason": _first_line(error)}
        # Only here is the traceback gone that kept the tensors of the case.
        try:
            self._wait()
            self._free()
        except RuntimeError:
            self.lost = True
        return row

    def _measured(self, case: Case) -> Row:
        kind = self.machine.kind
        if kind == "cpu":
            case = case.shrink(CPU_TOKENS, CPU_VALUE_HEADS)
        given = inputs.tensors(case, kind)
        call = inputs.call(case, given)
        start = time.perf_counter()
        call.run()
        self._wait()
        first_s = time.perf_counter() - start
        timing = self.timer.measure(call.run)
        call.run()  # so that the device is at work while its clocks are read
        row: Row = {
            "reduced": case.reduced,
            "shapes": {name: list(shape) for name, shape in case.shapes.items()},
            "lengths": case.lengths, "options": dict(case.options),
            "clocks": clocks(kind),
            "timer": self.timer.description,
            "repetitions": timing.repetitions,
            "device_ms": timing.device_ms, "q1_ms": timing.q1_ms, "q3_ms": timing.q3_ms,
            "wall_ms": timing.wall_ms, "first_call_s": first_s, "kernels": timing.kernels,
        }  # fmt: skip
        del call
        size = sum(x.nbytes for x in given.values())
        del given
        if size > _FREE_ABOVE:
            self._free()
        return row | self._costs(case, timing.device_ms) | self._checked(case)

    def _costs(self, case: Case, ms: float) -> Row:
        """Throughput, floor and peers."""
        flops, size = cost.chunk_flops(case), cost.moved_bytes(case)
        row: Row = {"flops": flops, "bytes": size, "tflops": flops / ms / 1e9, "tbps": size / ms / 1e9}
        limits = cost.ceilings(self.machine.device)
        if limits:
            floor = cost.floor(case, limits)
            row |= {"floor_ms": floor.ms, "floor_percent": 100 * floor.ms / ms, "bound": floor.bound}
        # Times of peers are those of an H200, and of the published shape.
        if case.best_peer and "H200" in self.machine.device:
            name, best = case.best_peer
            row |= {"best_peer": name, "best_peer_ms": best, "ratio": best / ms}
        return row

    def _checked(self, case: Case) -> Row:
        """Errors against the recurrence, computed once per kind of case."""
        check = check_key(case, self.machine)
        if check not in self._errors:
            small = case.shrink(*_CHECK[self.machine.kind])
            given = inputs.tensors(small, self.machine.kind, seed=1)
            call = inputs.call(small, given)
            results = call.outputs(call.run())
            pairs = zip(results, reference.recurrence(small, given), strict=True)
            output, state = (reference.relative_error(x, expected) for x, expected in pairs)
            self._errors[check] = (output, state)
        output, state = self._errors[check]
        bar = reference.bar(case)
        # JSON has no infinity; a comparison with null says nothing, so the verdict is written down too.
        return {
            "check": check,
            "output_error": output if math.isfinite(output) else None,
            "state_error": state if math.isfinite(state) else None,
            "error_bar": bar,
            "accurate": max(output, state) <= bar,
        }

    def _wait(self) -> None:
        if self.machine.kind == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        if self.machine.kind == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _number(x: float | None) -> float:
    return math.inf if x is None else x
