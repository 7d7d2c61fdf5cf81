"""Costs fitted to times that other costs predict, with noise: these come back, and with them the best choices."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from qla.bench import fit as fits
from qla.bench.cli import app
from qla.bench.fit import Sample, fit, parameters, predicted, regrets, using
from qla.bench.plans import call_shape
from qla.bench.split_sweep import listed
from qla.bench.splits import candidates, forced, knobs, stages_ms
from qla.bench.workloads import Case
from qla.codegen.planner import choices, plan_call, split
from qla.codegen.render import render
from qla.runtime import plan
from qla.targets import TARGETS, Costs
from qla.targets.base import tuned

COSTS = cast(Costs, TARGETS["sm_90a"].costs)
PREPARE = {kind: {least: 0.6 * us for least, us in table.items()} for kind, table in COSTS.prepare_us.items()}
# A device on which much is different.
TRUTH = replace(
    COSTS, scan_chunk_us=0.7, scan_full_chunk_us=1.3, carry_chunk_us=0.9, carry_pair_chunk_us=1.1, combine_step_us=3.5,
    launch_us=2.5, prepare_us=PREPARE,
)  # fmt: skip


def measured(name: str, noise: float = 0.01) -> list[Sample]:
    """Times of a list's workloads on that device."""
    found, chance = [], random.Random(name)
    for case in listed(name):
        shape = call_shape(case)
        for choice in candidates(shape, "sm_90a", 132):
            sample = Sample(case.name, shape, "sm_90a", 132, knobs(choice), 0.0, {})
            with using("sm_90a", TRUTH):
                us = predicted(sample)
            stages = {stage: 1e-3 * t * (1 + chance.gauss(0, noise)) for stage, t in us.items()}
            found.append(replace(sample, ms=sum(stages.values()), stages_ms=stages))
    return found


@pytest.fixture(scope="module")
def fitted() -> Costs:
    samples = measured("swept")
    # One time in twenty is far off, as when something else ran beside it.
    broken = [replace(s, stages_ms={**s.stages_ms, "scan": 3 * s.stages_ms["scan"]}) for s in samples[::20]]
    return fit([*broken, *(sample for n, sample in enumerate(samples) if n % 20)], COSTS)


def test_costs_come_back(fitted: Costs) -> None:
    want, start, got = (parameters(costs) for costs in (TRUTH, COSTS, fitted))
    assert want.keys() == got.keys()
    seen = [name for name in want if got[name] != start[name]]
    assert len(seen) >= 9
    for name in seen:
        assert got[name] == pytest.approx(want[name], rel=0.06), name
    # No workload of the list says anything about the others.
    assert {name for name in want if name not in seen} == {
        "prepare_us[(True, 'none')][2]", "prepare_us[(True, 'none')][4]", "prepare_us[(False, 'channel')][1]"
    }  # fmt: skip


def test_workloads_that_were_not_swept_are_run_well(fitted: Costs) -> None:
    for name, most in (("swept", 0.03), ("held-out", 0.05)):
        samples = measured(name)
        before = regrets(samples)
        with using("sm_90a", fitted):
            after = regrets(samples)
        assert max(after.values()) <= most
        assert max(before.values()) > 2 * most, "the costs to start from would have done as well"
    assert TARGETS["sm_90a"].costs == COSTS


def test_choices_come_before_predictions() -> None:
    """What the formula cannot describe is still no reason for bad choices, also for workloads not seen."""

    def bent(name: str) -> list[Sample]:
        found = []
        for sample in measured(name, 0.005):
            factor = split(sample.shape, "sm_90a", 132, **sample.knobs).segments ** 0.25
            stages = {stage: factor * ms for stage, ms in sample.stages_ms.items()}
            found.append(replace(sample, ms=sum(stages.values()), stages_ms=stages))
        return found

    def worst(logs: np.ndarray, samples: list[Sample]) -> float:
        with using("sm_90a", problem.with_logs(logs)):
            return max(regrets(samples).values())

    problem = fits._Problem(bent("swept"), COSTS, predicted)
    squares = fits._least_squares(problem)
    assert worst(squares, problem.samples) > 0.03, "least squares would do"
    nearer = fits._nearer(problem, squares)
    assert worst(nearer, problem.samples) < 0.01
    assert worst(nearer, bent("held-out")) < 0.03


