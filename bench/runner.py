"""Measures cases one by one, a process per peer, and appends a row per case and peer to a JSONL file.

A later run continues the file: a row is found again by its case, its device, and the peer with its version (for ours,
the digest of the code).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qla.bench.isolate import Process, Setup, WorkerError
from qla.bench.peers import OURS, PEERS
from qla.bench.workloads import Case

__all__ = ["Row", "Runner", "append", "pending", "read_rows", "row_key"]

Row = dict[str, Any]


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
        rows[row["key"]] = {"peer": OURS, **row}
    return list(rows.values())


def append(path: Path, row: Row) -> None:
    """Add a row to a file, on a line of its own even where a killed run left the last one open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def row_key(case: Case, hello: Mapping[str, Any], peer: str) -> str:
    """What a row is found again by."""
    machine = hello["machine"]
    code = f" {machine['code']}" if peer == OURS else ""
    return f"{case.name} | {machine['device']} | {peer} {hello['version']}{code}"


def pending(
    cases: Iterable[Case], hello: Mapping[str, Any], peer: str, rows: Sequence[Row], retry: bool = False
) -> list[Case]:
    """Cases without a row of this device and peer; with `retry`, also those whose row is an error."""
    done = {row["key"] for row in rows if not (retry and row["status"] == "error")}
    return [case for case in cases if row_key(case, hello, peer) not in done]


def check_key(case: Case, row: Mapping[str, Any]) -> str:
    """Equal for cases whose results need one check only: the same op, options, dtype, head dims and kinds of input."""
    d = case.dims
    kind = [case.op, case.dtype, sorted(case.options.items()), d.dk, d.dv, case.lengths is not None]
    who = [row["device"], row["peer"], row["peer_version"], row["code"] if row["peer"] == OURS else ""]
    return json.dumps([*kind, "initial_state" in case.shapes, *who])


@dataclass
class Runner:
    """Measures cases with peers.

    Parameters
    ----------
    path : file that rows are appended to.
    device : as `Setup` has it.
    repetitions : of each case.
    budget : seconds after which nothing new begins.
    patience : seconds after which a case that gives no answer is an error.
    folders : for each peer, what it is imported from.
    retry : measure cases again whose row is an error.
    """

    path: Path
    device: str = ""
    repetitions: int = 10
    budget: float = math.inf
    patience: float = 300.0
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    retry: bool = False

    def __post_init__(self) -> None:
        self._began, self._longest = time.monotonic(), 0.0
        known = [row for row in read_rows(self.path) if "check" in row]
        self._errors: dict[str, tuple[float, float]] = {
            row["check"]: (_number(row["output_error"]), _number(row["state_error"])) for row in known
        }

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - (time.monotonic() - self._began)

    def run(
        self,
        peer: str,
        cases: Sequence[Case],
        begin: Callable[[Mapping[str, Any], int], None],
        done: Callable[[Case, Row], None],
    ) -> int:
        """Measure cases until all are done or the next one would exceed the budget.

        Parameters
        ----------
        peer : key of `PEERS`.
        cases : to measure; those of ops that we cannot run are left to our own rows.
        begin : called with what the worker says of itself and how many cases there are to do.
        done : called after each of them.

        Returns
        -------
        int
            How many cases are left.
        """
        if peer != OURS:
            cases = [case for case in cases if case.traits]
        if self.left < self._longest:
            return len(cases)
        worker = self._worker(peer)
        try:
            hello = worker.hello
            if hello["status"] != "ok":
                self._unavailable(peer, hello)
                begin(hello, 0)
                return 0
            todo = pending(cases, hello, peer, read_rows(self.path), self.retry)
            begin(hello, len(todo))
            for number, case in enumerate(todo):
                if self.left < self._longest:
                    return len(todo) - number
                if not worker.running:
                    worker = self._worker(peer)
                start = time.monotonic()
                row = self._row(worker, hello, peer, case)
                if row is None:
                    return len(todo) - number
                append(self.path, row)
                self._longest = max(self._longest, time.monotonic() - start)
                done(case, row)
        finally:
            worker.close()
        return 0

    def _worker(self, peer: str) -> Process:
        setup = Setup(peer, self.device, self.repetitions)
        return Process(setup, self.folders.get(peer, ()), PEERS[peer].environment)

    def _unavailable(self, peer: str, hello: Mapping[str, Any]) -> None:
        """One row for a peer that cannot be had."""
        key = f"{peer} unavailable {self.device}"
        row = {"key": key, "peer": peer, "status": "unavailable", "reason": hello["reason"], **_now()}
        if not any(known["key"] == key for known in read_rows(self.path)):
            append(self.path, row)

    def _row(self, worker: Process, hello: Mapping[str, Any], peer: str, case: Case) -> Row | None:
        """The row of a case, whatever goes wrong; None where the budget ended first."""
        row: Row = {
            "key": row_key(case, hello, peer),
            "peer": peer, "peer_version": hello["version"],
            "seed": case.seed, "op": case.op, "workload": case.workload, "dtype": case.dtype,
            "status": "ok",
            **hello["machine"], "python": hello["python"],
            **_now(),
        }  # fmt: skip
        if case.traits is None:
            return row | {"status": "unsupported", "reason": "not supported yet: backward and one-token kernels"}
        if worker.hello["status"] != "ok":
            return row | {"status": "error", "reason": worker.hello["reason"]}
        check = check_key(case, row)
        # The first case of a run is given all its patience, so that every run gets on.
        wait = self.patience if not self._longest else min(self.patience, max(self.left, 1.0))
        try:
            answer = worker.ask({"measure": asdict(case), "errors": self._errors.get(check)}, wait)
        except WorkerError as error:
            if error.late and wait < self.patience:
                return None
            return row | {"status": "error", "reason": str(error)}
        if answer["status"] == "ok":
            self._errors[check] = (_number(answer["output_error"]), _number(answer["state_error"]))
            row["check"] = check
            # Published times are those of an H200, and of the published shape.
            if "H200" in row["device"] and not answer["reduced"]:
                row["published"] = dict(case.peers)
        return row | answer


def _now() -> Row:
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _number(x: float | None) -> float:
    return math.inf if x is None else x
