"""Measures cases one by one, a process per peer, and appends a row per case and peer to a JSONL file.

A later run continues the file: a row is found again by its case, its device, and the peer with its version (for ours,
the digest of the code).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qla.bench.cost import moved_bytes
from qla.bench.isolate import Process, Setup, WorkerError
from qla.bench.peers import OURS, PEERS
from qla.bench.workloads import Case

__all__ = ["Row", "Runner", "append", "batches", "pending", "read_rows", "row_key"]

Row = dict[str, Any]

_AT_ONCE, _BYTES_AT_ONCE = 8, 8 << 30  # cases that share a trace, and their tensors


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


def batches(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases to be measured with one trace: their tensors are all there at the same time."""
    batch: list[Case] = []
    size = 0
    for case in cases:
        more = moved_bytes(case) if case.traits else 0
        if batch and (len(batch) == _AT_ONCE or size + more > _BYTES_AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append(case)
        size += more
    if batch:
        yield batch


def kernel_key(case: Case) -> str:
    """Equal for cases that a peer is taken to have the same kernels for."""
    d = case.dims
    kind = [case.op, case.dtype, sorted(case.options.items()), d.heads, d.value_heads, d.dk, d.dv, d.tokens == 1]
    return json.dumps([*kind, case.lengths is not None, "initial_state" in case.shapes])


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
    jobs : processes of a peer that compile at the same time, before anything is measured.
    """

    path: Path
    device: str = ""
    repetitions: int = 10
    budget: float = math.inf
    patience: float = 300.0
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    retry: bool = False
    jobs: int = 1

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
        worker = self._worker = self._start(peer)
        try:
            hello = worker.hello
            if hello["status"] != "ok":
                self._unavailable(peer, hello)
                begin(hello, 0)
                return 0
            todo = pending(cases, hello, peer, read_rows(self.path), self.retry)
            begin(hello, len(todo))
            self._warm(peer, todo)
            left = len(todo)
            for batch in batches(todo):
                if self.left < self._longest:
                    return left
                start = time.monotonic()
                rows = self._rows(hello, peer, batch)
                if rows is None:
                    return left
                self._longest = max(self._longest, time.monotonic() - start)
                left -= len(batch)
                for case, row in zip(batch, rows, strict=True):
                    append(self.path, row)
                    done(case, row)
        finally:
            self._worker.close()
        return 0

    def _start(self, peer: str) -> Process:
        setup = Setup(peer, self.device, self.repetitions)
        return Process(setup, self.folders.get(peer, ()), PEERS[peer].environment)

    def _warm(self, peer: str, cases: Sequence[Case]) -> None:
        """Have kernels compiled by all cores before the first call: ours by a worker, a peer's by several of them."""
        if peer == OURS:
            with suppress(WorkerError):
                self._worker.ask({"warm": [asdict(case) for case in cases]}, max(min(self.patience, self.left), 1.0))
            return
        kinds = list({kernel_key(case): case for case in reversed(cases)}.values())
        if self.jobs < 2 or len(kinds) < 2:
            return

        def prepare(case: Case) -> None:
            with suppress(WorkerError), self._start(peer) as process:
                if process.running:
                    process.ask({"prepare": asdict(case)}, max(min(self.patience, self.left), 1.0))

        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(prepare, kinds))

    def _unavailable(self, peer: str, hello: Mapping[str, Any]) -> None:
        """One row for a peer that cannot be had."""
        key = f"{peer} unavailable {self.device}"
        row = {"key": key, "peer": peer, "status": "unavailable", "reason": hello["reason"], **_now()}
        if not any(known["key"] == key for known in read_rows(self.path)):
            append(self.path, row)

    def _rows(self, hello: Mapping[str, Any], peer: str, cases: Sequence[Case]) -> list[Row] | None:
        """The rows of cases that are measured together, whatever goes wrong; None where the budget ended first."""
        rows = [self._head(hello, peer, case) for case in cases]
        asked = [(case, row) for case, row in zip(cases, rows, strict=True) if "status" not in row]
        answers = self._answers(peer, asked)
        if answers is None and len(asked) > 1 and self.left > 0:
            # One of them took the process with it, or the time: which one shows where each is alone.
            answers = []
            for pair in asked:
                alone = self._answers(peer, [pair])
                if alone is None:
                    return None
                answers += alone
        if answers is None:
            return None
        for (case, row), answer in zip(asked, answers, strict=True):
            if answer["status"] == "ok":
                row["check"] = check = check_key(case, row)
                self._errors[check] = (_number(answer["output_error"]), _number(answer["state_error"]))
                # Published times are those of an H200, and of the published shape.
                if "H200" in row["device"] and not answer["reduced"]:
                    row["published"] = dict(case.peers)
            row.update(answer)
        return rows

    def _head(self, hello: Mapping[str, Any], peer: str, case: Case) -> Row:
        """What a row says of the case and the machine; all there is to say of what cannot be run."""
        row: Row = {
            "key": row_key(case, hello, peer),
            "peer": peer, "peer_version": hello["version"],
            "seed": case.seed, "op": case.op, "workload": case.workload, "dtype": case.dtype,
            **hello["machine"], "python": hello["python"],
            **_now(),
        }  # fmt: skip
        if case.traits is None:
            return row | {"status": "unsupported", "reason": "not supported yet: backward and one-token kernels"}
        return row

    def _answers(self, peer: str, asked: Sequence[tuple[Case, Row]]) -> list[Row] | None:
        """A worker's answers; None where the budget ended first, or where one of several cases was its end."""
        if not asked:
            return []
        if not self._worker.running:
            self._worker = self._start(peer)
        if self._worker.hello["status"] != "ok":
            return [{"status": "error", "reason": self._worker.hello["reason"]} for _ in asked]
        keys = [check_key(case, row) for case, row in asked]
        request = [
            {"case": asdict(case), "check": key, "errors": self._errors.get(key)}
            for (case, _), key in zip(asked, keys, strict=True)
        ]
        # The first cases of a run are given all their patience, so that every run gets on.
        wait = self.patience if not self._longest else min(self.patience, max(self.left, 1.0))
        try:
            answer = self._worker.ask({"measure": request}, wait)
        except WorkerError as error:
            if len(asked) > 1 or (error.late and wait < self.patience):
                return None
            return [{"status": "error", "reason": str(error)}]
        if answer["status"] != "ok":
            return [answer for _ in asked]
        if answer.get("lost") and len(asked) > 1:
            return None
        return list(answer["rows"])


def _now() -> Row:
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _number(x: float | None) -> float:
    return math.inf if x is None else x