def test_another_formula_is_fitted_as_well() -> None:
    def predict(sample: Sample) -> Mapping[str, float]:
        costs = cast(Costs, TARGETS["sm_90a"].costs)
        return {"scan": costs.scan_chunk_us * sample.shape.tokens**0.5 + costs.launch_us}

    samples = [replace(s, stages_ms={"scan": (0.3 * s.shape.tokens**0.5 + 9.0) / 1e3}) for s in measured("swept")]
    samples = [replace(s, ms=s.stages_ms["scan"]) for s in samples]
    got = fit(samples, COSTS, predict)
    assert (got.scan_chunk_us, got.launch_us) == (pytest.approx(0.3, rel=1e-3), pytest.approx(9.0, rel=1e-3))
    assert got.carry_chunk_us == COSTS.carry_chunk_us


def test_costs_survive_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = COSTS.updated(json.loads(json.dumps(TRUTH.to_json())))
    assert again == TRUTH
    with pytest.raises(ValueError, match="no_such_us"):
        COSTS.updated({"no_such_us": 1.0})
    (tmp_path / "tuned").mkdir()
    monkeypatch.setattr("qla.targets.base.files", lambda package: tmp_path)
    assert tuned("sm_90a", COSTS) is COSTS
    (tmp_path / "tuned" / "sm_90a.json").write_text(json.dumps({"costs": {"launch_us": 3.0}}))
    assert tuned("sm_90a", COSTS) == replace(COSTS, launch_us=3.0)


def test_candidates_span_what_the_planner_chooses_from() -> None:
    for case in [*listed("swept"), *listed("held-out")]:
        shape = call_shape(case)
        every, some = choices(shape, "sm_90a", 132), candidates(shape, "sm_90a", 132)
        assert [choice for choice in every if choice in some] == some
        assert some[0] == every[0]
        assert all(b.segments >= 1.3 * a.segments for a, b in pairwise(some))
        assert some[-1].segments > 0.7 * every[-1].segments
        assert len({json.dumps(knobs(choice)) for choice in every}) == len(every)
    assert not {case.name for case in listed("swept")} & {case.name for case in listed("held-out")}
    assert len(listed("swept")) == len(listed("held-out")) == 12


def test_a_forced_choice_is_what_the_runtime_asks_for() -> None:
    shape = call_shape(listed("swept")[0])
    choice = split(shape, "sm_90a", 132, 8)
    before = plan.layouts

    def call() -> tuple[Any, Any]:
        return vars(plan)["plan_call"](shape, "sm_90a", 132), plan.layouts

    run = forced(call, choice)
    (taken, layouts), (_, again) = run(), run()
    assert taken is choice
    assert layouts is again is not before
    assert plan.layouts is before
    assert vars(plan)["plan_call"] is plan_call


def test_stages_are_told_by_the_names_of_kernels() -> None:
    choice = split(call_shape(listed("swept")[0]), "sm_90a", 132, 8)
    names = [render(spec).entry for spec in choice.kernels]
    times = {f"{name}(args)": float(n) for n, name in enumerate(names, 1)}
    assert stages_ms(choice, {**times, "Memset (Device)": 7.0}) == {
        "prepare": 1.0, "carry": 2.0, "combine": 3.0, "scan": 4.0
    }  # fmt: skip
    assert stages_ms(choice, {}) == {}


