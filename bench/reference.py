"""The recurrence in float64, token by token: what a result is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import softplus

from qla.bench.inputs import boundaries
from qla.bench.workloads import OPS, Case

__all__ = ["Operands", "bar", "operands", "recurrence", "relative_error", "unpack"]

# Largest relative error of an output or a state; with no gate errors add up over thousands of tokens.
_BARS = {"bfloat16": 0.005, "float16": 0.002, "float32": 1e-5}
_BARS_UNGATED = {"bfloat16": 0.008, "float16": 0.003, "float32": 3e-5}


def bar(case: Case) -> float:
    """How large a relative error of this case may be."""
    return (_BARS_UNGATED if OPS[case.op].gate == "none" else _BARS)[case.dtype]


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """``|x - expected| / |expected|`` (2-norms); infinite where either is not finite."""
    if x.shape != expected.shape:
        raise ValueError(f"shape {list(x.shape)}, expected {list(expected.shape)}")
    error = (x.double() - expected).norm().item() / max(expected.norm().item(), 1e-300)
    return error if math.isfinite(error) else math.inf


def _decay(case: Case, given: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Log-decay `[B, T, HV, 1 or K]`."""
    if OPS[case.op].gate == "none":
        return None
    g = given["g"].to(dtype)
    if case.options.get("use_gate_in_kernel"):
        g = g + given["dt_bias"].to(dtype).reshape(g.shape[2:])
        rate = given["A_log"].to(dtype).exp().reshape(-1, *[1] * (g.ndim - 3))
        bound = case.options.get("lower_bound")
        g = -rate * softplus(g) if bound is None else bound * torch.sigmoid(rate * g)
    return g if OPS[case.op].gate == "channel" else g[..., None]


def _step(case: Case, given: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Step of the delta rule, in the layout of the op."""
    beta = given["beta"].to(dtype)
    if case.options.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2.0 if case.options.get("allow_neg_eigval") else 1.0)
    return beta


def _by_sequence(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Packed sequences one per row, filled up with zeros, which change no state: `[N, longest, ...]`."""
    if not case.lengths:
        return x
    ends = boundaries(case).tolist()
    rows = [x[0, start:end] for start, end in pairwise(ends)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@dataclass(frozen=True)
class Operands:
    """The inputs of a case with all options carried out, one sequence per row.

    Parameters
    ----------
    q, k, v : Tensor [N, T, HV, K or V]
        Normalized where the op does it, q scaled; T is that of the longest sequence.
    decay : Tensor [N, T, HV, 1 or K] or None
        Natural logarithm.
    step : Tensor [N, T, HV, 1] or None
        Of the delta rule.
    state : Tensor [N, HV, K, V]
        Before the first token.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    step: torch.Tensor | None
    state: torch.Tensor


def operands(case: Case, given: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Operands:
    """Carry out the options of a case, in `dtype`."""
    op, dims = OPS[case.op], case.dims
    q, k, v = (given[name].to(dtype) for name in ("q", "k", "v"))
    step = _step(case, given, dtype) if op.delta else None
    if op.head_major:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        step = None if step is None else step.transpose(1, 2)
    if case.options.get("use_qk_l2norm_in_kernel"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    # The op that also returns DeltaNet's factors does not scale q.
    scale = 1.0 if op.saves and op.delta else case.options.get("scale") or dims.dk**-0.5
    q, k = (x.repeat_interleave(dims.value_heads // dims.heads, dim=2) for x in (q * scale, k))
    decay = _decay(case, given, dtype)
    q, k, v = (_by_sequence(case, x) for x in (q, k, v))
    decay = None if decay is None else _by_sequence(case, decay)
    step = None if step is None else _by_sequence(case, step)[..., None]
    state = q.new_zeros(dims.sequences, dims.value_heads, dims.dk, dims.dv)
    if "initial_state" in given:
        initial = given["initial_state"].to(dtype)
        state += initial.mT if case.options.get("state_v_first") else initial
    return Operands(q, k, v, decay, step, state)


def unpack(case: Case, o: torch.Tensor) -> torch.Tensor:
    """Output `[N, T, HV, V]`, one sequence per row, as the case has it: packed sequences one after the other."""
    if not case.lengths:
        return o
    return torch.cat([row[:length] for row, length in zip(o, case.lengths, strict=True)])[None]


def recurrence(case: Case, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a case token by token, all sequences and heads at once, on the device of its inputs.

    Per token ``S = e^g S``, ``v' = b (v - S^T k)`` (without the delta rule ``v' = v``), ``S = S + k v'^T``,
    ``o = S^T (scale q)``.

    Returns
    -------
    o : Tensor [B, T, HV, V]
    final_state : Tensor [N, HV, K, V]
        Both float64.
    """
    x = operands(case, given, torch.float64)
    decay = None if x.decay is None else x.decay.exp()
    S, o = x.state, torch.empty_like(x.v)
    for t in range(o.shape[1]):
        if decay is not None:
            S *= decay[:, t, :, :, None]
        value = x.v[:, t]
        if x.step is not None:
            value = x.step[:, t] * (value - torch.einsum("nhk,nhkv->nhv", x.k[:, t], S))
        S += x.k[:, t, :, :, None] * value[:, :, None, :]
        o[:, t] = torch.einsum("nhk,nhkv->nhv", x.q[:, t], S)
    return unpack(case, o), S
