"""The list of supported kernels, and the subset that has every pair of choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from qla.codegen import matrix
from qla.codegen.ops import OPS
from qla.codegen.render import render
from qla.codegen.spec import HEAD_DIMS, KernelSpec
from qla.runtime.plan import PlanKey
from qla.targets import TARGETS

pytestmark = pytest.mark.parametrize("target", list(TARGETS))


def choices(spec: KernelSpec) -> tuple[object, ...]:
    return spec.op, spec.stage, spec.dtype, spec.dk, spec.dv, spec.loads, spec.saves, spec.schedule


def pairs(specs: list[KernelSpec]) -> set[object]:
    return {pair for spec in specs for pair in combinations(enumerate(choices(spec)), 2)}


def test_full_names_each_kernel_once(target: str) -> None:
    specs = matrix.full(target)
    assert len(set(specs)) == len(specs)
    assert {spec.target for spec in specs} == {target}
    assert [spec.canonical() for spec in specs] == specs


def test_full_has_every_choice(target: str) -> None:
    specs, facts = matrix.full(target), TARGETS[target]
    plain = {(s.op, s.stage, s.dtype, s.dk) for s in specs if not s.saves and s.loads == "tile"}
    expected = set(product(OPS, ("prepare", "scan"), facts.dtypes, HEAD_DIMS))
    if facts.segments:
        delta = [op for op, features in OPS.items() if features.delta]
        expected |= set(product(delta, ("carry",), facts.dtypes, HEAD_DIMS))
        expected |= {("gated_delta_rule", "combine", "bf16", dk) for dk in HEAD_DIMS}
    assert plain == expected
    assert len(specs) == {"sm_90a": 170, "gfx942": 144, "gfx950": 144, "host": 108}[target]
    scans = {(s.dk, s.dv) for s in specs if s.stage == "scan"}
    assert scans == {(dk, dv) for dk in HEAD_DIMS for dv in HEAD_DIMS}
    assert {s.schedule or facts.schedules[0].name for s in specs} == {s.name for s in facts.schedules}
    assert {s.op for s in specs if s.saves} == {op for op, features in OPS.items() if features.saves}
    assert {s.loads for s in specs} == set(facts.loads)


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


def test_the_runtime_asks_for_listed_kernels_only(target: str) -> None:
    """Whatever the call: any op, dtype, head dims and strides, with and without saved states."""
    listed, facts = set(matrix.full(target)), TARGETS[target]
    asked: set[KernelSpec] = set()
    for op, dtype, dk, dv, loads in product(OPS, facts.dtypes, HEAD_DIMS, HEAD_DIMS, facts.loads):
        for saves in (False, True) if OPS[op].saves else (False,):
            key = PlanKey(op, dtype, dk, dv, target, 0, loads, saves)  # type: ignore[arg-type]
            asked |= set(key.specs())
            for schedule in key.specs()[-1].schedules:
                asked |= set(replace(key, schedule=schedule).specs())
                if key.specs()[-1].divisible:
                    asked |= set(replace(key, schedule=schedule, segments=True).specs())
    assert asked <= listed
    assert listed - asked == {spec for spec in listed if spec.schedule == "skewed"}


def test_specs_of_one_canonical_spec_are_one_kernel(target: str) -> None:
    for spec in matrix.full(target):
        if spec.stage == "prepare":
            others = [replace(spec, dv=dv) for dv in HEAD_DIMS]
            if OPS[spec.op].saves:
                others += [replace(other, saves=True) for other in others]
            for other in others:
                if other.canonical() == spec != other:
                    assert render(other).text.replace(other.name, spec.name) == render(spec).text
                    assert replace(render(other), spec=spec, entry=spec.name, text="") == replace(render(spec), text="")
        if spec.stage == "carry" and OPS[spec.op].saves:
            other = replace(spec, saves=True)
            assert other.canonical() == spec
            assert render(other).text.replace(other.name, spec.name) == render(spec).text
        if spec.stage == "combine":
            others = [
                replace(spec, op=op, dtype=dtype, saves=saves)  # type: ignore[arg-type]
                for op, dtype, saves in product(("delta_rule", "kda"), TARGETS[target].dtypes, (False, True))
                if OPS[op].saves or not saves
            ]
            for other in others:
                assert other.canonical() == spec != other
                texts = [render(s).text.replace(s.name, "kernel") for s in (other, spec)]
                # What is before is the numbers' type, which it has no use for.
                assert len({text.split("struct Args")[1] for text in texts}) == 1
                assert render(other).limits == render(spec).limits
    default = TARGETS[target].schedules[0].name
    scan = KernelSpec("gla", "scan", "bf16", 64, 64, target)
    assert replace(scan, schedule=default).canonical() == scan