class FakeProcess:
    """Stands for a worker on a device that takes the times that `TRUTH` predicts."""

    running = True
    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, *setup: Any) -> None:
        names = ("device", "code", "driver", "torch", "compiler")
        self.hello = {"status": "ok", "machine": {"target": "sm_90a", **dict.fromkeys(names, "x")}}

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """As `Process` has it."""
        self.asked.append(request)
        if "warm" in request:
            return {"status": "ok"}
        shape = call_shape(Case.from_json(json.loads(json.dumps(request["splits"]))))
        only = request.get("knobs")
        rows = []
        for choice in choices(shape, "sm_90a", 132) if only else candidates(shape, "sm_90a", 132):
            if not only or knobs(choice) in only:
                with using("sm_90a", TRUTH):
                    us = predicted(Sample("", shape, "sm_90a", 132, knobs(choice), 0.0, {}))
                stages = {stage: us / 1e3 for stage, us in us.items()}
                row = {"knobs": knobs(choice), "processors": 132, "status": "ok", "stages_ms": stages}
                rows.append({**row, "median_ms": sum(stages.values())})
        return {"status": "ok", "rows": rows}

    def close(self) -> None:
        """Nothing to close."""


def test_sweep_update_and_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "sm_90a", TARGETS["sm_90a"])
    monkeypatch.setattr("qla.bench.split_sweep.Process", FakeProcess)
    monkeypatch.setattr("qla.bench.cli._device", lambda device: "cuda")
    arguments = ["sweep", "-o", str(tmp_path / "sweep.jsonl")]

    def worst(*more: str) -> tuple[float, int]:
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert result.output.count("\t") >= 6 * 13
        measured = int(result.output.splitlines()[-1].split()[0])
        return float(result.output.splitlines()[-2].removeprefix("auto over best: ").split()[0]), measured

    none = CliRunner().invoke(app, [*arguments, "--budget", "-1"])
    assert "0 measured, 12 left" in none.output
    assert worst()[0] > 1.05
    found, again = worst("--update", "--costs", str(tmp_path / "sm_90a.json"))
    assert (found, again) == (1.0, 0), "what was measured before is measured again"
    assert cast(Costs, TARGETS["sm_90a"].costs).launch_us == pytest.approx(2.5, rel=0.02)
    assert COSTS.updated(json.loads((tmp_path / "sm_90a.json").read_text())["costs"]) != COSTS
    assert worst("--held-out") == (1.0, 12)
    # What the planner takes is measured also where it is not among the candidates.
    assert any("knobs" in request for request in FakeProcess.asked)


def write_rows(path: Path, samples: list[Sample], **more: Any) -> None:
    machine = {"device": "d", "code": "c", "driver": "1", "torch": "2", "compiler": "n", "target": "sm_90a"}
    with path.open("a") as file:
        for number, s in enumerate(samples):
            row = {
                "key": f"{number}", "call": s.call, "shape": asdict(s.shape), "lengths": None, "knobs": dict(s.knobs),
                "date": "2026-12-01", "status": "ok", "median_ms": s.ms, "stages_ms": dict(s.stages_ms),
                "processors": s.processors, **machine, **more,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


def test_tune_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "sm_90a", TARGETS["sm_90a"])
    monkeypatch.setattr(fits, "_ROUNDS", 4)
    path, costs = tmp_path / "sweep.jsonl", tmp_path / "tuned" / "sm_90a.json"
    write_rows(path, measured("swept")[::3])
    result = CliRunner().invoke(app, ["tune", str(path), "--costs", str(costs)])
    assert result.exit_code == 0, result.output
    assert "from the best measured" in result.output
    data = json.loads(costs.read_text())
    assert {name: data[name] for name in ("device", "driver", "date")} == {
        "device": "d", "driver": "1", "date": "2026-12-01"
    }  # fmt: skip
    assert "12 workloads" in data["from"]
    assert COSTS.updated(data["costs"]).launch_us == pytest.approx(2.5, rel=0.2)
    # Times of two devices make no costs.
    write_rows(tmp_path / "other.jsonl", measured("swept")[:3], device="other")
    result = CliRunner().invoke(app, ["tune", str(path), str(tmp_path / "other.jsonl"), "--costs", str(costs)])
    assert result.exit_code == 2
