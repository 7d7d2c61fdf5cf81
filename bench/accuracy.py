"""How far results are from the recurrence: whole small cases, and sampled chunks of long ones.

A long sequence cannot be walked token by token. Its state is carried chunk by chunk in float64, and where a sampled
chunk begins, the recurrence starts from that state: an error that only builds up, or only begins, far down a sequence
is seen, at the cost of a few chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from qla.bench import inputs
from qla.bench.chunked import states
from qla.bench.reference import operands, recurrence, relative_error
from qla.bench.workloads import CHUNK, OPS, Case

__all__ = ["CHECKED", "excerpt", "sampled_error", "whole_errors"]

# Tokens and value heads of the case that is compared as a whole, since the recurrence takes a step per token. On a GPU
# the heads are those of the case, as far as published ones go: some peers compile anew for each number of them.
CHECKED = {"cuda": (2048, 64), "cpu": (64, 4)}
_SAMPLES = 3

Tensors = dict[str, torch.Tensor]


def whole_errors(case: Case, make: inputs.MakeCall, device: str) -> tuple[float, float]:
    """Relative errors of output and final state on `case` made small, with inputs of their own."""
    small = case.shrink(*CHECKED[device])
    given = inputs.tensors(small, device, seed=1)
    expected = recurrence(small, given)
    call = make(small, given)
    output, state = (relative_error(x, y) for x, y in zip(call.outputs(call.run()), expected, strict=True))
    return output, state


def excerpt(
    case: Case, given: Mapping[str, torch.Tensor], sequence: int, head: int, begin: int, end: int
) -> tuple[Case, Tensors]:
    """One sequence's tokens `begin` to `end`, of one q/k head and its value heads, as a case of its own."""
    op, d = OPS[case.op], case.dims
    group = d.value_heads // d.heads
    own = slice(head * group, (head + 1) * group)
    row = 0 if case.lengths else sequence
    at = sum(case.lengths[:sequence]) if case.lengths else 0
    tokens = slice(at + begin, at + end)
    part: Tensors = {}
    for name, x in given.items():
        heads = slice(head, head + 1) if name in ("q", "k") else own
        if name.startswith("cu_seqlens"):
            continue
        if name == "initial_state":
            part[name] = x[sequence : sequence + 1, own]
        elif name == "A_log":
            part[name] = x[own]
        elif name == "dt_bias":
            part[name] = x.reshape(d.value_heads, -1)[own].flatten()
        else:
            part[name] = x[row : row + 1, heads, tokens] if op.head_major else x[row : row + 1, tokens, heads]
    shapes = {name: tuple(x.shape) for name, x in part.items()}
    return replace(case, shapes=shapes, lengths=None, host_lengths=False, reduced=True), part


def sampled_error(case: Case, given: Mapping[str, torch.Tensor], output: torch.Tensor) -> float:
    """Relative error over chunks spread across the longest sequence, the last one among them, of the last q/k head.

    Parameters
    ----------
    case, given : the call.
    output : its output `[B, T, HV, V]`.
    """
    d, lengths = case.dims, case.sequence_lengths()
    sequence = max(range(len(lengths)), key=lambda n: (lengths[n], n))
    length, head = lengths[sequence], d.heads - 1
    starts = list(range(0, length, CHUNK))
    chosen = {starts[len(starts) * n // _SAMPLES - 1] for n in range(1, _SAMPLES + 1)}
    whole, inputs_of_it = excerpt(case, given, sequence, head, 0, length)
    x = operands(whole, inputs_of_it, torch.float64)
    at = sum(case.lengths[:sequence]) if case.lengths else 0
    row, group = (0 if case.lengths else sequence), d.value_heads // d.heads
    wrong = size = 0.0
    for start, S in zip(starts, states(x), strict=True):
        if start in chosen:
            end = min(start + CHUNK, length)
            short, part = excerpt(case, given, sequence, head, start, end)
            part["initial_state"] = S.mT if case.options.get("state_v_first") else S
            expected, _ = recurrence(short, part)
            got = output[row : row + 1, at + start : at + end, head * group :].double()
            wrong += (got - expected).square().sum().item()
            size += expected.square().sum().item()
    error = math.sqrt(wrong / max(size, 1e-300))
    return error if math.isfinite(error) else math.inf
