"""Which kernels are supported on a target, and a small set of them that still has every pair of choices once."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any, cast

from qla.codegen.ops import OPS
from qla.codegen.spec import HEAD_DIMS, Dtype, KernelSpec, Loads
from qla.targets import TARGETS

_Pair = tuple[tuple[int, Any], tuple[int, Any]]


def full(target: str) -> list[KernelSpec]:
    """Every supported kernel of a target, each once (as its canonical spec), in a fixed order.

    The runtime takes the default schedule, with or without segments, or one with more column blocks to a workgroup. The
    other schedules are there to be measured: they are listed for one dtype and the largest head dims.
    """
    facts = TARGETS[target]
    scans = [
        KernelSpec(op, "scan", cast(Dtype, dtype), dk, dv, target, cast(Loads, loads), saves)
        for op, dtype, dk, dv, loads, saves in product(
            OPS, facts.dtypes, HEAD_DIMS, HEAD_DIMS, facts.loads, (False, True)
        )
        if OPS[op].saves or not saves
    ]
    kernels = [kernel for scan in scans for kernel in scan.kernels()]
    kernels += [kernel for scan in scans if scan.divisible for kernel in scan.kernels(segments=True)]
    kernels += [replace(scan, schedule=name) for scan in scans for name in scan.schedules[1:]]
    dtype, dim = cast(Dtype, facts.dtypes[0]), HEAD_DIMS[-1]
    for schedule in (s for s in facts.schedules[1:] if s.streams <= facts.schedules[0].streams):
        kernels += [KernelSpec(op, "scan", dtype, dim, dim, target, schedule=schedule.name) for op in OPS]
    return list(dict.fromkeys(kernels))


def pairwise(target: str) -> list[KernelSpec]:
    """A subset of `full` in which any two choices that occur together there occur together at least once.

    Op, stage and schedule count as one choice, because they make the kernel what it is, and so do the two head dims;
    the others are dtype, loads and saves. So each kernel is there with all head dims, the largest among them. Greedy,
    and the same on every run.
    """
    candidates = {spec: _pairs(spec) for spec in full(target)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        # `max` takes the first of equals, so the order of `full` decides.
        best = max(candidates, key=lambda spec: len(candidates[spec] & missing))
        missing -= candidates.pop(best)
        chosen.append(best)
    return chosen


def _pairs(spec: KernelSpec) -> set[_Pair]:
    choices = ((spec.op, spec.stage, spec.schedule), (spec.dk, spec.dv), spec.dtype, spec.loads, spec.saves)
    return set(combinations(enumerate(choices), 2))
