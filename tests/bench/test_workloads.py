"""The workloads as data, and the tensors they become."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from qla.bench.inputs import tensors
from qla.bench.workloads import OPS, load, parse_lengths, select

CASES = load()
RUNNABLE = [case for case in CASES if case.traits]


def test_all_are_there() -> None:
    seeds = Counter(case.seed for case in CASES)
    assert seeds == {"000": 186, "001": 385, "h200": 103}
    assert len({case.name for case in CASES}) == 571 + 103
    assert {case.op for case in CASES if not case.traits} == {
        *("GDNBwd", "DeltaNetChunkBwd", "DeltaNetRecurrentFwd", "GLAChunkBwd", "GLARecurrentFwd")
    }
    assert Counter(case.op for case in select(CASES, seed="001")) == {
        "GDNFwd": 278, "KDAFwd": 27, "DeltaNetFwd": 18, "GLAFwd": 12, "DeltaNetChunkFwd": 9, "DeltaNetChunkBwd": 9,
        "DeltaNetRecurrentFwd": 8, "GLAChunkFwd": 8, "GLAChunkBwd": 8, "GLARecurrentFwd": 8,
    }  # fmt: skip
    assert all(case.peers for case in CASES)


def test_filters() -> None:
    assert len(select(CASES)) == len(CASES)
    assert len(select(CASES, op="KDAFwd")) == 27
    assert {case.op for case in select(CASES, op="gla*,DeltaNetFwd", seed="001")} == {
        *("DeltaNetFwd", "GLAFwd", "GLAChunkFwd", "GLAChunkBwd", "GLARecurrentFwd")
    }
    assert len(select(CASES, seed="h200", name="tp8-*")) == 13
    assert {case.workload for case in select(CASES, name="35b-2048", seed="h200")} == {"35b-2048"}
    assert {case.dtype for case in select(CASES, dtype="fp16")} == {"float16"}
    assert not select(CASES, name="no such case")


@pytest.mark.parametrize(("text", "lengths"), [("2048", (2048,)), ("1024-7168", (1024, 7168)), ("4x2048", (2048,) * 4)])
def test_lengths_of_a_name(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


def test_shapes_follow_from_the_sizes() -> None:
    for case in RUNNABLE:
        for name, shape in case.shapes.items():
            assert case.shape_of(name, case.dims) == shape, f"{case.name} {name}"
        assert sum(case.sequence_lengths()) == case.dims.batch * case.dims.tokens, case.name


def test_measured_times_reach_published_cases() -> None:
    (case,) = select(CASES, seed="001", name="q35-397b-tp8-2048", dtype="bf16", op="GDNFwd")[:1]
    assert case.peers["flashinfer 0.7.4 (measured)"] == 0.062
    assert case.peers["tileops (published)"] > 0
    (decode,) = select(CASES, seed="001", name="q35-gva-decode-b512", dtype="bf16")
    assert decode.peers["flashinfer 0.7.4 (measured)"] == 0.5151
    (other,) = select(CASES, seed="001", name="q35-gva-decode-b512", dtype="fp16")
    assert "flashinfer 0.7.4 (measured)" not in other.peers


def test_smaller_cases() -> None:
    for case in RUNNABLE:
        small = case.shrink(256, 4)
        d, whole = small.dims, case.dims
        assert (d.dk, d.dv, d.value_heads // d.heads) == (whole.dk, whole.dv, whole.value_heads // whole.heads)
        assert sum(small.sequence_lengths()) <= 256 + 8
        assert d.value_heads <= max(4, whole.value_heads // whole.heads)
        assert small.shapes.keys() == case.shapes.keys()
        assert small.reduced == (small.dims != case.dims)


@pytest.mark.parametrize("op", OPS)
def test_tensors_have_the_published_shapes(op: str) -> None:
    cases = [case for case in RUNNABLE if case.op == op]
    kinds = {(*case.shapes, *case.options, case.dtype): case.shrink(1024, 16) for case in reversed(cases)}
    for case in kinds.values():
        given = tensors(case, "cpu")
        assert {name: tuple(x.shape) for name, x in given.items()} == dict(case.shapes)
        assert {name: str(x.dtype) for name, x in given.items()} == {
            name: f"torch.{case.dtype_of(name)}" for name in case.shapes
        }
        assert torch.equal(tensors(case, "cpu")["q"], given["q"])


def test_inputs_are_what_models_produce() -> None:
    case = select(CASES, op="GDNFwd", seed="001", name="prefill-4k", dtype="bf16")[0].shrink(256, 4)
    given = tensors(case, "cpu")
    assert torch.allclose(given["k"].float().norm(dim=-1), torch.ones(()), atol=0.01)
    assert (given["g"] < 0).all()
    assert -0.3 < given["g"].mean() < -0.1
    assert ((given["beta"] > 0) & (given["beta"] < 1)).all()
    (raw,) = select(CASES, op="GDNFwd", name="prefill-raw-ragged")
    given = tensors(raw, "cpu")
    assert given["g"].abs().max() > 2
    assert (given["A_log"] >= 0).all()
    step = torch.nn.functional.softplus(given["dt_bias"])
    assert ((step > 0.0009) & (step < 0.11)).all()
    assert given["cu_seqlens"].tolist() == [0, 1, 60, 997, 3000] == given["cu_seqlens_cpu"].tolist()
