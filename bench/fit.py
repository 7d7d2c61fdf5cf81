"""A target's costs from measured times: with them the planner predicts what was measured, and chooses the best.

The planner's formula is not written down here a second time. It is asked, with other costs in the target, so whatever
it makes of them is what is fitted: by robust least squares over the times of all stages, and where its choices are then
still worse than the best ones that were measured, by steps that make them better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np

from qla.codegen.explain import Explanation
from qla.codegen.planner import CallShape, split
from qla.targets import TARGETS, Costs

__all__ = ["Prediction", "Sample", "fit", "parameters", "predicted", "regrets", "using"]

# Not for a fit: ceilings of the device, which are measured by themselves.
_FIXED = ("bandwidth",)
_HUBER = 0.02  # of a call's time: errors beyond that count in proportion
_FARTHEST = math.log(3.0)
_ROUNDS = 30
_GOOD = 0.02  # a choice so near to the best is as good
_CLOSE = 0.03  # predictions so near to each other are taken for one
_FIRST_STEP, _LAST_STEP, _AWAY = 0.1, 0.02, 0.5


@dataclass(frozen=True)
class Sample:
    """One choice for one call, measured.

    Parameters
    ----------
    call : equal for choices for the same call.
    shape, target, processors, knobs : what ran.
    ms : of all of it.
    stages_ms : of its stages.
    """

    call: str
    shape: CallShape
    target: str
    processors: int
    knobs: Mapping[str, Any]
    ms: float
    stages_ms: Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
    """Microseconds of the stages of a sample, and the number of which the planner takes the least."""

    us: Mapping[str, float]
    cost: float


Predict = Callable[[Sample], Prediction]


def parameters(costs: Costs) -> dict[str, float]:
    """All numbers in costs by name, those of tables too."""
    found: dict[str, float] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                walk(f"{name}[{key}]", part)
        elif isinstance(value, tuple):
            walk(name, dict(enumerate(value)))
        elif isinstance(value, float):
            found[name] = value

    for field in fields(costs):
        if field.name not in _FIXED:
            walk(field.name, getattr(costs, field.name))
    return found


def _with(costs: Costs, values: Mapping[str, float]) -> Costs:
    def walk(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(f"{name}[{key}]", part) for key, part in value.items()}
        if isinstance(value, tuple):
            # Alone, and with others on the device: these never make it take less time.
            return tuple(accumulate(walk(name, dict(enumerate(value))).values(), max))
        return values.get(name, value)

    return replace(costs, **{field.name: walk(field.name, getattr(costs, field.name)) for field in fields(costs)})


@contextmanager
def using(target: str, costs: Costs) -> Iterator[None]:
    """Have the planner go by these costs."""
    kept = TARGETS[target]
    TARGETS[target] = replace(kept, costs=costs)
    try:
        yield
    finally:
        TARGETS[target] = kept


def predicted(sample: Sample) -> Prediction:
    """What the planner and `explain` say of a choice."""
    choice = split(sample.shape, sample.target, sample.processors, **sample.knobs)
    prepare, *_ = Explanation(choice).launches
    # Samples are taken with the decays that models have.
    us: dict[str, float] = dict(choice.short_us.items())
    us["prepare"] = prepare.us or 0.0
    # A choice's cost is a product of two times, and `prepare` is the same for all.
    return Prediction(us, math.sqrt(choice.cost) + us["prepare"])


def _best(samples: Sequence[Sample]) -> dict[str, float]:
    best: dict[str, float] = {}
    for sample in samples:
        best[sample.call] = min(sample.ms, best.get(sample.call, math.inf))
    return best


def regrets(samples: Sequence[Sample], predict: Predict = predicted) -> dict[str, float]:
    """By call, how much longer than the best of the measured choices that takes which the planner would choose."""
    best = _best(samples)
    chosen: dict[str, tuple[float, float]] = {}
    for sample in samples:
        cost = predict(sample).cost
        if sample.call not in chosen or cost < chosen[sample.call][0]:
            chosen[sample.call] = (cost, sample.ms)
    return {call: ms / best[call] - 1 for call, (_, ms) in chosen.items()}


class _Problem:
    """The costs of one target as logarithms, and what is wrong with them."""

    def __init__(self, samples: Sequence[Sample], costs: Costs, predict: Predict) -> None:
        (self.target,) = {sample.target for sample in samples}
        self.samples, self.costs, self.predict = samples, costs, predict
        self.start = parameters(costs)
        best = _best(samples)
        # What matters is the share of the whole call, and more so the nearer a choice is to the best.
        self.scales = [1e3 * sample.ms**2 / best[sample.call] for sample in samples]
        self.losses = np.array([sample.ms / best[sample.call] - 1 for sample in samples])
        self.calls = [np.flatnonzero([sample.call == call for sample in samples]) for call in best]

    def with_logs(self, logs: np.ndarray) -> Costs:
        values = zip(self.start.items(), logs, strict=True)
        return _with(self.costs, {name: value * math.exp(log) for (name, value), log in values})

    def predictions(self, logs: np.ndarray) -> list[Prediction]:
        with using(self.target, self.with_logs(logs)):
            return [self.predict(sample) for sample in self.samples]

    def residuals(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Of each stage of each sample, as a part of the call."""
        return np.array([
            (prediction.us.get(stage, 0.0) - 1e3 * ms) / scale
            for prediction, sample, scale in zip(predictions, self.samples, self.scales, strict=True)
            for stage, ms in sample.stages_ms.items()
        ])  # fmt: skip

    def misfit(self, residuals: np.ndarray) -> float:
        size = np.abs(residuals)
        return float(np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())

    def objective(self, logs: np.ndarray) -> tuple[float, float]:
        """What the planner's choices lose, made smooth, and some of the misfit; and the most that one of them loses.

        A choice is taken with a probability that falls with its predicted cost, so a small change of a cost shows.
        """
        predictions = self.predictions(logs)
        costs = np.array([prediction.cost for prediction in predictions])
        lost = worst = 0.0
        for call in self.calls:
            odds = np.exp((1 - costs[call] / costs[call].min()) / _CLOSE)
            loss = float(odds @ self.losses[call] / odds.sum())
            lost += loss + 10 * loss**2
            worst = max(worst, float(self.losses[call][costs[call].argmin()]))
        residuals = self.residuals(predictions)
        return lost / len(self.calls) + 10 * self.misfit(residuals) / len(residuals), worst


