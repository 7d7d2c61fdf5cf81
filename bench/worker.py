"""The process that measures one peer: reads a request per line from standard input, answers with a line each.

Requests and answers are JSON objects. The first request is a `Setup`; then come

- ``{"measure": [{"case": case, "check": key, "errors": ...}, ...]}`` for rows of `run`,
- ``{"warm": [case, ...]}`` to compile our kernels for these cases, and with ``"split": true`` those of all ways to
  split them,
- ``{"splits": case}`` for the time of each of these ways, and ``"knobs": [...]`` for some only,
- ``{"prepare": case}`` and ``{"block": true}`` for the rounds of `compare`.

What a peer prints goes to standard error, so that it cannot get between the answers.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

import qla
from qla.bench import accuracy, cost, inputs, reference
from qla.bench.inputs import Call
from qla.bench.isolate import Setup
from qla.bench.machine import clocks, describe
from qla.bench.peers import OURS, PEERS, NotOfferedError
from qla.bench.plant import slowed
from qla.bench.timing import ClockTimer, ProcessorTimer, Timer, Timing, timer_for
from qla.bench.tunings import apply
from qla.bench.workloads import Case
from qla.errors import UnsupportedError
from qla.runtime.drivers import driver_for

__all__ = ["CPU_TOKENS", "CPU_VALUE_HEADS", "main"]

Row = dict[str, Any]

# A CPU measures `Case.shrink` of these: a call of such a case takes a few hundredths of a second.
CPU_TOKENS, CPU_VALUE_HEADS = 256, 4
_KEPT = 1 / 6  # of a GPU's memory: what torch holds beyond that is given back, since other processes measure there too


class Worker:
    """Answers requests; a failure is an answer too."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = setup.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.peer = PEERS[setup.peer]
        self.call: Call | None = None
        self.timer: Timer = ClockTimer(setup.repetitions)
        self.limits: cost.Ceilings | None = None
        self.target = ""
        self.errors: dict[str, tuple[float, float]] = {}

    def start(self) -> Row:
        """Import the peer and set the timer up; says with what everything is measured."""
        setup = self.setup
        if self.device == "cuda" and not torch.cuda.is_available():
            raise NotOfferedError("torch sees no GPU")
        version = self.peer.load()
        machine = describe(self.device)
        self.limits, self.target = cost.ceilings(machine.device), machine.target
        if setup.tuning:
            apply(machine.target, setup.tuning)
        if self.device == "cpu" and setup.peer == OURS:
            # Our kernels do not use torch's threads, and in checks these spin more than they work.
            torch.set_num_threads(1)
        if setup.core >= 0:
            os.sched_setaffinity(0, {setup.core})
            self.timer = ProcessorTimer(setup.repetitions)
        else:
            self.timer = timer_for(self.device, setup.repetitions, setup.trace)
        return {
            "version": version, "machine": asdict(machine), "timer": self.timer.description,
            "settled": _settled(), "python": sys.version.split()[0], "home": os.path.dirname(str(qla.__file__)),
        }  # fmt: skip

    def answer(self, request: Row) -> Row:
        """Carry out one request."""
        if "measure" in request:
            return {"rows": self.measure(request["measure"])}
        if "warm" in request:
            return self.warm([Case.from_json(case) for case in request["warm"]], bool(request.get("split")))
        if "splits" in request:
            return {"rows": self.splits(Case.from_json(request["splits"]), request.get("knobs"))}
        if "prepare" in request:
            return self.prepare(Case.from_json(request["prepare"]))
        assert self.call is not None
        return {"ms": self.timer.block(self.call.run)}

    def _case(self, case: Case) -> Case:
        return case.shrink(CPU_TOKENS, CPU_VALUE_HEADS) if self.device == "cpu" else case

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def prepare(self, case: Case) -> Row:
        """Make the call that the next blocks time, and warm it up."""
        self.call = None
        self.free()
        case = self._case(case)
        self.call = self.peer.call(case, inputs.tensors(case, self.device))
        for _ in range(3):
            self.call.run()
        self._wait()
        if self.setup.slowdown > 1:
            self.call = replace(self.call, run=slowed(self.call.run, self.setup.slowdown, self.timer))
        return {"reduced": case.reduced}

    def warm(self, cases: Sequence[Case], split: bool) -> Row:
        """Compile our kernels for the cases, so that no first call waits for that."""
        # Imported here, as below: what `compare` measures may be older than what they ask for.
        from qla.bench.plans import compile_all, kernels
        from qla.bench.splits import candidates

        specs = kernels(map(self._case, cases), self.target, self._processors(), candidates if split else None)
        began = time.perf_counter()
        compile_all(specs)
        return {"kernels": len(specs), "seconds": time.perf_counter() - began}

    def splits(self, case: Case, only: Sequence[Row] | None) -> list[Row]:
        """Time choices for a case: what they are, how long they take, and each of their stages."""
        from qla.bench.plans import call_shape
        from qla.bench.splits import candidates, forced, knobs, stages_ms
        from qla.codegen.planner import choices

        case = self._case(case)
        call = self.peer.call(case, inputs.tensors(case, self.device))
        asked = (call_shape(case), self.target, self._processors())
        found = candidates(*asked) if only is None else [c for c in choices(*asked) if knobs(c) in only]
        runs = [forced(call.run, choice) for choice in found]
        rows: list[Row] = []
        for choice, timing in zip(found, self._timings(runs), strict=True):
            row: Row = {"knobs": knobs(choice), "processors": choice.processors}
            if isinstance(timing, Timing):
                times = {"median_ms": timing.device_ms, "q1_ms": timing.q1_ms, "q3_ms": timing.q3_ms}
                row |= {**times, "inner": len(timing.samples), "stages_ms": stages_ms(choice, timing.kernels)}
            else:
                row["error"] = timing["reason"]
            rows.append({"status": "error" if "error" in row else "ok", **row})
        return rows

    def _processors(self) -> int:
        return driver_for(self.target, torch.cuda.current_device() if self.device == "cuda" else -1).processors

    def measure(self, asked: Sequence[Row]) -> list[Row]:
        """Time cases and check them, all with one trace; `errors` are those of a small case where these are known."""
        begun: list[tuple[Row, Call | None]] = []
        for item in asked:
            try:
                begun.append(self._begin(self._case(Case.from_json(item["case"])), item["check"], item["errors"]))
            except Exception as error:  # out of memory, a kernel that does not compile: the others must still run
                begun.append((failure(error), None))
        calls = [call.run for _, call in begun if call]
        start = time.perf_counter()
        timings = iter(self._timings(calls))
        each = (time.perf_counter() - start) / max(len(calls), 1)
        if calls:
            calls[-1]()  # so that the device is at work while its clocks are read
        now = clocks(self.device)
        rows = []
        for (row, call), item in zip(begun, asked, strict=True):
            if call:
                timing = next(timings)
                row = self._timed(row, self._case(Case.from_json(item["case"])), timing) | {"clocks": now}
                row.setdefault("seconds", {})["time"] = each
            rows.append(row)
        return rows

    def _begin(self, case: Case, check: str, errors: tuple[float, float] | None) -> tuple[Row, Call]:
        """Make a call, and all of its row but the times."""
        marks = [time.perf_counter()]
        given = inputs.tensors(case, self.device)
        call = self.peer.call(case, given)
        self._wait()
        marks.append(time.perf_counter())
        first = call.run()
        self._wait()
        marks.append(time.perf_counter())
        long = max(case.sequence_lengths()) > accuracy.CHECKED[self.device][0]
        sampled = accuracy.sampled_error(case, given, call.outputs(first)[0]) if long else None
        del first
        if check not in self.errors:
            self.errors[check] = errors or accuracy.whole_errors(case, self.peer.call, self.device)
        marks.append(time.perf_counter())
        seconds = [end - start for start, end in pairwise(marks)]
        row: Row = {
            "status": "ok",
            "reduced": case.reduced,
            "shapes": {name: list(shape) for name, shape in case.shapes.items()},
            "lengths": case.lengths, "options": dict(case.options),
            "timer": self.timer.description,
            "first_call_s": seconds[1],
            "seconds": dict(zip(("tensors", "first", "check"), seconds, strict=True)),
        }  # fmt: skip
        return row | _verdict(case, *self.errors[check], sampled), call

    def _timings(self, calls: Sequence[Callable[[], object]]) -> list[Timing | Row]:
        """Times of calls; where they cannot be timed together each alone, and what fails then instead of its time."""
        if not calls:
            return []
        try:
            return list(self.timer.measure_all(calls))
        except Exception as error:
            if len(calls) == 1:
                return [failure(error)]
        return [found for call in calls for found in self._timings([call])]

    def _timed(self, row: Row, case: Case, timing: Timing | Row) -> Row:
        """A row with its times, or the failure instead of it."""
        if not isinstance(timing, Timing):
            return timing
        return row | self._costs(case, timing.device_ms) | {
            "repetitions": len(timing.samples), "samples_ms": [float(f"{ms:.5g}") for ms in timing.samples],
            "device_ms": timing.device_ms, "q1_ms": timing.q1_ms, "q3_ms": timing.q3_ms,
            "wall_ms": timing.wall_ms, "kernels": timing.kernels,
        }  # fmt: skip

    def _costs(self, case: Case, ms: float) -> Row:
        """Throughput, and the floor where the device's ceilings are known."""
        flops, size = cost.chunk_flops(case), cost.moved_bytes(case)
        row: Row = {"flops": flops, "bytes": size, "tflops": flops / ms / 1e9, "tbps": size / ms / 1e9}
        if self.limits:
            floor = cost.floor(case, self.limits)
            row |= {"floor_ms": floor.ms, "floor_percent": 100 * floor.ms / ms, "bound": floor.bound}
        return row

    def free(self) -> None:
        """Give memory back to the device, if that much is held that others could want it: it takes time to get."""
        if self.device == "cuda" and torch.cuda.memory_reserved() > _KEPT * torch.cuda.mem_get_info()[1]:
            gc.collect()
            torch.cuda.empty_cache()

    def alive(self) -> bool:
        """Whether the device still answers: after an illegal access only a new process can go on."""
        try:
            self._wait()
            self.free()
        except RuntimeError:
            return False
        return True


