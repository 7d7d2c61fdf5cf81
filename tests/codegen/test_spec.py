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
        ({"stage": "backward"}, UnsupportedError, "stage: got backward; supported: 'prepare' or 'scan'"),
        ({"dtype": "fp32"}, UnsupportedError, "dtype: got fp32; supported: bf16, fp16 on sm_90a"),
        ({"dv": 96}, UnsupportedError, "dv: got 96"),
        ({"target": "sm_80"}, UnsupportedError, "target: got sm_80; supported: one of sm_90a"),
        ({"loads": "random"}, UnsupportedError, "loads: got random; supported: tile, strided on sm_90a"),
        ({"target": "host", "loads": "strided"}, UnsupportedError, "loads: got strided; supported: tile on host"),
        ({"op": "kda", "saves": True}, UnsupportedError, "saves: got True for kda; supported: the ops delta_rule, gla"),
        ({"stage": "prepare", "schedule": "serial"}, UnsupportedError, "serial for prepare; supported: the stage scan"),
        ({"schedule": "fastest"}, ScheduleError, "sm_90a has no schedule `fastest`; it has serial, "),
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
        ({"saves": True}, {"saves": True}),
        ({"stage": "prepare"}, {"stage": "prepare", "dv": 64}),
        ({"stage": "prepare", "loads": "strided"}, {"stage": "prepare", "dv": 64, "loads": "strided"}),
        ({"stage": "prepare", "saves": True}, {"stage": "prepare", "saves": True}),
        ({"op": "gla", "stage": "prepare", "saves": True}, {"op": "gla", "stage": "prepare", "dv": 64}),
        ({"op": "gla", "saves": True}, {"op": "gla", "saves": True}),
    ],
)
def test_one_spec_stands_for_all_with_the_same_code(given: dict[str, Any], canonical: dict[str, Any]) -> None:
    assert spec(**given).canonical() == spec(**canonical) == spec(**canonical).canonical()
