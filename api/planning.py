"""`explain`: how a call would run, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qla import ops
from qla.codegen.explain import Explanation
from qla.codegen.ops import OPS
from qla.codegen.planner import CallShape, plan_call
from qla.errors import UnsupportedError
from qla.runtime.drivers import device_target, driver_for, loads_of
from qla.runtime.plan import DTYPES
from qla.targets import TARGETS

_DEFAULT_TARGET = "sm_90a"


def explain(
    function: Callable[..., Any],
    *arguments: Any,
    dtype: str | torch.dtype = "bf16",
    target: str | None = None,
    processors: int | None = None,
    **options: Any,
) -> Explanation:
    """Return how a call would run: its launches, what they move and compute, the predicted time and why it is run so.

    Nothing is launched or compiled, and no tensor's values are read: calls of the same shapes run the same.

    Parameters
    ----------
    function : ``qla.chunk_gated_delta_rule``, ``chunk_delta_rule``, ``chunk_kda`` or ``chunk_gla``.
    *arguments, **options
        Of the call. In place of a tensor its shape will do, and only q `[B, T, H, K]`, v `[B, T, HV, V]` and, for
        packed sequences, cu_seqlens `[N + 1]` are looked at; the others may be left out.
    dtype : of q, where q is a shape: ``"bf16"``, ``"fp16"``, ``"fp32"`` or torch's.
    target : default: that of the device of q, or ``"sm_90a"`` where q is a shape.
    processors : multiprocessors, compute units or cores. Default: those of the device of q, or where q is a shape or
        `target` is given, those of the target's usual device.

    Returns
    -------
    Explanation
        Its text (``print(qla.explain(...))``) is a table of the launches, segments and the reason for them. Times are
        predicted where some were measured, on ``"sm_90a"``. Attributes: `qla.codegen.explain.Explanation`.

    Raises
    ------
    UnsupportedError
        An argument whose shape, dtype or device is not supported, or a call with nothing to run.

    Examples
    --------
    >>> print(qla.explain(qla.chunk_gated_delta_rule, q, k, v, g, beta, cu_seqlens=cu_seqlens))
    >>> print(qla.explain(qla.chunk_kda, q=(1, 8192, 16, 128), v=(1, 8192, 32, 128), target="gfx950"))
    """
    op = getattr(function, "__name__", "").removeprefix("chunk_")
    if op not in OPS or getattr(ops, f"chunk_{op}", None) is not function:
        raise UnsupportedError("function", function, ", ".join(f"qla.chunk_{name}" for name in OPS))
    call = inspect.signature(function).bind_partial(*arguments, **options).arguments
    q, v, cu_seqlens = call.get("q"), call.get("v"), call.get("cu_seqlens")
    batch, tokens, heads, dk = _shape("q", q, "[B, T, H, K]")
    *rows, value_heads, dv = _shape("v", v, "[B, T, HV, V]")
    if rows != [batch, tokens]:
        raise UnsupportedError("v", [*rows, value_heads, dv], f"shape [B, T, HV, V] with B = {batch}, T = {tokens}")
    sequences = 0
    if cu_seqlens is not None:
        sequences = _shape("cu_seqlens", cu_seqlens, "[N + 1]")[0] - 1
        if sequences < 1:
            raise UnsupportedError("cu_seqlens", [sequences + 1], "shape [N + 1] with N >= 1")
    if isinstance(q, torch.Tensor):
        dtype = q.dtype
        if target is None:
            target = device_target(q.device)
            if processors is None:
                processors = driver_for(target, q.get_device()).processors
    target = target or _DEFAULT_TARGET
    if target not in TARGETS:
        raise UnsupportedError("target", target, f"one of {', '.join(TARGETS)}")
    names: dict[Any, Any] = {**DTYPES, **{name: name for name in DTYPES.values()}}
    if dtype not in names:
        raise UnsupportedError("dtype", dtype, ", ".join(DTYPES.values()))
    loads = loads_of(target, [x for x in (q, call.get("k"), v) if isinstance(x, torch.Tensor)])
    shape = CallShape(op, names[dtype], dk, dv, batch, tokens, heads, value_heads, sequences, loads)
    return Explanation(plan_call(shape, target, TARGETS[target].processors if processors is None else processors))


def _shape(name: str, x: Any, letters: str) -> Sequence[int]:
    """Shape of a tensor, or what is given as one."""
    shape = tuple(x.shape) if isinstance(x, torch.Tensor) else x
    dims = letters.count(",") + 1
    if not isinstance(shape, (tuple, list)) or len(shape) != dims or not all(type(n) is int for n in shape):
        got = list(shape) if isinstance(shape, (tuple, list)) else shape if x is None else f"a {type(x).__name__}"
        raise UnsupportedError(name, got, f"a tensor {letters}, or its shape")
    return shape
