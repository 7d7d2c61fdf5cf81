"""Specs: what is refused, in which words, and which one stands for all with the same code."""

from __future__ import annotations

from typing import Any

import pytest

from qla.codegen.spec import KernelSpec
from qla.errors import QlaError, ScheduleError, UnsupportedError

GOOD: dict[str, Any] = {"op": "delta_rule", "stage": "scan", "dtype": "bf16", "dk": 64, "dv": 128, "target": "sm_90a"}


def spec(**changes: Any) -> KernelSpec:
    return KernelSpec(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"op": "softmax"}, UnsupportedError, "op: got softmax; supported: one of gated_delta_rule"),
        ({"stage": "backward"}, UnsupportedError, "got backward; supported: one of prepare, carry, combine, scan"),
        ({"dtype": "fp32"}, UnsupportedError, "dtype: got fp32; supported: bf16, fp16 on sm_90a"),
        ({"dv": 96}, UnsupportedError, "dv: got 96"),
        ({"target": "sm_80"}, UnsupportedError, "target: got sm_80; supported: one of sm_90a"),
        ({"loads": "random"}, UnsupportedError, "loads: got random; supported: tile, strided on sm_90a"),
        ({"target": "host", "loads": "strided"}, UnsupportedError, "loads: got strided; supported: tile on host"),
        ({"op": "kda", "saves": True}, UnsupportedError, "saves: got True for kda; supported: the ops delta_rule, gla"),
        ({"stage": "carry"}, UnsupportedError, "carry for delta_rule with K = 64, V = 128, loads=tile on sm_90a"),
        ({"stage": "carry", "dv": 64, "op": "gla"}, UnsupportedError, "segments need a delta op, K = V, loads=tile"),
        ({"stage": "combine", "dv": 64, "loads": "strided"}, UnsupportedError, "supported: prepare and scan; segments"),
        ({"stage": "carry", "dv": 64, "target": "gfx950"}, UnsupportedError, "loads=tile on gfx950"),
        ({"stage": "carry", "dv": 64, "schedule": "skewed"}, UnsupportedError, "skewed for carry; supported: the"),
        ({"stage": "prepare", "schedule": "serial"}, UnsupportedError, "serial for prepare; supported: the stage scan"),
        ({"schedule": "fastest"}, ScheduleError, "sm_90a has no schedule `fastest`; it has serial, "),
        ({"schedule": "paired", "dv": 64}, UnsupportedError, "paired for delta_rule with V = 64, loads=tile, saves=F"),
        ({"schedule": "paired", "loads": "strided"}, UnsupportedError, "gates none, head, V = 128, loads=tile, saves="),
        ({"schedule": "paired", "saves": True}, UnsupportedError, "schedule: got paired for delta_rule with V = 128"),
        ({"schedule": "paired", "op": "kda"}, UnsupportedError, "schedule: got paired for kda with V = 128"),
        ({"target": "gfx950", "schedule": "skewed"}, ScheduleError, "gfx950 has no schedule `skewed`; it has serial"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], error: type[QlaError], said: str) -> None:
    with pytest.raises(error) as caught:
        spec(**changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ({}, {}),
        ({"schedule": "serial"}, {}),
        ({"schedule": "skewed"}, {"schedule": "skewed"}),
        ({"schedule": "paired"}, {"schedule": "paired"}),
        ({"saves": True}, {"saves": True}),
        ({"stage": "prepare"}, {"stage": "prepare", "dv": 64}),
        ({"stage": "prepare", "loads": "strided"}, {"stage": "prepare", "dv": 64, "loads": "strided"}),
        ({"stage": "prepare", "saves": True}, {"stage": "prepare", "saves": True}),
        ({"op": "gla", "stage": "prepare", "saves": True}, {"op": "gla", "stage": "prepare", "dv": 64}),
        ({"op": "gla", "saves": True}, {"op": "gla", "saves": True}),
        ({"stage": "carry", "dv": 64, "dtype": "fp16"}, {"stage": "carry", "dv": 64, "dtype": "fp16"}),
        ({"stage": "carry", "dv": 64, "saves": True}, {"stage": "carry", "dv": 64}),
        ({"stage": "combine", "dv": 64, "saves": True}, {"stage": "combine", "dv": 64, "op": "gated_delta_rule"}),
        # States are float32 whatever the op.
        ({"stage": "combine", "dv": 64, "dtype": "fp16"}, {"stage": "combine", "dv": 64, "op": "gated_delta_rule"}),
    ],
)
def test_one_spec_stands_for_all_with_the_same_code(given: dict[str, Any], canonical: dict[str, Any]) -> None:
    assert spec(**given).canonical() == spec(**canonical) == spec(**canonical).canonical()


@pytest.mark.parametrize("op", ["gated_delta_rule", "delta_rule", "kda"])
def test_kernels_of_a_call(op: str) -> None:
    scan = spec(op=op, dv=64)
    assert [s.stage for s in scan.kernels()] == ["prepare", "scan"]
    kernels = scan.kernels(segments=True)
    assert [s.stage for s in kernels] == ["prepare", "carry", "combine", "scan"]
    assert all(s.canonical() == s for s in kernels)
    assert (kernels[0], kernels[3]) == scan.kernels()
    assert [s.schedule for s in spec(schedule="skewed").kernels()] == ["", "skewed"]
    pairs = spec(op="gated_delta_rule", dk=128, schedule="paired").kernels(segments=True)
    assert [s.schedule for s in pairs] == ["", "", "", "paired"]


def test_pairs_of_column_blocks_are_for_plain_calls_with_two_of_them() -> None:
    assert spec().schedules == spec(op="gated_delta_rule", dtype="fp16").schedules == ("", "paired")
    others = ({"dv": 64}, {"loads": "strided"}, {"saves": True}, {"op": "gla"}, {"op": "kda"}, {"target": "gfx950"})
    assert {spec(**other).schedules for other in others} == {("",)}


def test_what_is_saved_needs_no_other_kernels_between_prepare_and_scan() -> None:
    plain, saving = (spec(dv=64, saves=saves).kernels(segments=True) for saves in (False, True))
    assert saving[1:3] == plain[1:3]
    assert [s.saves for s in saving] == [True, False, False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "gla", "dv": 64, "saves": True},
        {"op": "gla", "dv": 64},
        {},
        {"dv": 64, "loads": "strided"},
        {"target": "host"},
    ],
)
def test_what_is_not_divisible_has_no_segments(changes: dict[str, Any]) -> None:
    assert not spec(**changes).divisible
    with pytest.raises(UnsupportedError, match="segments need"):
        spec(**changes).kernels(segments=True)
