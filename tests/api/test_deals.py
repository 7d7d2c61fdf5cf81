"""How `prepare` is dealt out to workgroups changes no bit: heads at once, one item after the other or one each."""

from __future__ import annotations

from typing import Any

import inputs
import pytest
import reference
import torch

import qla
from qla.codegen.planner import Deal, split
from qla.runtime import plan

pytestmark = pytest.mark.gpu

OPS = ("chunk_gated_delta_rule", "chunk_delta_rule")
RAGGED = [0, 1, 64, 0, 65, 63, 64, 448]
FEW, MANY = 1, 4096  # multiprocessors that the planner is told of

every_op = pytest.mark.parametrize("name", OPS)


def run(name: str, a: dict[str, Any], processors: int) -> tuple[Any, Deal]:
    """A call as it is planned for so many multiprocessors: the fewer, the more heads at once."""
    dealt: list[Deal] = []

    def planned(shape: Any, target: str, _: int) -> Any:
        choice = split(shape, target, processors)
        dealt.append(choice.deal)
        return choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "plan_call", planned)
        patch.setattr(plan, "layouts", {})
        result = getattr(qla, name)(**a)
    (deal,) = dealt
    return result, deal


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("lengths", [None, RAGGED])
def test_heads_at_once(name: str, dtype: torch.dtype, group: int, lengths: Any) -> None:
    T = sum(lengths) + 9 if lengths else 600
    a = inputs.make(name, dtype=dtype, device="cuda", T=T, H=2, HV=2 * group, state=True, seed=group, lengths=lengths)
    (few, dealt), (many, single) = run(name, a, FEW), run(name, a, MANY)
    assert (single.heads, single.apart) == (1, True)
    assert (dealt.heads, dealt.apart) == (min(group, 4) if group != 5 else 3, group == 1)
    assert dealt.items > dealt.stride  # workgroups go on to other items, or ask for theirs
    rows = inputs.unpadded(a)
    assert inputs.same_bits(few[0][:, :rows], many[0][:, :rows])
    assert inputs.same_bits(few[1], many[1])
    expected = reference.forward(name, **a)
    for x, y in ((few[0][:, :rows], expected[0][:, :rows]), (few[1], expected[1])):
        assert reference.relative_error(x, y) <= (reference.BARS if "g" in a else reference.BARS_UNGATED)[dtype]


@every_op
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dk", [64, 128])
def test_heads_at_once_with_strided_loads(name: str, group: int, dk: int) -> None:
    a = inputs.make(name, device="cuda", T=1000, H=2, HV=2 * group, K=dk, state=True)
    a["q"] = a["q"].transpose(-1, -2).contiguous().transpose(-1, -2)
    (few, dealt), (many, _) = run(name, a, FEW), run(name, a, MANY)
    assert dealt.heads == group
    assert inputs.same_bits(few[0], many[0])
    assert inputs.same_bits(few[1], many[1])


@every_op
@pytest.mark.parametrize(
    "options",
    [{"keys": "raw", "use_qk_l2norm_in_kernel": True}, {"beta_dtype": torch.bfloat16, "gate_dtype": torch.bfloat16}],
)
@pytest.mark.parametrize("group", [1, 3])
def test_options(name: str, group: int, options: dict[str, Any]) -> None:
    """Gates and betas of two bytes lie in either half of a word."""
    a = inputs.make(name, device="cuda", T=1001, H=1, HV=group, state=True, **options)
    (few, _), (many, _) = run(name, a, FEW), run(name, a, MANY)
    assert inputs.same_bits(few[0], many[0])
    assert inputs.same_bits(few[1], many[1])


def test_what_is_saved() -> None:
    token_major = inputs.make(
        "chunk_delta_rule", T=700, B=2, H=3, dtype=torch.bfloat16, device="cuda", beta_dtype=torch.bfloat16
    )
    del token_major["output_final_state"]
    a = {x: y.transpose(1, 2).contiguous() for x, y in token_major.items()}
    results = []
    for processors in (FEW, MANY):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "plan_call", lambda shape, target, _, n=processors: split(shape, target, n))
            patch.setattr(plan, "layouts", {})
            results.append(qla.DeltaNetChunkFwd()(**a))
    assert all(inputs.same_bits(x, y) for x, y in zip(*results, strict=True))