def fit(samples: Sequence[Sample], costs: Costs, predict: Predict = predicted, plain: bool = False) -> Costs:
    """Costs that fit the samples; what no sample depends on stays as it is.

    Parameters
    ----------
    samples : of one target, with times of their stages.
    costs : to start from.
    predict : what is said of a sample by the costs in its target.
    plain : for the best predictions, whatever choices follow from them.
    """
    problem = _Problem(samples, costs, predict)
    logs = _least_squares(problem)
    return problem.with_logs(logs if plain else _nearer(problem, logs))


def _nearer(problem: _Problem, start: np.ndarray) -> np.ndarray:
    """Costs near those of least squares with choices that are good enough, by steps along one cost at a time."""
    logs: np.ndarray = start.copy()
    (value, worst), step = problem.objective(start), _FIRST_STEP
    while step >= _LAST_STEP:
        before = value
        for index in np.flatnonzero(start):
            for sign in (1, -1):
                if worst <= _GOOD:
                    return logs
                tried = logs.copy()
                tried[index] += sign * step
                if abs(tried[index] - start[index]) > _AWAY:
                    continue
                found, most = problem.objective(tried)
                if found < value - 1e-6:
                    logs, value, worst = tried, found, most
                    break
        step /= 1 if value < before else 2
    return logs


def _least_squares(problem: _Problem) -> np.ndarray:
    """Levenberg and Marquardt's way, with Huber's weights; logarithms of factors on the costs."""

    def seen(logs: np.ndarray) -> np.ndarray:
        return problem.residuals(problem.predictions(logs))

    logs: np.ndarray = np.zeros(len(problem.start))
    residuals = seen(logs)
    value, damping = problem.misfit(residuals), 1e-2
    for _ in range(_ROUNDS):
        step = 1e-3
        moved = [seen(logs + step * unit) for unit in np.eye(len(logs))]
        jacobian = np.stack([(other - residuals) / step for other in moved], 1)
        used = np.abs(jacobian).max(0) > 0
        if not used.any():
            break
        J = jacobian[:, used]
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(residuals), 1e-12))[:, None]
        normal, gradient = J.T @ (weights * J), (J.T @ (weights[:, 0] * residuals))
        better, before = False, value
        while damping < 1e6 and not better:
            tried: np.ndarray = logs.copy()
            # The small constant keeps what is hardly seen where it is.
            diagonal = np.diag(damping * np.diag(normal) + 1e-9)
            tried[used] = np.clip(tried[used] - np.linalg.solve(normal + diagonal, gradient), -_FARTHEST, _FARTHEST)
            other = seen(tried)
            if better := problem.misfit(other) < value * (1 - 1e-9):
                logs, residuals, value = tried, other, problem.misfit(other)
            damping *= 0.1 if better else 10
        if value > before * (1 - 1e-6):
            break
    return logs
