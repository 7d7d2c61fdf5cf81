"""The process that measures one peer: reads a request per line from standard input, answers with a line each.

Requests and answers are JSON objects. The first request is a `Setup`; then come ``{"measure": case, "errors": ...}``
for a row of `run`, and ``{"prepare": case}`` and ``{"block": true}`` for the rounds of `compare`. What a peer prints
goes to standard error, so that it cannot get between the answers.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

import qla
from qla.bench import accuracy, cost, inputs, reference
from qla.bench.inputs import Call
from qla.bench.isolate import Setup
from qla.bench.machine import clocks, describe
from qla.bench.peers import PEERS, NotOfferedError
from qla.bench.timing import ClockTimer, ProcessorTimer, Timer, timer_for
from qla.bench.tunings import apply
from qla.bench.workloads import Case
from qla.errors import UnsupportedError

__all__ = ["CPU_TOKENS", "CPU_VALUE_HEADS", "main"]

Row = dict[str, Any]

# A CPU measures `Case.shrink` of these: a call of such a case takes a few hundredths of a second.
CPU_TOKENS, CPU_VALUE_HEADS = 256, 4
_FREE_ABOVE = 1 << 30  # bytes of a case's tensors, beyond which memory goes back to the device after it


class Worker:
    """Answers requests; a failure is an answer too."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = setup.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.peer = PEERS[setup.peer]
        self.call: Call | None = None
        self.timer: Timer = ClockTimer(setup.repetitions)
        self.limits: cost.Ceilings | None = None

    def start(self) -> Row:
        """Import the peer and set the timer up; says with what everything is measured."""
        setup = self.setup
        if self.device == "cuda" and not torch.cuda.is_available():
            raise NotOfferedError("torch sees no GPU")
        version = self.peer.load()
        machine = describe(self.device)
        self.limits = cost.ceilings(machine.device)
        if setup.tuning:
            apply(machine.target, setup.tuning)
        if setup.core >= 0:
            os.sched_setaffinity(0, {setup.core})
            torch.set_num_threads(1)
            self.timer = ProcessorTimer(setup.repetitions)
        else:
            self.timer = timer_for(self.device, setup.repetitions)
        return {
            "version": version, "machine": asdict(machine), "timer": self.timer.description,
            "settled": _settled(), "python": sys.version.split()[0], "home": os.path.dirname(str(qla.__file__)),
        }  # fmt: skip

    def answer(self, request: Row) -> Row:
        """Carry out one request."""
        if "measure" in request:
            return self.measure(Case.from_json(request["measure"]), request.get("errors"))
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
        return {"reduced": case.reduced}

    def measure(self, case: Case, errors: tuple[float, float] | None) -> Row:
        """Time a case and check it; `errors` are those of the small case where they are known already."""
        case = self._case(case)
        given = inputs.tensors(case, self.device)
        call = self.peer.call(case, given)
        start = time.perf_counter()
        first = call.run()
        self._wait()
        row: Row = {"first_call_s": time.perf_counter() - start}
        long = max(case.sequence_lengths()) > accuracy.CHECKED[self.device][0]
        sampled = accuracy.sampled_error(case, given, call.outputs(first)[0]) if long else None
        del first
        timing = self.timer.measure(call.run)
        call.run()  # so that the device is at work while its clocks are read
        row |= {
            "reduced": case.reduced,
            "shapes": {name: list(shape) for name, shape in case.shapes.items()},
            "lengths": case.lengths, "options": dict(case.options),
            "clocks": clocks(self.device),
            "timer": self.timer.description,
            "repetitions": len(timing.samples), "samples_ms": [float(f"{ms:.5g}") for ms in timing.samples],
            "device_ms": timing.device_ms, "q1_ms": timing.q1_ms, "q3_ms": timing.q3_ms,
            "wall_ms": timing.wall_ms, "kernels": timing.kernels,
        }  # fmt: skip
        del call
        size = sum(x.nbytes for x in given.values())
        del given
        if size > _FREE_ABOVE:
            self.free()
        output, state = errors or accuracy.whole_errors(case, self.peer.call, self.device)
        return row | self._costs(case, timing.device_ms) | _verdict(case, output, state, sampled)

    def _costs(self, case: Case, ms: float) -> Row:
        """Throughput, and the floor where the device's ceilings are known."""
        flops, size = cost.chunk_flops(case), cost.moved_bytes(case)
        row: Row = {"flops": flops, "bytes": size, "tflops": flops / ms / 1e9, "tbps": size / ms / 1e9}
        if self.limits:
            floor = cost.floor(case, self.limits)
            row |= {"floor_ms": floor.ms, "floor_percent": 100 * floor.ms / ms, "bound": floor.bound}
        return row

    def free(self) -> None:
        """Give memory back to the device."""
        if self.device == "cuda":
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
            except Exception as error:  # out of memory, a kernel that does not compile: the next case must still run
                row = failure(error)
            # Only here is the traceback gone that kept the tensors of the case.
            lost = row["status"] != "ok" and not worker.alive()
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
