"""Every legal tuning of a workload against what the runtime takes by itself.

A process per tuning, with an empty cache: one that needs more than the device has, or never ends, costs its own result.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qla.bench.isolate import Process, Setup, WorkerError
from qla.bench.tunings import tunings
from qla.bench.workloads import Case

__all__ = ["Sweep"]

Result = dict[str, Any]
_SHAPE = ("seed", "op", "workload", "dtype")


@dataclass
class Sweep:
    """Measures tunings and keeps a file of what came out.

    Parameters
    ----------
    path : JSON file; results that are there already, of the same device and code, are kept and not measured again.
    device, repetitions : as `Setup` has them.
    patience : seconds for one tuning.
    budget : seconds after which no further tuning begins.
    """

    path: Path
    device: str
    repetitions: int = 10
    patience: float = 120.0
    budget: float = math.inf

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.budget
        with Process(self._setup({})) as process:
            hello = process.hello
        if hello["status"] != "ok":
            raise WorkerError(hello["reason"])
        self.machine: Result = hello["machine"]
        self.timer: str = hello["timer"]
        self.results: list[Result] = []
        if self.path.exists():
            known = json.loads(self.path.read_text(encoding="utf-8"))
            if known["device"] == self.machine:
                self.results = known["results"]

    def todo(self, cases: Sequence[Case]) -> list[tuple[Case, Result]]:
        """Pairs of case and tuning without a result; the empty tuning is that of the runtime."""
        done = {self._key(result) for result in self.results}
        pairs = [(case, tuning) for case in cases for tuning in ({}, *tunings(self.machine["target"]))]
        return [(case, tuning) for case, tuning in pairs if self._key(self._head(case, tuning)) not in done]

    def run(self, pairs: Sequence[tuple[Case, Result]], done: Callable[[Result], None]) -> int:
        """Measure pairs until all are done or the budget ends; returns how many are left."""
        for number, (case, tuning) in enumerate(pairs):
            if time.monotonic() > self._until:
                return len(pairs) - number
            result = self._head(case, tuning) | self._measured(case, tuning)
            self.results.append(result)
            self._save()
            done(result)
        return 0

    def _setup(self, tuning: Mapping[str, Any]) -> Setup:
        # One core and processor time on a CPU, as `compare` has it.
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        core = cores[0] if self.device == "cpu" else -1
        return Setup(device=self.device, repetitions=self.repetitions, core=core, tuning=tuning)

    @staticmethod
    def _head(case: Case, tuning: Mapping[str, Any]) -> Result:
        d = case.dims
        sizes = {
            "seq": d.tokens, "batch": d.batch, "heads": d.heads, "value_heads": d.value_heads, "head_dim": d.dk,
            "value_dim": d.dv, "lengths": case.lengths,
        }  # fmt: skip
        names = {name: getattr(case, name) for name in _SHAPE}
        return {**names, **sizes, "mode": "fwd", "config": "forced" if tuning else "auto", **tuning}

    @staticmethod
    def _key(result: Result) -> str:
        return json.dumps([result.get(name) for name in (*_SHAPE, "config", "schedule", "rings", "unroll", "streams")])

    def _measured(self, case: Case, tuning: Mapping[str, Any]) -> Result:
        with (
            TemporaryDirectory(prefix="qla-sweep-") as cache,
            Process(self._setup(tuning), environment={"QLA_CACHE_DIR": cache}, settled=self.device == "cpu") as process,
        ):
            if process.hello["status"] != "ok":
                return {"error": process.hello["reason"]}
            try:
                request = {"case": asdict(case), "check": "", "errors": None}
                answer = process.ask({"measure": [request]}, self.patience)
            except WorkerError as error:
                return {"error": str(error)}
        (row,) = answer.get("rows", [answer])
        if row["status"] != "ok":
            return {"error": row["reason"]}
        # The first call of a process renders, compiles and loads; a warm one does not.
        compile_s = max(0.0, row["first_call_s"] - row["wall_ms"] / 1e3)
        finite = None not in (row["output_error"], row["state_error"])
        return {
            "reduced": row["reduced"], "rel_err": row["output_error"], "accurate": row["accurate"],
            "compile_s": compile_s, "inner": row["repetitions"],
            "median_ms": row["device_ms"], "q1_ms": row["q1_ms"], "q3_ms": row["q3_ms"],
        } | ({} if finite else {"error": "the result is not finite"})  # fmt: skip

    def _save(self) -> None:
        config = {"timer": self.timer, "repeats": self.repetitions, "patience_s": self.patience}
        whole = {"device": self.machine, "config": config, "results": self.results}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        other = self.path.with_name(self.path.name + ".new")
        other.write_text(json.dumps(whole, indent=1), encoding="utf-8")
        os.replace(other, self.path)

    def table(self) -> list[tuple[str, ...]]:
        """Results as cells, each workload's own choice first and then the fastest: what and how it compares."""
        auto = {self._case(r): r["median_ms"] for r in self.results if r["config"] == "auto" and "median_ms" in r}
        order = {case: n for n, case in enumerate(dict.fromkeys(map(self._case, self.results)))}
        rows: list[tuple[str, ...]] = []
        for r in sorted(self.results, key=lambda r: (order[self._case(r)], r["config"], r.get("median_ms", math.inf))):
            tuning = "auto"
            if r["config"] == "forced":
                tuning = f"{r['schedule']} rings {r['rings']} unroll {r['unroll']} streams {r['streams']}"
            own = auto.get(self._case(r))
            if "error" in r:
                rows.append((self._case(r), tuning, "–", "–", "–", r["error"]))
                continue
            ratio = f"{own / r['median_ms']:.3f}" if own else "–"
            note = "" if r["accurate"] else "result too far from the recurrence"
            rows.append((self._case(r), tuning, f"{r['median_ms']:.4g}", ratio, f"{r['rel_err']:.2g}", note))
        return rows

    @staticmethod
    def _case(result: Result) -> str:
        return " ".join(str(result[name]) for name in _SHAPE)
