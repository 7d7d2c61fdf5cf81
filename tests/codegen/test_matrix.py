"""The list of supported kernels, and the subset that has every pair of choices."""

from __future__ import annotations

from itertools import combinations

import pytest

from qla.codegen import matrix
from qla.codegen.ops import OPS
from qla.codegen.spec import HEAD_DIMS, KernelSpec
from qla.targets import TARGETS

pytestmark = pytest.mark.parametrize("target", list(TARGETS))


def choices(spec: KernelSpec) -> tuple[object, ...]:
    return spec.op, spec.stage, spec.dtype, spec.dk, spec.dv, spec.loads, spec.saves, spec.schedule


def pairs(specs: list[KernelSpec]) -> set[object]:
    return {pair for spec in specs for pair in combinations(enumerate(choices(spec)), 2)}


def test_full_names_each_kernel_once(target: str) -> None:
    specs = matrix.full(target)
    assert len(set(specs)) == len(specs) <= matrix.MOST_KERNELS
    assert {spec.target for spec in specs} == {target}


def test_full_has_every_choice(target: str) -> None:
    specs, facts = matrix.full(target), TARGETS[target]
    plain = {(s.op, s.stage, s.dtype, s.dk) for s in specs if not s.saves and s.loads == "tile"}
    assert plain == {
        (op, stage, dtype, dk)
        for op in OPS for stage in ("prepare", "scan") for dtype in facts.dtypes for dk in HEAD_DIMS
    }  # fmt: skip
    scans = {(s.dk, s.dv) for s in specs if s.stage == "scan"}
    assert scans == {(dk, dv) for dk in HEAD_DIMS for dv in HEAD_DIMS}
    assert {s.schedule or facts.schedules[0].name for s in specs} == {s.name for s in facts.schedules}
    assert {s.op for s in specs if s.saves} == set(matrix.SAVING_OPS)
    assert {s.loads for s in specs} == ({"tile"} if target == "host" else {"tile", "strided"})


def test_pairwise_has_all_pairs(target: str) -> None:
    few = matrix.pairwise(target)
    assert set(few) <= set(matrix.full(target))
    assert len(few) < len(matrix.full(target)) / 3
    assert pairs(few) == pairs(matrix.full(target))
    assert few == matrix.pairwise(target)


def test_pairwise_has_each_kernel_with_all_its_head_dims(target: str) -> None:
    def dims(specs: list[KernelSpec]) -> set[object]:
        return {(s.op, s.stage, s.schedule, s.dk, s.dv) for s in specs}

    assert dims(matrix.pairwise(target)) == dims(matrix.full(target))


def test_pairwise_says_when_the_limit_is_too_low(target: str) -> None:
    with pytest.raises(ValueError, match="limit 5"):
        matrix.pairwise(target, limit=5)
