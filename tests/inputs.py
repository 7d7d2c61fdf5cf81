"""Makers of inputs as models produce them, and of the harder ones. Drawn on the CPU: equal on every device."""

from __future__ import annotations

from typing import Any

import torch
from reference import DELTA, GATE
from torch.nn.functional import logsigmoid, normalize, pad, softplus

GATES = ("ordinary", "strong", "none", "long")


def boundaries(lengths: list[int], device: str = "cpu", dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `cu_seqlens` of sequences with the given lengths."""
    return pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(device, dtype)


def log_decay(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return natural-log decays: of a trained model, near-total forgetting, none at all, or of a very long memory."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "none":
        return torch.zeros_like(x)
    if kind == "strong":
        return -16.0 * softplus(x)
    if kind == "long":
        return -1e-6 * x.abs()
    assert kind == "ordinary", kind
    return logsigmoid(x + 2.0)


def make(
    name: str,
    *,
    T: int,
    B: int = 1,
    H: int = 2,
    HV: int | None = None,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    keys: str = "unit",
    gate: str = "ordinary",
    gate_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    state: bool = False,
    v_first: bool = False,
    lengths: list[int] | None = None,
    index_dtype: torch.dtype = torch.int64,
    **options: Any,
) -> dict[str, Any]:
    """Return keyword arguments for the public function `name`; `options` are added as they are.

    `keys`: ``"unit"`` rows of norm 1; ``"raw"`` standard normal. Raw keys of a delta op that does not normalize them
    get betas with `beta |k|^2 <= 2`, beyond which the recurrence itself diverges. With ``use_gate_in_kernel`` the
    gates are raw and come with A_log (up to log 16 in some head) and dt_bias.
    """
    HV = HV or H
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if keys == "unit":
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    arguments: dict[str, Any] = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    raw_gate = options.get("use_gate_in_kernel", False)
    if GATE[name] != "none":
        shape = (B, T, HV) if GATE[name] == "head" else (B, T, HV, K)
        g = normal(*shape) if raw_gate else log_decay(gate, shape, generator)
        arguments["g"] = g.to(gate_dtype)
    if raw_gate:
        rates = 1.0 + 15.0 * torch.rand(HV, generator=generator, dtype=torch.float64)
        rates[-1] = 16.0
        arguments["A_log"] = rates.log().float()
        arguments["dt_bias"] = (normal(HV * (K if GATE[name] == "channel" else 1)) - 2.0).float()
    if DELTA[name]:
        beta = normal(B, T, HV)
        if not options.get("use_beta_sigmoid_in_kernel"):
            largest = 1.0
            if keys == "raw" and not options.get("use_qk_l2norm_in_kernel"):  # 1.98: room for the rounding of beta
                square = arguments["k"].double().square().sum(-1).repeat_interleave(HV // H, dim=2)
                largest = 1.98 / square.clamp(min=1.0)
            beta = torch.sigmoid(beta) * largest
        arguments["beta"] = beta.to(beta_dtype)
    if lengths is not None:
        assert B == 1
        assert sum(lengths) <= T
        arguments["cu_seqlens"] = boundaries(lengths, dtype=index_dtype)
    if state:
        N = B if lengths is None else len(lengths)
        arguments["initial_state"] = normal(N, HV, *((V, K) if v_first else (K, V))).float()
    if v_first:
        arguments["state_v_first"] = True
    arguments |= {"output_final_state": True, **options}
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def unpadded(arguments: dict[str, Any]) -> int:
    """Return how many leading rows of o belong to a sequence."""
    cu_seqlens = arguments.get("cu_seqlens")
    return int(arguments["q"].shape[1] if cu_seqlens is None else cu_seqlens[-1])


def copy(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose tensors share nothing with the given ones."""
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def same_bits(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Say whether two tensors are equal bit for bit (so NaN equals itself)."""
    if x is None or y is None:
        return x is y
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(as_int), y.contiguous().view(as_int))
