"""Which kernels are supported on a target, and a small set of them that still has every pair of choices once."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, Literal, cast

from qla.codegen.ops import OPS
from qla.codegen.spec import HEAD_DIMS, Dtype, KernelSpec, Stage
from qla.targets import TARGETS

# The ops behind `DeltaNetChunkFwd` and `GLAChunkFwd`, which keep chunk states and factors.
SAVING_OPS = ("delta_rule", "gla")
MOST_KERNELS = 150

Loads = Literal["tile", "strided"]
_STAGES: tuple[Stage, ...] = ("prepare", "scan")
_Pair = tuple[tuple[int, Any], tuple[int, Any]]


def full(target: str) -> list[KernelSpec]:
    """Every supported kernel of a target, each once, in a fixed order.

    The stage `prepare` does not look at the value dim unless it also writes the factors of a delta op; such kernels are
    listed with ``dv = dk`` only. Schedules other than the default are there to be measured: they are listed for one
    dtype and the largest head dims.
    """
    specs = dict.fromkeys(_default_schedule(target))
    for schedule in TARGETS[target].schedules[1:]:
        largest, dtype = HEAD_DIMS[-1], cast(Dtype, TARGETS[target].dtypes[0])
        for op in OPS:
            specs[KernelSpec(op, "scan", dtype, largest, largest, target, schedule=schedule.name)] = None
    return list(specs)


def _default_schedule(target: str) -> list[KernelSpec]:
    facts = TARGETS[target]
    # The host reads any strides with one and the same kernel.
    loads: tuple[Loads, ...] = ("tile",) if facts.language == "c++" else ("tile", "strided")
    specs = []
    for op, stage, dtype, dk, dv, load, saves in product(
        OPS, _STAGES, facts.dtypes, HEAD_DIMS, HEAD_DIMS, loads, (False, True)
    ):
        if saves and op not in SAVING_OPS:
            continue
        if stage == "prepare":
            if saves and not OPS[op].delta:
                continue
            if not saves and dv != dk:
                continue
        specs.append(KernelSpec(op, stage, cast(Dtype, dtype), dk, dv, target, load, saves))
    return specs


def pairwise(target: str, limit: int = MOST_KERNELS) -> list[KernelSpec]:
    """A subset of `full` in which any two choices that occur together there occur together at least once.

    Op, stage and schedule count as one choice, because they make the kernel what it is, and so do the two head dims;
    the others are dtype, loads and saves. So each kernel is there with all head dims, the largest among them. Greedy,
    and the same on every run.

    Parameters
    ----------
    target : key of `qla.targets.TARGETS`.
    limit : most kernels that may be needed; `ValueError` if it takes more.
    """
    candidates = {spec: _pairs(spec) for spec in full(target)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        # `max` takes the first of equals, so the order of `full` decides.
        best = max(candidates, key=lambda spec: len(candidates[spec] & missing))
        missing -= candidates.pop(best)
        chosen.append(best)
    if len(chosen) > limit:
        raise ValueError(f"{target}: {len(chosen)} kernels are needed to have all pairs of choices, limit {limit}")
    return chosen


def _pairs(spec: KernelSpec) -> set[_Pair]:
    choices = ((spec.op, spec.stage, spec.schedule), (spec.dk, spec.dv), spec.dtype, spec.loads, spec.saves)
    return set(combinations(enumerate(choices), 2))
