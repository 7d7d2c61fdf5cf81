"""The chunk-wise form in torch, and the check of chunks of long sequences."""

from __future__ import annotations

import pytest
import torch

from qla.bench import inputs
from qla.bench.accuracy import excerpt, sampled_error, whole_errors
from qla.bench.chunked import forward, states
from qla.bench.reference import operands, recurrence, relative_error
from qla.bench.workloads import CHUNK, OPS, Case, load, select


def kinds(op: str) -> list[Case]:
    """A small case of each kind of an op."""
    found: dict[tuple[object, ...], Case] = {}
    for case in load():
        if case.op == op and case.dtype == "bfloat16":
            found.setdefault((*case.shapes, *case.options, case.lengths is not None), case)
    return [case.shrink(150, 4) for case in found.values()]


@pytest.mark.parametrize("op", OPS)
def test_chunks_give_what_the_recurrence_gives(op: str) -> None:
    for case in kinds(op):
        given = inputs.tensors(case, "cpu")
        expected = recurrence(case, given)
        for x, y in zip(forward(case, given, torch.float64), expected, strict=True):
            assert relative_error(x, y) < 1e-13, case.name
        for x, y in zip(forward(case, given), expected, strict=True):
            assert relative_error(x, y) < 1e-5, case.name


@pytest.mark.parametrize("op", OPS)
def test_sampled_chunks_agree_with_the_whole(op: str) -> None:
    for case in kinds(op):
        given = inputs.tensors(case, "cpu")
        o, _ = recurrence(case, given)
        assert sampled_error(case, given, o) < 1e-13, case.name


@pytest.mark.parametrize("op", OPS)
def test_states_before_each_chunk(op: str) -> None:
    for case in kinds(op):
        part, given = excerpt(case, inputs.tensors(case, "cpu"), 0, 0, 0, case.sequence_lengths()[0])
        x = operands(part, given, torch.float64)
        # However many chunks are taken at once, their edges do not show.
        for at_once in (1, 64):
            found = list(states(x, at_once))
            assert len(found) == -(-x.q.shape[1] // CHUNK)
            for number, S in enumerate(found[1:], 1):
                begin, given_there = excerpt(case, inputs.tensors(case, "cpu"), 0, 0, 0, number * CHUNK)
                assert relative_error(S, recurrence(begin, given_there)[1]) < 1e-13, case.name


def test_errors_far_down_a_sequence_are_seen() -> None:
    case = select(load(), op="GDNFwd", seed="001", name="varlen-4x1k", dtype="bf16")[0].shrink(1200, 4)
    given = inputs.tensors(case, "cpu")
    o, _ = recurrence(case, given)
    assert case.lengths is not None
    end = sum(case.lengths)
    wrong = o.clone()
    wrong[:, end - 20 :] *= 1.5  # the last tokens of the last of the longest sequences
    assert sampled_error(case, given, wrong) > 0.1
    wrong = o.clone()
    wrong[:, 70] = torch.nan  # no chunk that is looked at
    assert sampled_error(case, given, wrong) < 1e-13
    wrong[:, -1] = torch.nan
    assert sampled_error(case, given, wrong) == torch.inf


def test_an_excerpt_continues_from_a_state() -> None:
    case = select(load(), op="GDNFwd", seed="001", name="prefill-v-first-narrow", dtype="bf16")[0].shrink(200, 4)
    given = inputs.tensors(case, "cpu")
    o, state = recurrence(case, given)
    first, part = excerpt(case, given, 1, 0, 0, 40)
    _, middle = recurrence(first, part)
    rest, part = excerpt(case, given, 1, 0, 40, case.dims.tokens)
    part["initial_state"] = middle.mT
    o_rest, last = recurrence(rest, part)
    group = case.dims.value_heads // case.dims.heads
    torch.testing.assert_close(o_rest, o[1:2, 40:, :group])
    torch.testing.assert_close(last, state[1:2, :group])


def test_whole_errors_of_ours_are_within_the_bars() -> None:
    case = select(load(), op="GLAChunkFwd", name="train-2k", dtype="bf16")[0]
    assert 1e-4 < max(whole_errors(case, inputs.call, "cpu")) < 0.005
