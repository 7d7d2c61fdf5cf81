"""The choice of a schedule: on paper, and what it chooses on a GPU against the recurrence."""

from __future__ import annotations

import inputs
import pytest
import reference
import torch

import qla
from qla.runtime import plan
from qla.runtime.planner import choose_schedule

SMS = 132


@pytest.mark.parametrize(
    ("heads", "chosen"),
    [
        (1, ""),
        (64, ""),  # 128 column blocks: one to a multiprocessor
        (128, "paired"),  # two waves of single blocks, or one of pairs
        (512, "paired"),
        (8 * 64, "paired"),
    ],
)
def test_pairs_where_single_column_blocks_take_another_wave(heads: int, chosen: str) -> None:
    assert choose_schedule("sm_90a", "head", 128, "tile", False, heads, SMS) == chosen


@pytest.mark.parametrize(
    ("gate", "dv", "loads", "saves"),
    [("channel", 128, "tile", False), ("head", 64, "tile", False), ("head", 128, "strided", False),
     ("none", 128, "tile", True)],
)
def test_pairs_only_where_there_are_kernels_for_them(gate: str, dv: int, loads: str, saves: bool) -> None:
    assert choose_schedule("sm_90a", gate, dv, loads, saves, 512, SMS) == ""


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "host"])
def test_a_target_with_one_schedule_takes_it(target: str) -> None:
    assert choose_schedule(target, "head", 128, "tile", False, 512, SMS) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_delta_rule"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dk", [64, 128])
def test_what_is_chosen_for_a_full_chip_is_right(name: str, dtype: torch.dtype, dk: int) -> None:
    lengths = [100, 64, 0, 265]  # times 32 value heads: two waves of single blocks, or one of pairs
    a = inputs.make(
        name, T=sum(lengths), H=8, HV=32, K=dk, V=128, dtype=dtype, device="cuda", state=True, lengths=lengths,
        output_final_state=True,
    )
    o, state = getattr(qla, name)(**a)
    assert any(key.schedule == "paired" and key.dk == dk for key in plan._plans)
    o_ref, state_ref = reference.forward(name, **a)
    found = reference.relative_error(o, o_ref), reference.relative_error(state, state_ref)
    print(found)
    assert max(found) <= reference.BARS[dtype]
