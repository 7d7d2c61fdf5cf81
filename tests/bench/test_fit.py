"""Costs fitted to times that other costs predict, with noise: these come back, and with them the best choices."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from qla.bench import fit as fits
from qla.bench.cli import app
from qla.bench.fit import Prediction, Sample, fit, parameters, predicted, regrets, using
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
    COSTS,
    scan_chunk_us={"none": (0.8, 1.2), "head": (0.7, 1.3), "channel": (0.9, 1.6)},
    pair_chunk_us={"none": (1.2, 2.1), "head": (1.1, 2.2)},
    carry_chunk_us={"none": (0.8, 1.2), "head": (1.0, 1.5), "channel": (0.8, 1.6)},
    combine_step_us=1.4,
    combine_short_step_us=0.05,
    launch_us=8.0,
    prepare_us=PREPARE,
)


def measured(name: str, noise: float = 0.01) -> list[Sample]:
    """Times of a list's workloads on that device."""
    found, chance = [], random.Random(name)
    for case in listed(name):
        shape = call_shape(case)
        for choice in candidates(shape, "sm_90a", 132):
            sample = Sample(case.name, shape, "sm_90a", 132, knobs(choice), 0.0, {})
            with using("sm_90a", TRUTH):
                us = predicted(sample).us
            stages = {stage: 1e-3 * t * (1 + chance.gauss(0, noise)) for stage, t in us.items()}
            found.append(replace(sample, ms=sum(stages.values()), stages_ms=stages))
    return found


@pytest.fixture(scope="module")
def squares() -> tuple[fits._Problem, np.ndarray]:
    """What least squares make of times of which one in twenty is far off, as when something else ran beside it."""
    samples = measured("swept", 0.003)
    broken = [replace(s, stages_ms={**s.stages_ms, "scan": 3 * s.stages_ms["scan"]}) for s in samples[::20]]
    problem = fits._Problem([*broken, *(s for n, s in enumerate(samples) if n % 20)], COSTS, predicted)
    return problem, fits._least_squares(problem)


def worst(costs: Costs, samples: list[Sample]) -> float:
    with using("sm_90a", costs):
        return max(regrets(samples).values())


def test_costs_come_back(squares: tuple[fits._Problem, np.ndarray]) -> None:
    problem, logs = squares
    want, start, got = (parameters(costs) for costs in (TRUTH, COSTS, problem.with_logs(logs)))
    assert want.keys() == got.keys()
    seen = [name for name in want if got[name] != start[name]]
    # No workload of the list says anything about the others.
    assert {name for name in want if name not in seen} == {
        "prepare_us[(True, 'none')][2]", "prepare_us[(True, 'none')][4]", "prepare_us[(False, 'channel')][1]"
    }  # fmt: skip
    off = {name: abs(math.log(got[name] / want[name])) for name in seen}
    before = {name: abs(math.log(start[name] / want[name])) for name in seen}
    assert statistics.median(off.values()) < 0.02
    assert sum(off.values()) < 0.2 * sum(before.values())
    # Times of one kernel that weigh much in many calls.
    for name in ("scan_chunk_us[head][0]", "scan_chunk_us[head][1]", "carry_chunk_us[head][0]", "launch_us"):
        assert off[name] < 0.05, name


@pytest.fixture(scope="module")
def fitted() -> Costs:
    return fit(measured("swept"), COSTS)


def test_workloads_that_were_not_swept_are_run_well(fitted: Costs) -> None:
    samples, others = measured("swept"), measured("held-out")
    assert worst(fitted, samples) <= 0.03 < worst(COSTS, samples)
    assert worst(fitted, others) <= 0.05 < worst(COSTS, others)
    assert TARGETS["sm_90a"].costs == COSTS


def test_choices_come_before_predictions(fitted: Costs) -> None:
    """The planner weighs decays that no sample has, too: right costs alone do not make the best choices for these."""
    samples = measured("swept")
    assert worst(TRUTH, samples) > 0.03
    assert worst(fit(samples, COSTS, plain=True), samples) > 0.03, "least squares would do"
    assert worst(fitted, samples) <= 0.02


