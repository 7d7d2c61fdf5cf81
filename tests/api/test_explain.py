"""`qla.explain`: the plan of a call from its tensors, or from their shapes."""

from __future__ import annotations

import inspect
from typing import Any

import inputs
import pytest
import torch

import qla
from qla.codegen.explain import Explanation
from qla.codegen.planner import CallShape, plan_call
from qla.runtime import plan
from qla.targets import TARGETS

FUNCTIONS = ("chunk_gated_delta_rule", "chunk_delta_rule", "chunk_kda", "chunk_gla")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lengths", [None, [1, 30, 0, 64]])
def test_it_says_what_the_call_launches(name: str, lengths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = 2 if lengths is None else 1
    call = inputs.make(name, B=batch, T=100, H=2, HV=4, K=64, V=128, dtype=torch.bfloat16, lengths=lengths)
    explanation = qla.explain(getattr(qla, name), **call)
    monkeypatch.setattr(plan, "layouts", {})
    getattr(qla, name)(**call)
    (layout,) = plan.layouts.values()
    assert layout.blocks == tuple(launch.workgroups for launch in explanation.launches)
    assert layout.plan.key.specs() == tuple(launch.spec for launch in explanation.launches)
    assert explanation.choice.target == "host"
    assert explanation.us is None


def test_shapes_in_place_of_tensors() -> None:
    q, v = (1, 8192, 16, 128), (1, 8192, 32, 128)
    packed = qla.explain(qla.chunk_gated_delta_rule, q, q, v, cu_seqlens=(9,), dtype=torch.float16)
    shape = CallShape("gated_delta_rule", "fp16", 128, 128, 1, 8192, 16, 32, 8)
    assert packed == Explanation(plan_call(shape, "sm_90a", 132))
    other = qla.explain(qla.chunk_kda, q=q, v=[*v], target="gfx950", processors=7)
    assert other == Explanation(plan_call(CallShape("kda", "bf16", 128, 128, 1, 8192, 16, 32), "gfx950", 7))
    assert qla.explain(qla.chunk_gla, q, v=v, target="gfx942").choice.processors == TARGETS["gfx942"].processors


def test_tensors_for_another_target() -> None:
    """Without memory, and so without values."""
    with torch.device("meta"):
        q, v = torch.empty(1, 640, 2, 128, dtype=torch.bfloat16), torch.empty(1, 640, 8, 128, dtype=torch.bfloat16)
        cu_seqlens = torch.empty(3, dtype=torch.int32)
    choice = qla.explain(qla.chunk_delta_rule, q, q, v, None, cu_seqlens=cu_seqlens, target="sm_90a").choice
    assert choice.shape == CallShape("delta_rule", "bf16", 128, 128, 1, 640, 2, 8, 2)
    views = qla.explain(qla.chunk_delta_rule, q.mT.contiguous().mT, q, v, target="sm_90a")
    assert views.choice.shape.loads == "strided"
    assert qla.explain(qla.chunk_delta_rule, q.mT.contiguous().mT, q, v, target="host").choice.shape.loads == "tile"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"function": "gla"}, "function: got gla; supported: qla.chunk_gated_delta_rule"),
        ({"function": plan_call}, "function"),
        ({"q": None}, "q: got None; supported: a tensor .B, T, H, K., or its shape"),
        ({"q": (1, 64, 2)}, "q: got .1, 64, 2."),
        ({"q": (1, 64.0, 2, 128)}, "q: got"),
        ({"v": (1, 65, 2, 128)}, "v: got .1, 65, 2, 128.; supported: shape .B, T, HV, V. with B = 1, T = 64"),
        ({"v": (1, 64, 3, 128)}, "value_heads"),
        ({"q": (1, 64, 2, 96)}, "dk: got 96"),
        ({"cu_seqlens": (1,)}, "cu_seqlens"),
        ({"cu_seqlens": 4}, "cu_seqlens: got a int"),
        ({"dtype": "int8"}, "dtype: got int8; supported: bf16, fp16, fp32"),
        ({"target": "sm_80"}, "target: got sm_80"),
        ({"processors": 0}, "processors: got 0"),
    ],
)
def test_bad_requests(change: dict[str, Any], said: str) -> None:
    call = {"function": qla.chunk_gla, "q": (1, 64, 2, 128), "v": (1, 64, 2, 128), **change}
    with pytest.raises(qla.UnsupportedError, match=said):
        qla.explain(**call)


def test_an_argument_that_the_function_does_not_have() -> None:
    with pytest.raises(TypeError, match="beta"):
        qla.explain(qla.chunk_gla, q=(1, 64, 2, 128), v=(1, 64, 2, 128), beta=None)


def test_no_option_of_a_function_is_one_of_explain() -> None:
    own = {"function", "dtype", "target", "processors"}
    for name in FUNCTIONS:
        assert not own & {*inspect.signature(getattr(qla, name)).parameters}
