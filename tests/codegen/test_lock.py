"""The lock file of kernels and the commands `lock` and `report`: what they say, and what they exit with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qla.codegen import cli, lock, matrix, measure
from qla.codegen.lock import Lock, differences, other_compilers, read
from qla.codegen.resources import Resources
from qla.codegen.spec import KernelSpec
from qla.targets.chips import CHIPS

FILE = Path(__file__).with_name("resources.lock")
TEXT = """\
# gfx942: zig-hip 0.17.1
# gfx950: zig-hip 0.17.1
gfx942 gla_scan_bf16_k64_v64 registers=212 spill=0 matrix=24
gfx950 gla_scan_bf16_k64_v64 registers=304 spill=0 matrix=12
"""


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    return result


def test_text_and_back() -> None:
    found = read(TEXT)
    assert found.compilers == {"gfx942": "zig-hip 0.17.1", "gfx950": "zig-hip 0.17.1"}
    assert found.kernels["gfx950", "gla_scan_bf16_k64_v64"] == {"registers": 304, "spill": 0, "matrix": 12}
    assert read(found.text()) == found
    assert found.text().splitlines()[1:] == TEXT.splitlines()


def test_the_file_is_written_as_it_lies_there() -> None:
    text = FILE.read_text(encoding="utf-8")
    found = read(text)
    assert found.text() == text
    for target in CHIPS:
        locked = {name for where, name in found.kernels if where == target}
        assert locked == {spec.name for spec in matrix.pairwise(target)}
    assert not any(numbers["spill"] or numbers["scratch"] for numbers in found.kernels.values())


def test_differences_name_the_kernel_and_both_numbers() -> None:
    after = read(TEXT.replace("spill=0 matrix=24", "spill=4 matrix=20").replace("gfx950 gla", "gfx950 kda"))
    assert differences(read(TEXT), after) == [
        "gfx942 gla_scan_bf16_k64_v64: spill 0 → 4, matrix 24 → 20",
        "gfx950 gla_scan_bf16_k64_v64: no longer one of them",
        "gfx950 kda_scan_bf16_k64_v64: new",
    ]
    assert differences(read(TEXT), read(TEXT)) == []


def test_another_compiler_is_named_and_its_numbers_are_not_compared() -> None:
    after = read(TEXT.replace("# gfx942: zig-hip 0.17.1", "# gfx942: zig-hip 0.18.0").replace("=24", "=20"))
    assert differences(read(TEXT), after) == []
    assert other_compilers(read(TEXT), after) == [
        "gfx942: not compared; the lock file is of zig-hip 0.17.1, and this is zig-hip 0.18.0"
    ]
    # Only targets that were compiled are compared.
    assert differences(read(TEXT), after.of(["gfx942"])) == []


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """The commands' set has one kernel of each target."""
    spec = KernelSpec("gla", "scan", "bf16", 64, 64, "gfx950")
    monkeypatch.setattr(matrix, "pairwise", lambda target: [KernelSpec("gla", "scan", "bf16", 64, 64, target)])
    return spec


def test_lock_writes_checks_and_leaves_other_targets_alone(one_kernel: KernelSpec, tmp_path: Path) -> None:
    path = tmp_path / "resources.lock"
    path.write_text(TEXT, encoding="utf-8")
    stale = call("lock", str(path), "--target", "gfx950", "--check", code=1)
    assert "gfx950 gla_scan_bf16_k64_v64: " in stale.stdout
    assert path.read_text(encoding="utf-8") == TEXT
    call("lock", str(path), "--target", "gfx950")
    written = read(path.read_text(encoding="utf-8"))
    assert written.kernels["gfx942", one_kernel.name] == {"registers": 212, "spill": 0, "matrix": 24}
    assert written.kernels["gfx950", one_kernel.name]["matrix"] > 0
    assert "up to date" in call("lock", str(path), "--target", "gfx950", "--check").stdout


def test_lock_fails_for_spills_even_of_another_compiler(
    one_kernel: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = Resources(256, 0, 100, 1024, 64, 128, 4096, 8192, False, 0)
    monkeypatch.setattr(measure.resources, "report", lambda *_: spilled)
    path = tmp_path / "resources.lock"
    path.write_text("# gfx950: zig-hip 0.1\n", encoding="utf-8")
    result = call("lock", str(path), "--target", "gfx950", "--check", code=1)
    assert "not compared" in result.stdout
    assert "64 bytes of registers are spilled" in result.stdout
    assert "128 bytes of scratch memory" in result.stdout


def test_lock_wants_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "root of the repository" in call("lock", code=2).output
    assert lock.PATH.name == FILE.name


def test_report_of_a_target() -> None:
    result = call("report", "--target", "gfx950", "--op", "gla", "--tokens", "4096", "--dk", "64", "--dv", "64")
    for words in ("gfx950 scan", "chunk x value head", "workgroups together", "bandwidth floor", "MI355X, 256"):
        assert words in result.stdout
    assert "measured" not in result.stdout  # nothing was, on AMD hardware


def test_report_for_programs() -> None:
    entries = json.loads(call("report", "--target", "sm_90a", "--json").stdout)
    assert [(entry["batch"], entry["tokens"]) for entry in entries] == [(1, 32768), (16, 8192)]
    for entry in entries:
        prepare, scan = entry["kernels"]
        assert scan["us"] >= scan["floor_us"] > 0
        assert entry["us"] == pytest.approx(prepare["launch_us"] + scan["launch_us"])
        assert entry["us"] > max(entry["bandwidth_floor_us"], entry["matrix_floor_us"])
        assert {"matrix", "vector", "issue", "shared", "L1", "memory"} == set(scan["cycles"])
        assert len(entry["checks"]) == 3
    # 32768 tokens: q and k of 16 heads, v and o of 64, in bf16, gates and beta in float32.
    moved = 32768 * (2 * 16 * 128 * 2 + 64 * (2 * 128 * 2 + 8))
    assert entries[0]["bandwidth_floor_us"] == pytest.approx(moved / CHIPS["sm_90a"].bandwidth)


def test_report_of_the_host_is_refused() -> None:
    assert "gfx942" in call("report", "--target", "host", code=2).output


def test_a_lock_begins_empty() -> None:
    assert Lock().text().startswith("# ")
    assert read(Lock().text()) == Lock()