def test_another_formula_is_fitted_as_well() -> None:
    def predict(sample: Sample) -> Prediction:
        costs = cast(Costs, TARGETS["sm_90a"].costs)
        us = costs.combine_step_us * sample.shape.tokens**0.5 + costs.launch_us
        return Prediction({"scan": us}, us)

    samples = [replace(s, stages_ms={"scan": (1.5 * s.shape.tokens**0.5 + 9.0) / 1e3}) for s in measured("swept")]
    samples = [replace(s, ms=s.stages_ms["scan"]) for s in samples]
    got = fit(samples, COSTS, predict)
    assert (got.combine_step_us, got.launch_us) == (pytest.approx(1.5, rel=1e-3), pytest.approx(9.0, rel=1e-3))
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
        for name in {choice.schedule for choice in every}:
            one = [choice for choice in some if choice.schedule == name]
            assert all(b.segments >= 1.3 * a.segments for a, b in pairwise(one))
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
                    us = predicted(Sample("", shape, "sm_90a", 132, knobs(choice), 0.0, {})).us
                stages = {stage: us / 1e3 for stage, us in us.items()}
                row = {"knobs": knobs(choice), "processors": 132, "status": "ok", "stages_ms": stages}
                rows.append({**row, "median_ms": sum(stages.values())})
        return {"status": "ok", "rows": rows}

    def close(self) -> None:
        """Nothing to close."""


def test_sweep_update_and_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "sm_90a", TARGETS["sm_90a"])
    monkeypatch.setattr("qla.bench.split_sweep.Process", FakeProcess)
    monkeypatch.setattr(fits, "_ROUNDS", 6)  # they take a while, and come out alike
    monkeypatch.setattr(fits, "_LAST_STEP", 0.06)
    monkeypatch.setattr("qla.bench.cli._device", lambda device: "cuda")
    arguments = ["sweep", "-o", str(tmp_path / "sweep.jsonl")]

    def auto(*more: str) -> tuple[float, int]:
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert result.output.count("\t") >= 6 * 13
        measured = int(result.output.splitlines()[-1].split()[0])
        return float(result.output.splitlines()[-2].removeprefix("auto over best: ").split()[0]), measured

    none = CliRunner().invoke(app, [*arguments, "--budget", "-1"])
    assert "0 measured, 12 left" in none.output
    assert auto()[0] > 1.03
    found, again = auto("--update", "--costs", str(tmp_path / "sm_90a.json"))
    assert found <= 1.03
    assert again == 0, "what was measured before is measured again"
    assert COSTS.updated(json.loads((tmp_path / "sm_90a.json").read_text())["costs"]) != COSTS
    found, again = auto("--held-out")
    assert found <= 1.05
    assert again == 12
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
    write_rows(tmp_path / "held-out.jsonl", measured("held-out"))
    more = ["--check", str(tmp_path / "held-out.jsonl")]
    result = CliRunner().invoke(app, ["tune", str(path), "--costs", str(costs), *more])
    assert result.exit_code == 0, result.output
    assert "others: choices up to" in result.output
    assert result.output.count("from the best measured") == 2
    data = json.loads(costs.read_text())
    assert {name: data[name] for name in ("device", "driver", "date")} == {
        "device": "d", "driver": "1", "date": "2026-12-01"
    }  # fmt: skip
    assert "12 workloads" in data["from"]
    assert COSTS.updated(data["costs"]) != COSTS
    plain = CliRunner().invoke(app, ["tune", str(path), "--costs", str(tmp_path / "plain.json"), "--plain"])
    assert plain.exit_code == 0
    assert plain.output.count("from the best measured") == 1
    # Times of two devices make no costs.
    write_rows(tmp_path / "other.jsonl", measured("swept")[:3], device="other")
    result = CliRunner().invoke(app, ["tune", str(path), str(tmp_path / "other.jsonl"), "--costs", str(costs)])
    assert result.exit_code == 2
