"""One validated call, as the public functions hand it to the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch

# Called on the class, it also refuses what is not a tensor; and a tensor without plain memory (sparse, nested) raises.
_address = torch.Tensor.data_ptr


@dataclass(slots=True)
class Problem:
    """A forward call; `validate.forward_problem` has checked it. Nothing here is copied, cast or reshaped.

    All but the last field are the arguments of a call, in the order of `signature`: calls are written out there alone.

    Shapes: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, beta `[B, T, HV]`, g `[B, T, HV]` (gate per head) or
    `[B, T, HV, K]` (per channel), any strides as long as the last dimension of q, k, v and of a channel gate is
    contiguous or strided views the kernels read element by element. States are float32 `[N, HV, K, V]`, or
    `[N, HV, V, K]` with `state_v_first`. With `cu_seqlens` (`[N + 1]`, int32 or int64, on the device of q), B is 1.
    """

    op: str
    saves: bool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    cu_seqlens_cpu: torch.Tensor | None
    scale: float
    initial_state: torch.Tensor | None = None
    output_final_state: bool = False
    state_v_first: bool = False
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    beta_double: bool = False
    gate_in_kernel: bool = False
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float | None = None
    key: Any = None  # the caller's signature, where it has one

    def signature(self) -> tuple[Any, tuple[int, ...]]:
        """Key and addresses of the call."""
        key, addresses = signature(*_arguments(self))
        return key if self.key is None else self.key, addresses


_arguments: Callable[[Problem], tuple[Any, ...]] = attrgetter(*[f.name for f in fields(Problem) if f.name != "key"])


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


def signature(
    op: str,
    saves: bool,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    scale: Any,
    initial_state: Any = None,
    output_final_state: Any = False,
    state_v_first: Any = False,
    qk_l2norm: Any = False,
    beta_sigmoid: Any = False,
    beta_double: Any = False,
    gate_in_kernel: Any = False,
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: Any = None,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return what distinguishes one call from another, checked or not: its key, and the addresses.

    The parameters are the fields of `Problem`. The key holds all that decides whether a call is valid, which kernels it
    takes and how: two calls of one key differ in addresses and in the values of tensors only. Strides are left out
    where they follow from the shape. Numbers come with their type, since True, 1 and 1.0 are one key to Python; flags
    as what `not` makes of them.

    Written out rather than looped over: it runs on every call, and this is half its cost. Whatever cannot be read like
    a tensor raises an AttributeError, RuntimeError or TypeError; such a call is not valid.
    """
    q_at, k_at, v_at = _address(q), _address(k), _address(v)
    g_at = beta_at = initial_at = A_log_at = dt_bias_at = cu_at = 0
    gates: tuple[Any, ...] | None = None
    betas: tuple[Any, ...] | None = None
    initial = parameters = boundaries = None
    if g is not None:
        g_at = _address(g)
        gates = g.dtype, g.device, g.shape, g.is_contiguous() or g.stride(), g.requires_grad, not g_at or g.is_neg()
    if beta is not None:
        beta_at = _address(beta)
        betas = beta.dtype, beta.device, beta.shape, beta.is_contiguous() or beta.stride(), beta.requires_grad
        betas += (not beta_at or beta.is_neg(),)
    if initial_state is not None:
        initial_at, initial = _address(initial_state), _describe(initial_state)
    if gate_in_kernel:
        parameters = _describe(A_log), _describe(dt_bias), type(lower_bound), lower_bound
        A_log_at = 0 if A_log is None else _address(A_log)
        dt_bias_at = 0 if dt_bias is None else _address(dt_bias)
    if cu_seqlens is not None or cu_seqlens_cpu is not None:
        boundaries = _describe(cu_seqlens), _describe(cu_seqlens_cpu)
        cu_at = 0 if cu_seqlens is None else _address(cu_seqlens)
    # Elements that do not lie at the address (a wrapper's, a fake's, a negated view's) are for the checks to refuse.
    elsewhere = not (q_at and k_at and v_at) or q.is_neg() or k.is_neg() or v.is_neg()
    key = (
        (elsewhere, op, saves, torch.is_grad_enabled(), (q_at | k_at | v_at) % 16 == 0, type(scale), scale),
        (q.dtype, q.device, q.shape, q.is_contiguous() or q.stride(), q.requires_grad),
        (k.dtype, k.device, k.shape, k.is_contiguous() or k.stride(), k.requires_grad),
        (v.dtype, v.device, v.shape, v.is_contiguous() or v.stride(), v.requires_grad),
        (gates, betas, initial, parameters, boundaries),
        (not output_final_state, not state_v_first, not qk_l2norm, not beta_sigmoid, not beta_double),
    )
    return key, (q_at, k_at, v_at, g_at, beta_at, A_log_at, dt_bias_at, cu_at, initial_at)


def _describe(x: Any) -> Any:
    """The part of a key that is one of the rarer tensors."""
    if x is None:
        return None
    elsewhere = not _address(x) or x.is_neg()
    return x.dtype, x.device, x.shape, x.is_contiguous() or x.stride(), x.requires_grad, elsewhere
