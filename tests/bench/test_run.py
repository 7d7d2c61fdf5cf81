"""Measuring and reporting from end to end on the CPU, with the smallest cases."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qla.bench import plans
from qla.bench import runner as runners
from qla.bench.cli import app
from qla.bench.cost import moved_bytes
from qla.bench.isolate import Process, Setup
from qla.bench.workloads import load, select

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
    assert "0 cases done" in run(path, *filters, "--budget", "-1")
    assert f"{len(cases)} cases done, 0 left" in run(path, *filters)
    rows = runners.read_rows(path)
    assert [row["workload"] for row in rows] == [case.workload for case in cases]
    measured = [row for row in rows if row["status"] == "ok"]
    assert len(measured) == len(supported) >= 3
    for row in measured:
        assert row["device_ms"] > 0
        assert row["accurate"], row
        assert row["timer"].startswith("wall clock")
        assert row["target"] == "host"
        assert row["peer"] == "qla"
        assert set(row["seconds"]) == {"tensors", "first", "check", "time"}
        assert len(row["samples_ms"]) == row["repetitions"] >= 2
        assert (row["sampled_error"] is None) == (row["shapes"]["q"][1] <= 64)
        assert "published" not in row
    assert {row["reason"] for row in rows if row["status"] == "unsupported"} == {
        "not supported yet: backward and one-token kernels"
    }
    # Nothing is measured twice, also after a run that was killed while it wrote.
    text = path.read_text()
    path.write_text(text[: -len(text.splitlines()[-1]) // 2])
    assert "1 cases done, 0 left" in run(path, *filters)
    assert "0 cases done, 0 left" in run(path, *filters)
    result = CLI.invoke(app, ["report", str(path)])
    assert result.exit_code == 0
    for case in cases:
        assert case.workload in result.output
    assert "(reduced)" in result.output
    assert "| GDNFwd |" in result.output


def test_a_case_that_fails_costs_one_row(tmp_path: Path) -> None:
    (tmp_path / "compiler").mkdir()
    # A compiler that is there and does not work: every kernel fails, and the runner gets on.
    (tmp_path / "compiler" / "ziglang").mkdir()
    (tmp_path / "compiler" / "ziglang" / "__init__.py").write_text("")
    path = tmp_path / "rows.jsonl"
    arguments = ["-o", str(path), "--device", "cpu", "--op", "GDNFwd", "--seed", "001", "--name", "decode-b1"]
    runner = runners.Runner(path, "cpu", 2, folders={"qla": [str(tmp_path / "compiler")]})
    cases = select(load(), op="GDNFwd", seed="001", name="decode-b1", dtype="bf16")
    seen: list[str] = []
    environment = pytest.MonkeyPatch()
    environment.setenv("QLA_CACHE_DIR", str(tmp_path / "cache"))
    with environment.context():
        left = runner.run("qla", cases, lambda hello, todo: None, lambda case, row: seen.append(row["status"]))
    environment.undo()
    assert (left, seen) == (0, ["error"] * len(cases))
    assert all("Error" in row["reason"] for row in runners.read_rows(path))
    assert CLI.invoke(app, ["report", str(path)]).output.count("| error |") == len(cases)
    assert CLI.invoke(app, ["run", *arguments, "--dtype", "bf16", "--retry"]).exit_code == 0


def test_cases_share_a_trace_up_to_a_size() -> None:
    cases = [case for case in load() if case.seed in ("000", "001")]
    found = list(runners.batches(cases))
    assert [case for batch in found for case in batch] == cases
    assert max(map(len, found)) == 8
    for batch in found:
        assert len(batch) == 1 or sum(moved_bytes(case) for case in batch if case.traits) <= 8 << 30
    assert any(len(batch) == 1 for batch in found)


def test_kernels_of_all_cases_are_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = select(load(), seed="001", op="GDNFwd,KDAFwd,GLAChunkFwd,GDNBwd", dtype="bf16")
    specs = plans.kernels(cases, "sm_90a", 132)
    assert {(spec.op, spec.saves) for spec in specs if spec.stage == "scan"} == {
        ("gated_delta_rule", False), ("kda", False), ("gla", True)
    }  # fmt: skip
    assert {spec.stage for spec in specs} == {"prepare", "carry", "combine", "scan"}
    monkeypatch.setenv("QLA_CACHE_DIR", str(tmp_path))
    case = select(cases, op="GDNFwd", name="decode-b[1]")[0]
    with Process(Setup("qla", "cpu", 2)) as process:
        assert process.ask({"warm": [asdict(case)]}, 60)["kernels"] == 2
        row = process.ask({"measure": [{"case": asdict(case), "check": "", "errors": None}]}, 60)["rows"][0]
    assert row["accurate"]
    assert row["first_call_s"] < 0.1, "the first call had something left to compile"


def test_other_code_or_device_is_another_row() -> None:
    case = select(load(), seed="h200", name="tp8-2048")[0]
    hello = {"version": "1", "machine": {"device": "d", "code": "c"}}
    others = [
        hello, hello | {"version": "2"}, hello | {"machine": {"device": "e", "code": "c"}},
        hello | {"machine": {"device": "d", "code": "x"}},
    ]  # fmt: skip
    assert len({runners.row_key(case, other, "qla") for other in others}) == 4
    # What a peer measures does not change with our code.
    assert len({runners.row_key(case, other, "fla") for other in others}) == 3
    rows = [{"key": runners.row_key(case, hello, "qla"), "status": "error"}]
    assert runners.pending([case], hello, "qla", rows) == []
    assert runners.pending([case], hello, "qla", rows, retry=True) == [case]


@pytest.mark.gpu
def test_run_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["run", "-o", str(path), "--seed", "h200", "--name", "tp8-[24]0??", "--peers", "qla,torch"]
    result = CLI.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = runners.read_rows(path)
    assert [row["peer"] for row in rows] == ["qla", "qla", "torch", "torch"]
    for row in rows:
        assert row["accurate"], row
        assert not row["reduced"]
        assert 0 < row["device_ms"] < row["wall_ms"] + 1
        assert (row["sampled_error"] is None) == (row["shapes"]["q"][1] <= 2048)
    assert rows[0]["device_ms"] < rows[2]["device_ms"]
    assert "torch" in CLI.invoke(app, ["report", str(path)]).output


def test_wrong_requests(tmp_path: Path) -> None:
    assert CLI.invoke(app, ["run", "--name", "no such case"]).exit_code == 2
    assert CLI.invoke(app, ["run", "--device", "tpu"]).exit_code == 2
    assert CLI.invoke(app, ["report", str(tmp_path / "none.jsonl")]).exit_code == 2
    assert CLI.invoke(app, ["list", "--seed", "h200"]).output.count("\n") == 103
