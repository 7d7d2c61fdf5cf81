"""Tunings of the targets, and a sweep on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qla.bench.cli import app
from qla.bench.tunings import apply, tunings
from qla.codegen.render import render
from qla.codegen.spec import KernelSpec
from qla.errors import ScheduleError
from qla.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_every_schedule_as_it_stands_comes_first(name: str) -> None:
    found = tunings(name)
    for schedule in TARGETS[name].schedules:
        own = next(t for t in found if t["schedule"] == schedule.name)
        assert own["rings"] == list(schedule.rings.values())
        assert (own["unroll"], own["streams"]) == (schedule.unroll, schedule.streams)
    assert len({json.dumps(t) for t in found}) == len(found)


def test_a_forced_tuning_is_what_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a")
    texts, refused = [], []
    for tuning in tunings("sm_90a"):
        render.cache_clear()  # a process that measures a tuning has rendered nothing before
        with monkeypatch.context() as patch:
            patch.setitem(TARGETS, "sm_90a", TARGETS["sm_90a"])
            apply("sm_90a", tuning)
            try:
                texts.append(render(spec).text)
            except ScheduleError as error:
                refused.append(str(error))
    render.cache_clear()
    assert len(set(texts)) == len(texts) > 5
    # More than there is: an outcome like any other.
    assert all("shared memory" in reason for reason in refused)


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"schedule": "none", "rings": [1], "unroll": 1, "streams": 1}
    monkeypatch.setattr("qla.bench.sweep.tunings", lambda target: [*tunings(target), bad])
    path = tmp_path / "sweep.json"
    arguments = ["sweep", "--tunings", "--device", "cpu", "--seed", "001", "--op", "GDNFwd", "--name", "decode-b[1]"]
    arguments += ["--dtype", "bf16", "--reps", "3", "-o", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "3 measured, 0 left" in result.output
    data = json.loads(path.read_text())
    assert data["device"]["target"] == "host"
    auto, forced, failed = data["results"]
    assert (auto["config"], forced["config"], forced["schedule"]) == ("auto", "forced", "serial")
    for measured in (auto, forced):
        assert 0 < measured["q1_ms"] <= measured["median_ms"] <= measured["q3_ms"]
        assert 0 < measured["rel_err"] < 0.005
        assert measured["compile_s"] > 0.05
    # What cannot be built costs its own result.
    assert failed["error"] == "KeyError: 'none'"
    assert "KeyError: 'none'" in result.output
    assert "0 measured, 0 left" in CliRunner().invoke(app, arguments).output
