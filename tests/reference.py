"""The contract: the recurrence of each op, token by token in float64, and how far a result may be from it.

`forward` takes the keyword arguments of the public functions and reads the tensors as they were given (already rounded
to their dtype), so it says what an implementation without rounding of its own would return.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus

DELTA = {"chunk_gated_delta_rule": True, "chunk_delta_rule": True, "chunk_kda": True, "chunk_gla": False}
GATE = {"chunk_gated_delta_rule": "head", "chunk_delta_rule": "none", "chunk_kda": "channel", "chunk_gla": "channel"}
FUNCTIONS = tuple(DELTA)

# Largest relative error of an output or a state. The float32 bars are for the CPU alone, where nothing is rounded to
# 16 bits: they hold what float32 sums and exponentials of a chunk lose.
BARS = {torch.bfloat16: 0.005, torch.float16: 0.002, torch.float32: 1e-5}
# With no gate, or nearly none, errors add up over thousands of tokens.
BARS_UNGATED = {torch.bfloat16: 0.008, torch.float16: 0.003, torch.float32: 3e-5}


def relative_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return `|x - ref| / |ref|` (2-norms); infinite where either is not finite, or where only the reference is 0."""
    assert x.shape == ref.shape, f"shape {list(x.shape)}, expected {list(ref.shape)}"
    x, ref = x.detach().double(), ref.detach().double().to(x.device)
    if not (x.isfinite().all() and ref.isfinite().all()):
        return math.inf
    error, norm = (x - ref).norm().item(), ref.norm().item()
    return error / norm if norm > 0 else (0.0 if error == 0 else math.inf)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Scale each row by `rsqrt(sum(x^2) + 1e-6)`."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def activate_gate(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """Return the log-decay of raw float64 gates `[B, T, HV]` or `[B, T, HV, K]`."""
    if dt_bias is not None:
        g = g + dt_bias.double().reshape(g.shape[2:])
    rate = torch.ones((), dtype=g.dtype, device=g.device)
    if A_log is not None:
        rate = A_log.double().exp().reshape(-1, *[1] * (g.ndim - 3))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * softplus(g)  # linear above 20, where the difference is below 3e-9


def prepare(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Apply every option that acts on single tokens; q and k come back with a row per value head.

    Returns
    -------
    q, k, v, decay, beta : float64 `[B, T, HV, ...]`; decay is the log, `[B, T, HV, 1]` or `[B, T, HV, K]`.
    """
    scale = options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = q.double(), k.double(), v.double()
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q * scale, k))
    decay = v.new_zeros(*v.shape[:3], 1)
    if g is not None:
        decay = g.double()
        if options.get("use_gate_in_kernel"):
            decay = activate_gate(decay, options.get("A_log"), options.get("dt_bias"), options.get("lower_bound"))
        decay = decay if GATE[name] == "channel" else decay[..., None]
    step = v.new_ones(v.shape[:3])
    if beta is not None:
        step = beta.double()
        if options.get("use_beta_sigmoid_in_kernel"):
            step = torch.sigmoid(step) * (2.0 if options.get("allow_neg_eigval") else 1.0)
    return q, k, v, decay, step


def recurrence(
    delta: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run sequences of equal length: `[B, T, HV, ...]` as `prepare` gives them, S `[B, HV, K, V]` (not written).

    Per token `S = e^g S`, `v' = b (v - S^T k)` (delta ops; else `v' = v`), `S = S + k v'^T`, `o = S^T q`.
    """
    B, T, HV, K = q.shape
    V = v.shape[-1]

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).reshape(T, B * HV, x.shape[3])

    rows, keys, values, factor, step = (tokens(x) for x in (q, k, v, decay.exp(), beta[..., None]))
    o = v.new_empty(T, B * HV, V)
    S = S.reshape(B * HV, K, V).clone()
    for t in range(T):
        S *= factor[t][:, :, None]
        column, value = keys[t][:, :, None], values[t][:, None, :]
        if delta:
            value = step[t][:, :, None] * (value - column.mT @ S)
        S.baddbmm_(column, value)
        o[t] = torch.bmm(rows[t][:, None, :], S)[:, 0]
    return o.reshape(T, B, HV, V).transpose(0, 1), S.reshape(B, HV, K, V)


def _sequences(cu_seqlens: torch.Tensor | None, T: int) -> Iterator[slice]:
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        yield slice(start, end)


def forward(name: str, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(o, final_state)` in float64 for the arguments of the public function `name`.

    Rows of o that belong to no sequence are zero. The state is returned whether or not it was asked for.
    """
    state, v_first = arguments.get("initial_state"), arguments.get("state_v_first", False)
    cu_seqlens = arguments.get("cu_seqlens")
    inputs = prepare(name, **arguments)
    B, T, HV, K, V = *inputs[0].shape, inputs[2].shape[-1]
    if state is None:
        N = B if cu_seqlens is None else cu_seqlens.numel() - 1
        state = inputs[2].new_zeros(N, HV, K, V)
    else:
        state = state.double().mT if v_first else state.double()
    o, final = inputs[2].new_zeros(B, T, HV, V), torch.empty_like(state, memory_format=torch.contiguous_format)
    for n, tokens in enumerate(_sequences(cu_seqlens, T)):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        part = recurrence(DELTA[name], *(x[:, tokens] for x in inputs), state[rows])
        o[:, tokens], final[rows] = part
    return o, final.mT if v_first else final


def chunk_states(name: str, **arguments: Any) -> torch.Tensor:
    """Return `[B, chunks + 1, HV, K, V]` in float64: the state before each 64 tokens and after the last one."""
    inputs = prepare(name, **arguments)
    state = arguments.get("initial_state")
    if state is None:
        (B, _, HV, K), V = inputs[0].shape, inputs[2].shape[-1]
        state = inputs[2].new_zeros(B, HV, K, V)
    states = [state.double().mT if arguments.get("state_v_first") else state.double()]
    for start in range(0, inputs[0].shape[1], 64):
        states.append(recurrence(DELTA[name], *(x[:, start : start + 64] for x in inputs), states[-1])[1])
    return torch.stack(states, 1)
