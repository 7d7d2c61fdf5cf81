"""Formulas against numbers worked out by hand, and the recurrence against that of the tests."""

from __future__ import annotations

from itertools import pairwise

import pytest
import reference
import torch

from qla.bench import cost
from qla.bench.inputs import tensors
from qla.bench.reference import recurrence
from qla.bench.report import geometric_mean
from qla.bench.workloads import CHUNK, OPS, Case, load, select
from qla.codegen.explain import Explanation
from qla.codegen.planner import CallShape, split
from qla.codegen.render import render


def first(op: str, name: str, dtype: str = "bf16", seed: str = "001") -> Case:
    return select(load(), op=op, seed=seed, name=name, dtype=dtype)[0]


def test_gated_delta_rule() -> None:
    # 64 chunks x 8 value heads, each 3 x 2 x 64 x 128 x 128 with the state and 4 x 2 x 64 x 64 x 128 inside.
    case = first("GDNFwd", "tp8-4096", seed="h200")
    assert cost.chunk_flops(case) == 64 * 8 * (6_291_456 + 4_194_304)
    qk, vo, gates, state = 2 * 4096 * 2 * 128 * 2, 2 * 4096 * 8 * 128 * 2, 2 * 4096 * 8 * 4, 8 * 128 * 128 * 4
    assert cost.moved_bytes(case) == qk + vo + gates + state
    floor = cost.floor(case, cost.Ceilings(4.3, 805, ""))
    assert floor.ms == pytest.approx(64 * 8 * 10_485_760 / 805e9)
    assert floor.bound == "comp"


def test_last_chunk_counts_its_rows() -> None:
    case = first("GDNFwd", "varlen-ragged-grouped", "fp16")
    assert case.lengths == (1, 63, 1000, 3032)

    def chunk(rows: int) -> int:
        return rows * 6 * 128 * 128 + rows * rows * 8 * 128

    assert cost.chunk_flops(case) == 16 * (chunk(1) + chunk(63) + chunk(40) + chunk(24) + (15 + 47) * chunk(64))


def test_gla_and_what_chunk_ops_return() -> None:
    gla = first("GLAFwd", "prefill-2k")
    assert cost.chunk_flops(gla) == 2 * 32 * 4 * (64 * 4 * 64 * 64 + 64 * 64 * 4 * 64)
    rows = 2 * 2048 * 4
    assert cost.moved_bytes(gla) == rows * 64 * 2 * 5 + 2 * 4 * 64 * 64 * 4
    delta = first("DeltaNetChunkFwd", "train-2k")
    assert cost.chunk_flops(delta) == 2 * 32 * 4 * (64 * 6 * 64 * 64 + 64 * 64 * 10 * 64)
    # q, k, v, o, A, w, u; beta; the states at 32 starts and one end.
    assert cost.moved_bytes(delta) == rows * 64 * 2 * 7 + rows * 2 + 2 * 33 * 4 * 64 * 64 * 4


def test_decoding_is_bound_by_memory_or_latency() -> None:
    limits = cost.Ceilings(4.3, 805, "")
    assert cost.floor(first("GDNFwd", "q35-gva-decode-b512"), limits).bound == "mem"
    assert cost.floor(first("GDNFwd", "decode-b1"), limits).bound == "lat"


@pytest.mark.parametrize(
    ("op", "name", "seed", "ours"),
    [
        ("GDNFwd", "tp8-4096", "h200", "gated_delta_rule"),
        ("GDNFwd", "35b-8x1024", "h200", "gated_delta_rule"),
        ("GLAFwd", "prefill-2k", "001", "gla"),
        ("DeltaNetFwd", "prefill-3000", "001", "delta_rule"),
        ("DeltaNetChunkFwd", "train-2k", "001", "delta_rule"),
        ("GLAChunkFwd", "train-2k", "001", "gla"),
        ("KDAFwd", "kda-tp1-4x8192", "001", "kda"),
    ],
)
def test_an_explanation_counts_the_same(op: str, name: str, seed: str, ours: str) -> None:
    """The same operations; and the same bytes, beside those that two kernels hand over or both read."""
    case = first(op, name, seed=seed)
    assert not {"initial_state", "A_log", "dt_bias"} & case.shapes.keys()
    d, packed, saves = case.dims, len(case.lengths or ()), OPS[op].saves
    shape = CallShape(ours, "bf16", d.dk, d.dv, d.batch, d.tokens, d.heads, d.value_heads, packed, "tile", saves)
    explanation = Explanation(split(shape, "sm_90a", 132))
    assert explanation.flops == cost.chunk_flops(case)
    prepare, scan = (render(launch.spec) for launch in explanation.launches)
    names = [{f.name.removesuffix("_map") for f in source.abi} for source in (prepare, scan)]
    again = names[0] & names[1] & {"q", "k", "v"}
    qkv = {"q": d.heads * d.dk, "k": d.heads * d.dk, "v": d.value_heads * d.dv}
    chunks = sum(-(-length // CHUNK) for length in case.sequence_lengths())
    twice = 2 * chunks * d.value_heads * sum(size for _, size in prepare.workspace)
    twice += 2 * d.batch * d.tokens * sum(qkv[n] for n in again) + 8 * (packed + 1) * bool(packed)
    assert explanation.bytes == cost.moved_bytes(case) + twice


def test_ceilings_are_found_by_name() -> None:
    found = cost.ceilings("NVIDIA H200")
    assert found is not None
    assert (found.tbps, found.tflops) == (4.3, 805)
    assert cost.ceilings("some CPU") is None


def test_peers_are_as_far_from_the_floor_as_they_were_found_to_be() -> None:
    limits = cost.Ceilings(4.3, 805, "")
    cases = select(load(), seed="h200")
    ratios = [case.best_peer[1] / cost.floor(case, limits).ms for case in cases if case.best_peer]
    assert geometric_mean(ratios) == pytest.approx(3.5, abs=0.05)


@pytest.mark.parametrize("op", OPS)
def test_recurrence_agrees_with_that_of_the_tests(op: str) -> None:
    cases = [case for case in load() if case.op == op and case.dtype == "bfloat16"]
    kinds = {(*case.shapes, *case.options): case.shrink(24, 4) for case in cases}
    for case in kinds.values():
        given = tensors(case, "cpu")
        o, state = recurrence(case, given)
        traits, options = OPS[op], dict(case.options)
        arguments = {name: x for name, x in given.items() if name != "cu_seqlens_cpu"}
        name = {"DeltaNetChunkFwd": "chunk_delta_rule", "GLAChunkFwd": "chunk_gla"}.get(op, traits.name)
        if traits.head_major:
            arguments = {name: x.transpose(1, 2) for name, x in arguments.items()}
            options["scale"] = 1.0
        expected_o, expected_state = reference.forward(name, **arguments, **options)
        if options.get("state_v_first"):
            expected_state = expected_state.mT
        torch.testing.assert_close(o, expected_o)
        torch.testing.assert_close(state, expected_state)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert all(a < b for a, b in pairwise([geometric_mean([x, 2.0]) for x in (1.0, 2.0, 3.0)]))
