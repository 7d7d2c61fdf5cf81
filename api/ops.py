"""The public functions: names, argument order, defaults and layouts of flash-linear-attention 0.6.0."""

from __future__ import annotations

from typing import Any

import torch

from qla import runtime, validate
from qla.errors import UnsupportedError
from qla.runtime.problem import Result, signature

_NO_CP = "cp_context=None", "Context parallelism is not part of qla; split the sequence and pass the state on instead"


def forward(*call: Any) -> Result:
    """Run an op; the arguments are the fields of `Problem` in their order.

    Host time is what a short call costs, so a call like an earlier one takes one dictionary look-up instead of a check
    of every argument: its key holds all that the checks look at, and only a call that has passed them has an entry.
    What no key can hold is checked every time: the boundaries that the host can read. Any other call, right or wrong,
    is checked argument by argument.
    """
    key: tuple[Any, ...] | None
    try:
        key, addresses = signature(*call)
        layout = runtime.plan.layouts.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # Some argument is no tensor or no number; or the runtime is not imported yet.
        key = layout = None
    if layout is not None:
        if layout.ragged:
            validate.boundaries(*call)
        return layout.run(addresses)
    problem = validate.forward_problem(*call)
    problem.key = key
    # Imported here: the runtime pulls in compilers and drivers, which importing the package must not.
    from qla.runtime import plan

    return plan.run(problem)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet: the delta rule with one decay per value head and token.

    Per token ``S = exp(g) S``, then ``S = S + k (beta (v - S^T k))^T`` and ``o = S^T (scale q)``; the result is that
    of the recurrence, computed chunk by chunk (Yang et al., Gated DeltaNet, arXiv 2412.06464).

    Parameters
    ----------
    q, k : Tensor [B, T, H, K]
        Queries and keys, K 64 or 128, bfloat16 or float16 (float32 on the CPU only); any strides.
    v : Tensor [B, T, HV, V]
        Values, V 64 or 128, dtype of q. HV is a multiple of H: value head i uses q/k head ``i // (HV / H)``.
    g : Tensor [B, T, HV]
        Log of the decay (natural logarithm, at most 0), or the raw gate with `use_gate_in_kernel`. bfloat16, float16
        or float32.
    beta : Tensor [B, T, HV]
        Step of the delta rule, between 0 and ``2 / |k|^2`` (beyond it the recurrence itself diverges), or its logit
        with `use_beta_sigmoid_in_kernel`. bfloat16, float16 or float32.
    scale : float, optional
        Factor on q, after its norm; default ``K ** -0.5``.
    initial_state : Tensor [N, HV, K, V], optional
        float32, any strides; ``[N, HV, V, K]`` with `state_v_first`. Default: zeros. N is B, or the number of
        sequences of `cu_seqlens`.
    output_final_state : bool
        Also return the state after each sequence's last token.
    use_qk_l2norm_in_kernel : bool
        Multiply each row x of q and k by ``rsqrt(sum(x^2) + 1e-6)`` first.
    use_beta_sigmoid_in_kernel : bool
        Use ``sigmoid(beta)``.
    allow_neg_eigval : bool
        Use ``2 sigmoid(beta)``; asks for `use_beta_sigmoid_in_kernel`.
    state_v_first : bool
        Both states are ``[N, HV, V, K]``.
    cu_seqlens : Tensor [N + 1], optional
        Token boundaries of N sequences packed in one row (B = 1), int32 or int64, on the device of q, where they are
        never read by the host. Empty sequences are allowed; rows of `o` outside all sequences are undefined.
    cu_seqlens_cpu : Tensor [N + 1], optional
        The same values on the CPU: checked, and used for planning.
    chunk_indices : Tensor, optional
        Accepted and not needed.
    cp_context : None
        Only None is supported.
    **kwargs
        ``use_gate_in_kernel`` (bool): decay ``g = -exp(A_log) softplus(g + dt_bias)``. ``A_log``, ``dt_bias``:
        `[HV]`, bfloat16, float16 or float32; A_log is needed then, dt_bias is optional. ``chunk_size`` (16, 32 or
        64): checked and not needed. ``transpose_state_layout``: the older name of `state_v_first`.

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Dtype of v.
    final_state : Tensor or None
        float32, in the layout of `initial_state`; None without `output_final_state`.

    Raises
    ------
    UnsupportedError
        An argument whose shape, dtype, device or value is not supported, or an input that requires grad (there is no
        backward yet). A `ValueError` too; raised before anything is launched.
    """
    if cp_context is not None:
        validate.absent("cp_context", cp_context, *_NO_CP)
    use_gate_in_kernel, A_log, dt_bias = False, None, None
    if kwargs:
        known = ("A_log", "chunk_size", "dt_bias", "transpose_state_layout", "use_gate_in_kernel")
        validate.keywords("chunk_gated_delta_rule", kwargs, known)
        validate.chunk_size(kwargs, (16, 32, 64))
        state_v_first = validate.v_first(state_v_first, kwargs)
        use_gate_in_kernel = kwargs.get("use_gate_in_kernel", False)
        A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    result = forward(
        "gated_delta_rule", False, q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu, scale, initial_state,
        output_final_state, state_v_first, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias,
    )  # fmt: skip
    return result.o, result.final_state


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """DeltaNet: the delta rule without decay.

    Per token ``S = S + k (beta (v - S^T k))^T`` and ``o = S^T (scale q)``; the result is that of the recurrence,
    computed chunk by chunk (Yang et al., DeltaNet, arXiv 2406.06484).

    Parameters
    ----------
    q, k : Tensor [B, T, H, K]
        Queries and keys, K 64 or 128, bfloat16 or float16 (float32 on the CPU only); any strides.
    v : Tensor [B, T, HV, V]
        Values, V 64 or 128, dtype of q. HV is a multiple of H: value head i uses q/k head ``i // (HV / H)``.
    beta : Tensor [B, T, HV]
        Step of the delta rule, between 0 and ``2 / |k|^2``; bfloat16, float16 or float32.
    scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu
        As in `chunk_gated_delta_rule`. States are `[N, HV, K, V]`.
    **kwargs
        ``chunk_size`` (16, 32 or 64): checked and not needed.

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Dtype of v.
    final_state : Tensor [N, HV, K, V] or None
        float32; None without `output_final_state`.

    Raises
    ------
    UnsupportedError
        An argument whose shape, dtype, device or value is not supported, or an input that requires grad (there is no
        backward yet). A `ValueError` too; raised before anything is launched.
    """
    if kwargs:
        validate.keywords("chunk_delta_rule", kwargs, ("chunk_size",))
        validate.chunk_size(kwargs, (16, 32, 64))
    result = forward(
        "delta_rule", False, q, k, v, None, beta, cu_seqlens, cu_seqlens_cpu, scale, initial_state,
        output_final_state, False, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return result.o, result.final_state


def _check_kda(
    use_gate: bool, safe_gate: bool, lower_bound: Any, use_graph: bool, max_num_seqs: Any, cu_seqlens: Any
) -> None:
    """Check the options that only KDA has."""
    if safe_gate and use_gate:
        if lower_bound is None:
            raise UnsupportedError("lower_bound", None, "a number in [-5, 0) with safe_gate and use_gate_in_kernel")
        if isinstance(lower_bound, (int, float)) and not -5 <= lower_bound < 0:
            hint = "Without safe_gate any negative bound is taken"
            raise UnsupportedError("lower_bound", lower_bound, "a number in [-5, 0) with safe_gate", hint)
    if use_graph and max_num_seqs is not None and isinstance(cu_seqlens, torch.Tensor):
        sequences = cu_seqlens.numel() - 1
        if sequences != max_num_seqs:
            hint = "Pad cu_seqlens with empty sequences to max_num_seqs + 1 entries"
            supported = f"the number of sequences of cu_seqlens, {sequences}"
            raise UnsupportedError("max_num_seqs", max_num_seqs, supported, hint)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention: the delta rule with one decay per key channel, value head and token.

    Per token ``S = diag(exp(g)) S``, then ``S = S + k (beta (v - S^T k))^T`` and ``o = S^T (scale q)``; the result is
    that of the recurrence, computed chunk by chunk (Kimi Linear, arXiv 2510.26692).

    Parameters
    ----------
    q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, \
allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context
        As in `chunk_gated_delta_rule`.
    g : Tensor [B, T, HV, K]
        Log of the decay of each key channel (natural logarithm, at most 0), or the raw gate with
        `use_gate_in_kernel`. bfloat16, float16 or float32; any strides.
    use_gate_in_kernel : bool
        Decay ``-exp(A_log) softplus(g + dt_bias)``, or with `lower_bound`
        ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``.
    safe_gate : bool
        With `use_gate_in_kernel`, ask for a `lower_bound` in [-5, 0). Changes no result: every decay is safe here.
    lower_bound : float, optional
        Smallest log-decay per token, negative; only read with `use_gate_in_kernel`.
    disable_recompute, return_intermediate_states : bool
        Only False is supported.
    use_graph : bool
        Accepted: every call with `cu_seqlens` can be captured and replayed with other lengths.
    max_num_seqs : int, optional
        With `use_graph`, must equal the number of sequences of `cu_seqlens`.
    **kwargs
        ``A_log``: `[HV]`, and ``dt_bias``: `[HV * K]` or `[HV, K]`, bfloat16, float16 or float32, contiguous, read
        with `use_gate_in_kernel`; dt_bias is optional, and A_log too where there is a `lower_bound`. ``chunk_size``
        (32 or 64): checked and not needed. ``transpose_state_layout``: the older name of `state_v_first`.

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Dtype of v.
    final_state : Tensor or None
        float32, in the layout of `initial_state`; None without `output_final_state`.

    Raises
    ------
    UnsupportedError
        An argument whose shape, dtype, device or value is not supported, or an input that requires grad (there is no
        backward yet). A `ValueError` too; raised before anything is launched.
    """
    if cp_context is not None or disable_recompute is not False or return_intermediate_states is not False:
        validate.absent("cp_context", cp_context, *_NO_CP)
        validate.absent("disable_recompute", disable_recompute, "False", "It only concerns the backward pass")
        hint = "qla.GLAChunkFwd returns them for GLA"
        validate.absent("return_intermediate_states", return_intermediate_states, "False", hint)
    A_log = dt_bias = None
    if kwargs:
        validate.keywords("chunk_kda", kwargs, ("A_log", "chunk_size", "dt_bias", "transpose_state_layout"))
        validate.chunk_size(kwargs, (32, 64))
        state_v_first = validate.v_first(state_v_first, kwargs)
        A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    if safe_gate or use_graph:
        _check_kda(use_gate_in_kernel, safe_gate, lower_bound, use_graph, max_num_seqs, cu_seqlens)
    result = forward(
        "kda", False, q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu, scale, initial_state,
        output_final_state, state_v_first, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, lower_bound,
    )  # fmt: skip
    return result.o, result.final_state


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention: one decay per key channel, value head and token, no delta rule.

    Per token ``S = diag(exp(g)) S + k v^T`` and ``o = S^T (scale q)``; the result is that of the recurrence, computed
    chunk by chunk (Yang et al., GLA, arXiv 2312.06635).

    Parameters
    ----------
    q, k : Tensor [B, T, H, K]
        Queries and keys, K 64 or 128, bfloat16 or float16 (float32 on the CPU only); any strides.
    v : Tensor [B, T, HV, V]
        Values, V 64 or 128, dtype of q. HV is a multiple of H: value head i uses q/k head ``i // (HV / H)``.
    g : Tensor [B, T, HV, K]
        Log of the decay of each key channel (natural logarithm, at most 0); bfloat16, float16 or float32.
    scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu
        As in `chunk_gated_delta_rule`.

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Dtype of v.
    final_state : Tensor or None
        float32, in the layout of `initial_state`; None without `output_final_state`.

    Raises
    ------
    UnsupportedError
        An argument whose shape, dtype, device or value is not supported, or an input that requires grad (there is no
        backward yet). A `ValueError` too; raised before anything is launched.
    """
    result = forward(
        "gla", False, q, k, v, g, None, cu_seqlens, cu_seqlens_cpu, scale, initial_state,
        output_final_state, state_v_first,
    )  # fmt: skip
    return result.o, result.final_state
