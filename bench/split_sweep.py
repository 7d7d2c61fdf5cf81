"""Each way to split the sequences of a workload against the one that the planner takes, and costs that follow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

from qla.bench.fit import Sample, fit, regrets, using
from qla.bench.isolate import Process, Setup, WorkerError
from qla.bench.plans import call_shape
from qla.bench.runner import Row, append, read_rows
from qla.bench.splits import knobs
from qla.bench.worker import CPU_TOKENS, CPU_VALUE_HEADS
from qla.bench.workloads import Case, load
from qla.codegen.planner import CallShape, plan_call
from qla.targets import TARGETS, Costs

__all__ = ["SplitSweep", "listed", "samples_of", "tune", "tuned_path", "write_tuned"]


def listed(name: str) -> list[Case]:
    """The workloads of a list in data/sweep.json: ``swept``, by which costs are fitted, or ``held-out``."""
    names = json.loads((files("qla.bench") / "data" / "sweep.json").read_text(encoding="utf-8"))[name]
    known = {case.name: case for case in load()}
    return [known[name] for name in names]


@dataclass
class SplitSweep:
    """Measures choices, and keeps a file with a row for each.

    Parameters
    ----------
    path : JSONL file; workloads that have rows of this device and code are not measured again.
    device, repetitions : as `Setup` has them.
    patience : seconds for one workload.
    budget : seconds after which no further workload begins.
    """

    path: Path
    device: str
    repetitions: int = 10
    patience: float = 120.0
    budget: float = math.inf

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.budget
        self._process = Process(Setup("qla", self.device, self.repetitions))
        hello = self._process.hello
        if hello["status"] != "ok":
            raise WorkerError(hello["reason"])
        self.machine: Row = hello["machine"]
        self.target: str = self.machine["target"]
        self.rows = [row for row in read_rows(self.path) if self._is_ours(row)]

    def __enter__(self) -> SplitSweep:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.close()

    def _is_ours(self, row: Mapping[str, Any]) -> bool:
        return all(row.get(name) == self.machine[name] for name in ("device", "code"))

    def todo(self, cases: Sequence[Case]) -> list[Case]:
        """Workloads without rows."""
        known = {row["call"] for row in self.rows}
        return [case for case in cases if case.name not in known]

    def run(self, cases: Sequence[Case], done: Callable[[Case], None]) -> int:
        """Measure the choices for workloads until all are done or the budget ends; returns how many are left."""
        with suppress(WorkerError):  # what does not compile fails where it is called
            self._ask({"warm": [asdict(case) for case in cases], "split": True})
        for number, case in enumerate(cases):
            if time.monotonic() > self._until:
                return len(cases) - number
            self._measure(case, {})
            done(case)
        return 0

    def _ask(self, request: Row) -> Row:
        if not self._process.running:
            self._process = Process(Setup("qla", self.device, self.repetitions))
        answer = self._process.ask(request, self.patience)
        if answer["status"] != "ok":
            raise WorkerError(answer["reason"])
        return answer

    def _measure(self, case: Case, only: Row) -> None:
        reduced = case.shrink(CPU_TOKENS, CPU_VALUE_HEADS) if self.device == "cpu" else case
        head: Row = {
            "call": case.name, "shape": asdict(call_shape(reduced)), "lengths": reduced.lengths, **self.machine,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        try:
            found = self._ask({"splits": asdict(case), **only})["rows"]
        except WorkerError as error:
            found = [{"knobs": None, "status": "error", "error": str(error)}]
        for answer in found:
            row = head | answer
            row["key"] = " | ".join([case.name, row["device"], row["code"], json.dumps(answer["knobs"])])
            append(self.path, row)
            self.rows.append(row)

    def auto(self, case: Case) -> tuple[Row | None, Row | None]:
        """Rows of what the planner takes, measured now if need be, and of the best choice; None where all failed."""
        mine = [row for row in self._measured() if row["call"] == case.name]
        if not mine:
            return None, None
        shape = CallShape(**mine[0]["shape"])
        taken = knobs(plan_call(shape, self.target, mine[0]["processors"]))
        if not any(row["knobs"] == taken for row in mine):
            self._measure(case, {"knobs": [taken]})
            mine = [row for row in self._measured() if row["call"] == case.name]
        own = next((row for row in mine if row["knobs"] == taken), None)
        return own, min(mine, key=lambda row: float(row["median_ms"]))

    def _measured(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "ok"]

    def table(self, cases: Sequence[Case]) -> tuple[list[tuple[str, ...]], list[float]]:
        """Workloads as lines of cells, and how much longer than the best choice the planner's takes in each."""
        rows: list[tuple[str, ...]] = []
        ratios = []
        for case in cases:
            own, best = self.auto(case)
            if own is None or best is None:
                failed = (row["error"] for row in self.rows if row["call"] == case.name and row["status"] != "ok")
                rows.append((case.name, "–", "–", "–", "–", "–", next(failed, "not measured")))
                continue
            ratio = own["median_ms"] / best["median_ms"]
            ratios.append(ratio)
            count = sum(row["call"] == case.name for row in self._measured())
            chosen = (f"{own['median_ms']:.4g}", _words(own), f"{best['median_ms']:.4g}", _words(best))
            rows.append((case.name, str(count), *chosen, f"{ratio:.3f}"))
        return rows, ratios


def _words(row: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in row["knobs"].items())


def samples_of(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """What of the rows a fit can use: choices whose stages were measured, of sequences of one length."""
    return [
        Sample(
            row["call"], CallShape(**row["shape"]), row["target"], row["processors"], row["knobs"], row["median_ms"],
            row["stages_ms"],
        )
        for row in rows
        if row["status"] == "ok" and row["stages_ms"] and len(set(row["lengths"] or [0])) == 1
    ]  # fmt: skip


def tune(rows: Sequence[Mapping[str, Any]], plain: bool = False) -> tuple[str, Costs, dict[str, float]]:
    """Target, its costs fitted to rows, and by workload how far their choice is from the best that was measured.

    `plain` is that of `fit`.

    Raises
    ------
    ValueError
        Rows of several devices or of several versions of the code, or none that a fit can use.
    """
    samples = samples_of(rows)
    devices = {(row["target"], row["device"], row["code"]) for row in rows}
    if len(devices) != 1 or not samples:
        raise ValueError(f"costs need measured stages of one device and one version of the code, not of {len(devices)}")
    ((target, *_),) = devices
    known = TARGETS[target].costs
    if known is None:
        raise ValueError(f"{target} has no costs to start from")
    costs = fit(samples, known, plain=plain)
    with using(target, costs):
        return target, costs, regrets(samples)


def tuned_path(target: str) -> Path:
    """Where a target's costs are read from."""
    return Path(str(files("qla.targets"))) / "tuned" / f"{target}.json"


def write_tuned(path: Path, costs: Costs, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write costs for a target, with where they come from."""
    last = max(rows, key=lambda row: str(row["date"]))
    calls = {row["call"] for row in rows}
    data = {
        "device": last["device"], "driver": last["driver"], "torch": last["torch"], "compiler": last["compiler"],
        "date": last["date"], "code": last["code"],
        "from": f"qla-bench sweep: {len(rows)} choices for {len(calls)} workloads", "workloads": sorted(calls),
        "costs": _rounded(costs.to_json()),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
