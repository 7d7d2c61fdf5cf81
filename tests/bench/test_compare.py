"""Two versions of the code measured against each other, for real, on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import qla
from qla.bench.cli import app
from qla.bench.compare import distinct
from qla.bench.subjects import SubjectError, assemble, prepared
from qla.bench.workloads import load, select

ROOT = Path(__file__).parents[2]
CLI = CliRunner()

_LAUNCH = "            kernel.entry(arguments.address, 0, blocks)\n            return\n"
_SLOWER = """\
            import time
            began = time.thread_time_ns()
            kernel.entry(arguments.address, 0, blocks)
            until = began + int(1.4 * (time.thread_time_ns() - began))
            while time.thread_time_ns() < until:
                pass
            return
"""


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code whose launches on the CPU take 1.4 times as long."""
    copy = tmp_path_factory.mktemp("slower")
    for name in ("api", "codegen", "runtime", "targets", "templates"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    driver = copy / "runtime" / "drivers" / "host.py"
    text = driver.read_text()
    assert text.count(_LAUNCH) == 1
    driver.write_text(text.replace(_LAUNCH, _SLOWER))
    return copy


def test_a_planted_slowdown_is_found_and_nothing_else(slower: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    arguments = [
        "compare", str(ROOT), str(slower), "--device", "cpu", "--seed", "001", "--op", "GDNFwd", "--dtype", "bf16",
        "--name", "decode-b[1]", "--rounds", "2", "--blocks", "3", "--margin", "0.1", "--samples", str(samples),
    ]  # fmt: skip
    result = CLI.invoke(app, arguments)
    assert result.exit_code == 1, result.output
    row = next(line for line in result.output.splitlines() if "**SLOW**" in line)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert 0.65 < float(cells[5].rstrip("x")) < 0.85
    low, high = map(float, cells[7].split(" to "))
    assert 0.85 < low <= high < 1.18
    assert len(samples.read_text().splitlines()) == 4  # two rounds, and the rerun
    # All of it is in the file: nothing is measured for which there would be no time.
    again = CLI.invoke(app, [*arguments, "--budget", "-1"])
    assert again.exit_code == 1
    assert row in again.output


def test_a_slowdown_on_purpose(tmp_path: Path) -> None:
    arguments = [
        "compare", str(ROOT), str(ROOT), "--device", "cpu", "--seed", "001", "--op", "GDNFwd", "--dtype", "bf16",
        "--name", "decode-b[14]", "--cases", "1", "--rounds", "2", "--blocks", "3", "--margin", "0.1",
    ]  # fmt: skip
    result = CLI.invoke(app, [*arguments, "--plant", "40"])
    assert result.exit_code == 1, result.output
    assert "40 % longer on purpose" in result.output
    (row,) = (line for line in result.output.splitlines() if "**SLOW**" in line)
    assert 0.65 < float(row.split("|")[6].strip().rstrip("x")) < 0.8


def test_a_version_that_does_not_work(slower: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(slower, broken)
    (broken / "api" / "ops.py").write_text("raise ImportError('no ops')\n")
    arguments = ["--device", "cpu", "--op", "GDNFwd", "--seed", "001", "--name", "decode-b[1]", "--rounds", "2"]
    arguments += ["--dtype", "bf16"]
    result = CLI.invoke(app, ["compare", str(slower), str(broken), *arguments])
    assert result.exit_code == 1
    assert "B: ImportError: no ops" in result.output
    result = CLI.invoke(app, ["compare", "no such ref", str(slower), *arguments])
    assert result.exit_code == 2


def test_sides(slower: Path, tmp_path: Path) -> None:
    for code in (slower, ROOT):
        with prepared(str(code)) as side:
            found = (side.folder / "qla" / "runtime" / "plan.py").resolve()
            assert found == (code / "runtime" / "plan.py").resolve()
            # Both sides are measured by the same program.
            assert (side.folder / "qla" / "bench").resolve() == Path(qla.bench.__file__).parent.resolve()
    installed = tmp_path / "installed"
    installed.mkdir()
    assemble(slower, installed)
    with prepared(str(installed)) as side:
        assert (side.folder / "qla" / "ops.py").resolve() == (slower / "api" / "ops.py").resolve()
    with prepared(sys.executable) as side:
        assert side.python == sys.executable
        assert (side.folder / "qla" / "ops.py").resolve() == Path(qla.__file__).with_name("ops.py").resolve()
    with pytest.raises(SubjectError, match="neither"), prepared(str(tmp_path)):
        pass


def test_git_refs(slower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(slower, tmp_path / "repo")
    monkeypatch.chdir(tmp_path / "repo")
    who = ["-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], check=True)
    with prepared("HEAD") as side:
        assert "until = began" in (side.folder / "qla" / "runtime" / "drivers" / "host.py").read_text()


def test_cases_that_are_the_same_when_reduced() -> None:
    cases = select(load(), op="GDNFwd", seed="h200", name="tp8-*")
    assert {case.workload for case in distinct(cases)} >= {"tp8-2048", "tp8-6144-2048"}
    assert len(distinct(cases)) < len(cases)
