"""Measuring and reporting from end to end on the CPU, with the smallest cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qla.bench import runner as runners
from qla.bench.cli import app
from qla.bench.machine import describe
from qla.bench.report import markdown
from qla.bench.timing import ClockTimer
from qla.bench.workloads import Case, load, select

CLI = CliRunner()


def run(path: Path, *arguments: str) -> str:
    result = CLI.invoke(app, ["run", "-o", str(path), "--device", "cpu", "--reps", "2", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_run_resume_and_report(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filters = ["--seed", "001", "--name", "decode-b1,train-2k,serving-b1-h8", "--op", "GDN*,GLA*", "--dtype", "bf16"]
    cases = select(load(), seed="001", name="decode-b1,train-2k,serving-b1-h8", op="GDN*,GLA*", dtype="bf16")
    supported = [case for case in cases if case.traits]
    assert "0 cases done" in run(path, *filters, "--budget", "0")
    assert f"{len(cases)} cases done, 0 were there already" in run(path, *filters)
    rows = runners.read_rows(path)
    assert [row["workload"] for row in rows] == [case.workload for case in cases]
    measured = [row for row in rows if row["status"] == "ok"]
    assert len(measured) == len(supported) >= 3
    for row in measured:
        assert row["device_ms"] > 0
        assert row["accurate"], row
        assert row["timer"].startswith("wall clock")
        assert row["target"] == "host"
        assert "ratio" not in row
    assert {row["reason"] for row in rows if row["status"] == "unsupported"} == {
        "not supported yet: backward and one-token kernels"
    }
    # Nothing is measured twice, also after a run that was killed while it wrote.
    text = path.read_text()
    path.write_text(text[: -len(text.splitlines()[-1]) // 2])
    assert f"1 cases done, {len(cases) - 1} were there already" in run(path, *filters)
    assert f"0 cases done, {len(cases)} were there already" in run(path, *filters)
    result = CLI.invoke(app, ["report", str(path)])
    assert result.exit_code == 0
    for case in cases:
        assert case.workload in result.output
    assert "(reduced)" in result.output
    assert "| GDNFwd |" in result.output


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("CUDA out of memory."), "error"), (ZeroDivisionError(), "error")],
)
def test_a_case_that_fails_costs_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    cases = select(load(), op="GDNFwd", seed="001", name="decode-b1", dtype="bf16")
    machine = describe("cpu")

    def fail(case: Case, device: str, seed: int = 0) -> None:
        raise error

    path = tmp_path / "rows.jsonl"
    runner = runners.Runner(machine, ClockTimer(1), path)
    with monkeypatch.context() as patch:
        patch.setattr(runners.inputs, "tensors", fail)
        assert runner.run(cases, math.inf, lambda case, row: None) == len(cases)
    rows = runners.read_rows(path)
    assert [row["status"] for row in rows] == [status] * len(cases)
    assert type(error).__name__ in rows[0]["reason"]
    assert runners.pending(cases, machine, rows) == []
    assert runners.pending(cases, machine, rows, retry=True) == cases
    assert type(error).__name__ in markdown(rows)


def test_other_code_or_device_is_another_row(tmp_path: Path) -> None:
    from dataclasses import replace

    case = select(load(), seed="h200", name="tp8-2048")[0]
    machine = describe("cpu")
    keys = {runners.key(case, m) for m in (machine, replace(machine, code="x"), replace(machine, device="y"))}
    assert len(keys) == 3


def test_report_of_a_gpu() -> None:
    common = {
        "status": "ok", "seed": "h200", "op": "GDNFwd", "dtype": "bfloat16", "device": "NVIDIA H200", "version": "1",
        "code": "c", "target": "sm_90a", "wall_ms": 0.1, "tflops": 300.0, "tbps": 1.5, "bound": "comp",
        "output_error": 0.003, "state_error": 0.002, "accurate": True, "clocks": {"sm_mhz": 1980},
    }  # fmt: skip
    rows = [
        common | {"workload": "a", "device_ms": 0.05, "best_peer": "p", "best_peer_ms": 0.1, "ratio": 2.0,
                  "floor_percent": 50.0},
        common | {"workload": "b", "device_ms": 0.2, "best_peer": "p", "best_peer_ms": 0.1, "ratio": 0.5,
                  "floor_percent": 12.5},
    ]  # fmt: skip
    text = markdown(json.loads(json.dumps(rows)))
    assert "| GDNFwd | 2 | 0 | 0 | 1.00 | 1 | 25.0 | 0.003 |" in text
    assert "| a | bfloat16 | 0.05 | 0.1 | 0.1 p | 2.00 | 300 | 1.5 | 50 | comp |" in text
    assert "SM clock: 1980 to 1980 MHz" in text
    assert "Not measured" not in text
    assert "too far from the recurrence" in markdown([rows[0] | {"accurate": False}])


def test_wrong_requests(tmp_path: Path) -> None:
    assert CLI.invoke(app, ["run", "--name", "no such case"]).exit_code == 2
    assert CLI.invoke(app, ["run", "--device", "tpu"]).exit_code == 2
    assert CLI.invoke(app, ["report", str(tmp_path / "none.jsonl")]).exit_code == 2
    assert CLI.invoke(app, ["list", "--seed", "h200"]).output.count("\n") == 103
