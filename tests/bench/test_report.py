"""What a report says, from rows made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qla.bench import page, plots
from qla.bench.cli import app
from qla.bench.report import results, sections

Row = dict[str, Any]


def row(workload: str, ms: float, tokens: int = 2048, **more: Any) -> Row:
    shapes = {"q": [1, tokens, 2, 128], "k": [1, tokens, 2, 128], "v": [1, tokens, 8, 128]}
    return {
        "key": f"{workload} {more}", "peer": "qla", "peer_version": "0.1", "status": "ok", "seed": "h200",
        "op": "GDNFwd", "workload": workload, "dtype": "bfloat16", "device": "NVIDIA H200", "version": "0.1",
        "code": "c", "target": "sm_90a", "driver": "580", "torch": "2.11", "compiler": "nvrtc", "timer": "CUPTI",
        "date": "2026-12-01T10:00:00", "wall_ms": ms + 0.1, "device_ms": ms, "tflops": 300.0, "tbps": 1.5,
        "flops": 2e9, "bytes": 1e7, "bound": "comp", "floor_ms": 0.02, "floor_percent": 2 / ms, "output_error": 0.003,
        "state_error": 0.002, "sampled_error": 0.004, "accurate": True, "clocks": {"sm_mhz": 1980}, "lengths": None,
        "shapes": shapes, "published": {"tileops (published)": 0.1}, **more,
    }  # fmt: skip


ROWS = [
    row("a", 0.05),
    row("b", 0.2),
    row("a", 0.08, peer="fla", peer_version="0.6"),
    row("b", 0.4, peer="fla", peer_version="0.6"),
    {"key": "x", "peer": "flashqla", "status": "unavailable", "reason": "ModuleNotFoundError: no | module"},
]


def test_tables() -> None:
    text = results(json.loads(json.dumps(ROWS)))
    assert "| GDNFwd | 2 | 0 | 0 | 0.89 | 1 | 20.0 | 0.004 |" in text
    a = "| a | bfloat16 | 1.60 | 0.05 | 0.15 | fla 0.6 0.08, tileops (published) 0.1 | 300 | 1.5 | 40 | comp |"
    assert a in text
    assert "| b | bfloat16 | 0.50 | 0.2 |" in text
    assert "| GDNFwd | fla 0.6 | 2 | 1.79 | 1.60 | 2.00 |" in text
    assert "SM clock: 1980 to 1980 MHz; 2026-12-01" in text
    assert "| flashqla | all |  | unavailable | ModuleNotFoundError: no \\| module |" in text
    assert "Not measured" not in results(ROWS[:2])
    assert "too far from the recurrence" in results([ROWS[0] | {"accurate": False}])


def test_a_section_per_code_and_device() -> None:
    rows = [*ROWS[:2], row("a", 0.04, code="d"), row("a", 9.0, device="MI325X", published={})]
    found = sections(rows)
    assert [s.title for s in found] == ["NVIDIA H200 · 0.1 · c", "NVIDIA H200 · 0.1 · d", "MI325X · 0.1 · c"]
    assert "ratio" not in found[2].rows[0]


def test_page_and_pictures(tmp_path: Path) -> None:
    rows = [row(f"tp8-{t}", t / 1e5, t) for t in (2048, 4096, 8192)]
    rows += [row(f"tp8-{t}", t / 5e4, t, peer="fla", peer_version="0.6") for t in (2048, 4096, 8192)]
    rows += [row("<b>", 0.1, 1), row("packed", 0.1, lengths=[1024, 1024])]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["report", str(source), "-o", str(tmp_path / "r.md"), "--html", str(tmp_path / "r.html")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert text.count("<svg") == 2
    assert "805 TFLOP/s" in text
    assert "2/8 heads, K = 128" in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "https://matplotlib.org", ""
    ).replace("http://creativecommons.org", "")
    assert "| tp8-2048 |" in (tmp_path / "r.md").read_text()


def test_lines_of_a_panel() -> None:
    rows = [r | {"alternatives": {"fla 0.6": 1.0}} for r in (row("t", t / 1e5, t) for t in (1, 2048, 4096, 8192))]
    figure = plots.lengths(rows)
    assert figure is not None
    lines = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].get_lines()}
    assert lines == {name: [2048, 4096, 8192] for name in ("floor", "fla", "qla")}
    assert plots.lengths(rows[:3]) is None


def test_a_device_without_known_ceilings_has_points_only() -> None:
    assert page.html([row("a", 0.1, device="CPU", published={})]).count("<svg") == 1


@pytest.mark.parametrize("missing", ["none.jsonl", "other.jsonl"])
def test_no_file(missing: str) -> None:
    assert CliRunner().invoke(app, ["report", missing]).exit_code == 2
