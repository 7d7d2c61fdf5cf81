"""Two column blocks to a workgroup, whatever the planner thinks of it: bit by bit what single ones give."""

from __future__ import annotations

from typing import Any

import inputs
import pytest
import reference
import torch

import qla
from qla.codegen.planner import split
from qla.runtime import plan

pytestmark = pytest.mark.gpu

OPS = ("chunk_gated_delta_rule", "chunk_delta_rule")
RAGGED = [0, 1, 64, 0, 65, 63, 64, 448, 193]

Outputs = tuple[torch.Tensor, torch.Tensor]

every_op = pytest.mark.parametrize("name", OPS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def make(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"T": 600, "H": 2, "HV": 4, "state": True, "seed": 11, **options}
    if options.get("lengths"):
        given["T"] = sum(options["lengths"]) + 9  # and rows that belong to no sequence
    return inputs.make(name, dtype=dtype, device="cuda", **given)


def run(name: str, a: dict[str, Any], schedule: str, segment_chunks: int) -> Outputs:
    """A call with that schedule of `scan`, in segments of so many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "plan_call", lambda *call: split(*call, segment_chunks, schedule))
        patch.setattr(plan, "layouts", {})
        o, state = getattr(qla, name)(**a)
        (layout,) = plan.layouts.values()
    assert layout is not None
    assert layout.plan.key.specs()[-1].schedule == schedule
    return o, state


def check(name: str, a: dict[str, Any], segment_chunks: int = 0) -> Outputs:
    pairs, single = (run(name, a, schedule, segment_chunks) for schedule in ("paired", ""))
    rows = inputs.unpadded(a)
    assert inputs.same_bits(pairs[0][:, :rows], single[0][:, :rows])
    assert inputs.same_bits(pairs[1], single[1])
    return pairs


@every_op
@every_dtype
@pytest.mark.parametrize("dk", [64, 128])
@pytest.mark.parametrize("lengths", [None, RAGGED])
def test_against_the_recurrence(name: str, dtype: torch.dtype, dk: int, lengths: Any) -> None:
    a = make(name, dtype, K=dk, lengths=lengths)
    got, expected, rows = check(name, a), reference.forward(name, **a), inputs.unpadded(a)
    for x, y in ((got[0][:, :rows], expected[0][:, :rows]), (got[1], expected[1])):
        assert reference.relative_error(x, y) <= (reference.BARS if "g" in a else reference.BARS_UNGATED)[dtype]


@every_op
@pytest.mark.parametrize("T", [1, 8, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 384, 449])
def test_lengths_around_a_pass_of_the_loop(name: str, T: int) -> None:
    """Tails, and what is left where passes have three chunks."""
    check(name, make(name, T=T, B=2))


@every_op
@every_dtype
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("lengths", [None, RAGGED])
def test_segments(name: str, dtype: torch.dtype, state: bool, lengths: Any) -> None:
    for segment_chunks in (2, 3):
        check(name, make(name, dtype, state=state, lengths=lengths), segment_chunks)


@every_op
@pytest.mark.parametrize("options", [{"state": False}, {"v_first": True}, {"B": 3, "HV": 2}, {"lengths": [0, 0, 1]}])
def test_states_and_batches(name: str, options: dict[str, Any]) -> None:
    if options.get("v_first") and name != OPS[0]:
        return
    check(name, make(name, **options))


@every_op
def test_no_final_state_is_asked_for(name: str) -> None:
    a = make(name)
    o, state = run(name, a | {"output_final_state": False}, "paired", 0)
    assert state is None
    assert inputs.same_bits(o, run(name, a, "paired", 0)[0])


@every_op
@every_dtype
def test_a_full_chip_again_and_again(name: str, dtype: torch.dtype) -> None:
    """Several workgroups to a multiprocessor, one after the other: registers that were handed over come back."""
    a = make(name, dtype, B=8, T=330, H=16, HV=64)
    first = check(name, a)
    for _ in range(4):
        again = run(name, a, "paired", 0)
        assert inputs.same_bits(again[0], first[0])
        assert inputs.same_bits(again[1], first[1])


def test_the_planner_takes_pairs_for_a_full_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is called by default; costs are tuned to workloads that fill the chip for this op."""
    name = "chunk_gated_delta_rule"
    a = make(name, B=8, T=330, H=16, HV=64)
    monkeypatch.setattr(plan, "layouts", {})
    o, state = getattr(qla, name)(**a)
    (layout,) = plan.layouts.values()
    assert layout is not None
    assert layout.plan.key.schedule == "paired"
    expected = run(name, a, "", 0)
    assert inputs.same_bits(o, expected[0])
    assert inputs.same_bits(state, expected[1])
