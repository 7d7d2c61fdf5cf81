"""One validated call, as the public functions hand it to the runtime."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Problem:
    """A forward call whose arguments have been checked; nothing here is copied, cast or reshaped.

    Shapes: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, beta `[B, T, HV]`, g `[B, T, HV]` (gate per head) or
    `[B, T, HV, K]` (per channel), any strides as long as the last dimension of q, k, v and of a channel gate is
    contiguous or strided views the kernels read element by element. States are float32 `[N, HV, K, V]`, or
    `[N, HV, V, K]` with `state_v_first`. With `cu_seqlens` (`[N + 1]`, int32 or int64, on the device of q), B is 1.
    """

    op: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    scale: float
    initial_state: torch.Tensor | None
    output_final_state: bool
    state_v_first: bool
    qk_l2norm: bool
    beta_sigmoid: bool
    beta_double: bool
    gate_in_kernel: bool
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    lower_bound: float | None
    cu_seqlens: torch.Tensor | None
    cu_seqlens_cpu: torch.Tensor | None
    saves: bool = False


@dataclass(slots=True)
class Result:
    """What a call gives. The last five are filled only with `Problem.saves`.

    o `[B, T, HV, V]` in the dtype of v; final_state float32 as `Problem`; states `[B, ceil(T/64) + 1, HV, K, V]`
    float32, the state at each chunk's start and at the end; A `[B, T, HV, 64]`, w `[B, T, HV, K]`, u `[B, T, HV, V]`
    (delta ops, dtype of v): rows of (I + L)^-1, of A K and of A V, with A = (I + L)^-1 diag(b).
    """

    o: torch.Tensor
    final_state: torch.Tensor | None
    states: torch.Tensor | None = None
    A: torch.Tensor | None = None
    w: torch.Tensor | None = None
    u: torch.Tensor | None = None