def _verdict(case: Case, output: float, state: float, sampled: float | None) -> Row:
    bar = reference.bar(case)
    errors = {"output_error": output, "state_error": state, "sampled_error": sampled}
    # JSON has no infinity; a comparison with null says nothing, so the verdict is written down too.
    row: Row = {name: x if x is not None and math.isfinite(x) else None for name, x in errors.items()}
    return row | {"error_bar": bar, "accurate": max(output, state, sampled or 0.0) <= bar}


def _settled() -> bool:
    """Whether addresses are the same in each process (see `isolate.Process`)."""
    with suppress(OSError, ValueError):
        return bool(int(Path("/proc/self/personality").read_text(), 16) & 0x0040000)
    return False


def first_line(error: BaseException) -> str:
    """A failure in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def failure(error: BaseException) -> Row:
    """The answer to a request that failed."""
    offered = not isinstance(error, (NotOfferedError, UnsupportedError))
    reason = str(error) if isinstance(error, NotOfferedError) else first_line(error)
    return {"status": "error" if offered else "unsupported", "reason": reason}


def serve(source: TextIO, sink: TextIO) -> None:
    """Answer until the requests end or the device is lost."""

    def reply(row: Row) -> None:
        sink.write(json.dumps(row) + "\n")
        sink.flush()

    worker = Worker(Setup(**json.loads(source.readline())))
    try:
        reply({"status": "ok", **worker.start()})
    except Exception as error:  # whatever an import can raise
        reply({"status": "unavailable", "reason": failure(error)["reason"]})
        return
    with torch.no_grad():
        for line in source:
            try:
                row = {"status": "ok", **worker.answer(json.loads(line))}
            except Exception as error:  # the next request must still be answered
                row = failure(error)
            # Only here is the traceback gone that kept the tensors of the case.
            worker.free()
            failed = any(part["status"] == "error" for part in (row, *row.get("rows", ())))
            lost = failed and not worker.alive()
            reply(row | ({"lost": True} if lost else {}))
            if lost:
                return


def main() -> None:
    """Entry point of the process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
    answers.flush()
    # At once: taking torch apart takes most of a second, and some libraries crash while they are.
    os._exit(0)


if __name__ == "__main__":
    main()
