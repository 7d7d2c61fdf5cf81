"""The argument block: layout as a C compiler would have it, values as the kernels expect them."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from qla.codegen.planner import Deal
from qla.codegen.spec import Field
from qla.errors import LaunchError
from qla.runtime.arguments import (
    MAPS,
    POINTERS,
    ArgumentBlock,
    Packer,
    contiguous_strides,
    flags,
    scalars,
    type_code,
)
from qla.runtime.problem import Problem

CTYPES = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
DEAL = Deal(heads=2, passes=1, items=8, workgroups=8, apart=False, stride=528)
SUPPLY = (*POINTERS, *MAPS, "ws_a", "ws_p")


def problem(**changes: Any) -> Problem:
    """A gated delta rule call: B = 2, T = 70, H = 2, HV = 4, K = 128, V = 64."""
    q = torch.zeros(2, 70, 2, 128, dtype=torch.bfloat16)
    base = Problem(
        op="gated_delta_rule",
        saves=False,
        q=q,
        k=torch.zeros_like(q),
        v=torch.zeros(2, 70, 4, 64, dtype=torch.bfloat16),
        g=torch.zeros(2, 70, 4),
        beta=torch.zeros(2, 70, 4, dtype=torch.bfloat16),
        scale=0.25,
        initial_state=None,
        output_final_state=True,
        state_v_first=False,
        qk_l2norm=False,
        beta_sigmoid=False,
        beta_double=False,
        gate_in_kernel=False,
        A_log=None,
        dt_bias=None,
        lower_bound=None,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    )
    return dataclasses.replace(base, **changes)


def test_offsets_are_those_of_a_c_struct() -> None:
    abi = [Field("q", "ptr"), Field("batch", "i32"), Field("q_stride_b", "i64"), Field("scale", "f32")]
    packer = Packer(abi, SUPPLY)

    class Reference(ctypes.Structure):
        _fields_ = [(f.name, CTYPES[f.kind]) for f in abi]

    for f in abi:
        assert packer.offsets[f.name][1] == getattr(Reference, f.name).offset
    assert packer.size == ctypes.sizeof(Reference)


def test_tensor_maps_align_the_block_to_64() -> None:
    packer = Packer([Field("q_map", "tensormap"), Field("o_map", "tensormap"), Field("q", "ptr")], SUPPLY)
    assert [offset for _, offset in packer.offsets.values()] == [0, 128, 256]
    assert packer.size == 320


def test_values_land_where_they_belong() -> None:
    # Scalars between the pointers on purpose: two runs must leave them alone.
    abi = [
        Field("k_map", "tensormap"),
        Field("ws_p", "ptr"),
        Field("q_stride_t", "i64"),
        Field("o", "ptr"),
        Field("q", "ptr"),
        Field("batch", "i32"),
        Field("scale", "f32"),
    ]
    packer = Packer(abi, SUPPLY)
    block = ArgumentBlock(packer.template({"q_stride_t": -(1 << 40), "batch": 7, "scale": 0.5}))
    values: list[Any] = list(range(1000, 1000 + len(SUPPLY)))
    values[SUPPLY.index("k_map")] = bytes(range(128))
    packer.pack(block, values)
    got = packer.unpack(block.view)
    assert got["k_map"] == bytes(range(128))
    assert got["q_stride_t"] == -(1 << 40)
    assert (got["batch"], got["scale"]) == (7, 0.5)
    assert [got[n] for n in ("ws_p", "o", "q")] == [1000 + SUPPLY.index(n) for n in ("ws_p", "o", "q")]


@pytest.mark.parametrize("size", [4, 8, 100, 128, 328, 1000])
def test_block_is_aligned_and_carries_the_launch_lists(size: int) -> None:
    block = ArgumentBlock(bytes(i % 251 for i in range(size)))
    assert block.address % 128 == 0
    assert ctypes.string_at(block.address, size) == bytes(i % 251 for i in range(size))
    assert ctypes.c_uint64.from_address(block.params).value == block.address
    extra = list((ctypes.c_uint64 * 5).from_address(block.extra))
    assert extra[:3] == [1, block.address, 2]
    assert extra[4] == 3
    assert ctypes.c_size_t.from_address(extra[3]).value == size
    block.view[0] = 9
    assert ctypes.string_at(block.address, 1) == b"\x09"


def test_unknown_members_are_refused() -> None:
    with pytest.raises(LaunchError, match="ws_missing"):
        Packer([Field("ws_missing", "ptr")], SUPPLY)
    with pytest.raises(LaunchError, match="no_such_number"):
        Packer([Field("no_such_number", "i32")], SUPPLY).template({})
    with pytest.raises(LaunchError, match="twice"):
        Packer([Field("q", "ptr"), Field("q", "ptr")], SUPPLY)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LaunchError, match="tokens = 2147483648"):
        Packer([Field("tokens", "i32")], SUPPLY).template({"tokens": 1 << 31})


def test_scalars_of_a_dense_call() -> None:
    got = scalars(problem(), deal=DEAL, sequences=2)
    assert (got["batch"], got["tokens"], got["sequences"], got["heads"], got["value_heads"]) == (2, 70, 2, 2, 4)
    assert [got[f"q_stride_{x}"] for x in "bthd"] == [70 * 256, 256, 128, 1]
    assert [got[f"o_stride_{x}"] for x in "bthd"] == [70 * 256, 256, 64, 1]
    assert [got[f"g_stride_{x}"] for x in "bthd"] == [280, 4, 1, 0]
    assert [got[f"beta_stride_{x}"] for x in "bth"] == [280, 4, 1]
    assert (got["g_type"], got["beta_type"], got["A_log_type"]) == (0, 1, 0)
    assert (got["has_cu_seqlens"], got["cu_is_int64"]) == (0, 0)
    dealt = [got[name] for name in ("items", "heads_at_once", "group", "passes", "stride", "apart")]
    assert dealt == [8, 2, 2, 1, 528, 0]
    assert [got[f"final_stride_{x}"] for x in "nhkv"] == [4 * 128 * 64, 128 * 64, 64, 1]
    assert [got[f"initial_stride_{x}"] for x in "nhkv"] == [0, 0, 0, 0]
    assert (got["scale"], got["lower_bound"]) == (0.25, 0.0)


def test_scalars_follow_strides_as_given() -> None:
    packed = torch.zeros(2, 70, 2, 3, 128, dtype=torch.bfloat16)
    got = scalars(problem(q=packed[:, :, :, 1]), deal=DEAL, sequences=2)
    assert [got[f"q_stride_{x}"] for x in "bthd"] == [70 * 768, 768, 384, 1]
    channel = torch.zeros(2, 70, 4, 128).transpose(1, 2).contiguous().transpose(1, 2)
    got = scalars(problem(op="kda", g=channel), deal=DEAL, sequences=2)
    assert [got[f"g_stride_{x}"] for x in "bthd"] == [4 * 70 * 128, 128, 70 * 128, 1]


def test_state_strides_are_named_by_meaning() -> None:
    initial = torch.zeros(2, 4, 64, 128)
    got = scalars(problem(initial_state=initial, state_v_first=True), deal=DEAL, sequences=2)
    for name in ("initial", "final"):
        assert [got[f"{name}_stride_{x}"] for x in "nhkv"] == [4 * 64 * 128, 64 * 128, 1, 128]


def test_scalars_of_a_varlen_call() -> None:
    cu = torch.tensor([0, 3, 70], dtype=torch.int64)
    got = scalars(problem(cu_seqlens=cu), deal=DEAL, sequences=2)
    assert (got["has_cu_seqlens"], got["cu_is_int64"]) == (1, 1)
    assert scalars(problem(cu_seqlens=cu.int()), deal=DEAL, sequences=2)["cu_is_int64"] == 0


@pytest.mark.parametrize(
    ("changes", "bits"),
    [
        ({}, 0),
        ({"qk_l2norm": True}, 1),
        ({"beta_sigmoid": True}, 2),
        ({"beta_double": True}, 4),
        ({"gate_in_kernel": True}, 8),
        ({"lower_bound": -5.0}, 16),
        ({"qk_l2norm": True, "gate_in_kernel": True, "lower_bound": 0.0}, 25),
    ],
)
def test_flags(changes: dict[str, Any], bits: int) -> None:
    assert flags(problem(**changes)) == bits


def test_type_codes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert [type_code(torch.zeros(1, dtype=d)) for d in dtypes] == [0, 1, 2]
    assert type_code(None) == 0
    with pytest.raises(LaunchError, match="float64"):
        type_code(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(3,), (2, 5, 1, 64), (0, 3), ()])
def test_contiguous_strides(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert len(contiguous_strides(shape)) == len(shape)
