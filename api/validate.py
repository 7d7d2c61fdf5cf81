"""Every check of a call's arguments, in one place, before anything is compiled, allocated or launched.

The checks compare attributes (shape, dtype, device) and never call a torch operator, so they cost a few microseconds
and no synchronization. The values of a tensor on a device are never read; those of host `cu_seqlens` are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from qla.codegen.ops import OPS
from qla.codegen.spec import HEAD_DIMS
from qla.errors import UnsupportedError
from qla.runtime.problem import Problem

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_STATE = (torch.float32,)
_INTS = (torch.int32, torch.int64)
_CPU = torch.device("cpu")
_FLAGS = ("output_final_state", "state_v_first", "qk_l2norm", "beta_sigmoid", "beta_double", "gate_in_kernel")

_LARGEST = 3.4028234e38  # of float32


def _show(x: Any) -> str:
    """Describe a value for an error message without reading a tensor's elements."""
    if not isinstance(x, torch.Tensor):
        return repr(x) if x is None or isinstance(x, (int, float, str)) else f"a {type(x).__name__}"
    layout = "" if x.layout is torch.strided else f" ({_names((x.layout,))})"
    return f"{_names((x.dtype,))} {list(x.shape)} on {x.device}{layout}"


def _names(dtypes: tuple[torch.dtype | torch.layout, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _no_tensor(name: str, x: Any) -> UnsupportedError:
    return UnsupportedError(name, _show(x), "a strided torch.Tensor")


def _strided(name: str, x: torch.Tensor) -> UnsupportedError:
    return UnsupportedError(name, f"strides {list(x.stride())}", "a contiguous tensor", f"Pass {name}.contiguous()")


def _needs_grad(name: str) -> UnsupportedError:
    hint = "There is no backward yet: call under torch.no_grad() or torch.inference_mode(), or detach the input"
    return UnsupportedError(name, "a tensor that requires grad, with grad mode on", "forward without gradients", hint)


def _check(
    name: str,
    x: Any,
    shape: tuple[int, ...],
    letters: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    grad: bool,
) -> None:
    """Compare one tensor with what its place asks for; `letters` is the shape as the documentation writes it."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
        raise _no_tensor(name, x)
    if x.shape != shape:
        raise UnsupportedError(name, list(x.shape), f"shape {letters} = {list(shape)}")
    if x.dtype not in dtypes:
        raise UnsupportedError(name, _names((x.dtype,)), _names(dtypes), f"Convert it first: {name}.to({dtypes[0]})")
    if x.device != device:
        raise UnsupportedError(name, x.device, f"{device}, where q is", "Move all tensors of a call to one device")
    if grad and x.requires_grad:
        raise _needs_grad(name)
    _check_memory(name, x)


def _check_memory(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not what lies at its address."""
    if x.is_neg():
        raise UnsupportedError(name, "a lazily negated view", "a plain tensor", f"Pass {name}.resolve_neg()")
    try:
        address = x.data_ptr()
    except RuntimeError:  # tensors of functorch
        address = 0
    if not address and x.numel():
        hint = "DTensor: pass x.to_local(); torch.func, torch.export and FakeTensorMode have no kernel to trace"
        raise UnsupportedError(name, f"a {type(x).__name__} without memory of its own", "a plain tensor", hint)


def _check_query(q: Any, grad: bool) -> None:
    """Check q alone: its shape, dtype and device are what the other tensors are compared with."""
    if not isinstance(q, torch.Tensor) or q.layout is not torch.strided or q.is_nested:
        raise _no_tensor("q", q)
    if q.ndim != 4:
        raise UnsupportedError("q", list(q.shape), "shape [B, T, H, K]")
    kind = q.device.type
    if kind not in ("cuda", "cpu"):
        raise UnsupportedError("q", f"a tensor on {q.device}", "a CUDA or ROCm device, or the CPU")
    if q.dtype not in _HALVES and not (kind == "cpu" and q.dtype is torch.float32):
        hint = "float32 is supported on the CPU only" if q.dtype is torch.float32 else ""
        raise UnsupportedError("q", f"{_names((q.dtype,))} on {q.device}", _names(_HALVES), hint)
    if q.shape[3] not in HEAD_DIMS:
        raise UnsupportedError("q", f"head dim K = {q.shape[3]}", f"K in {HEAD_DIMS}")
    if q.shape[2] == 0:
        raise UnsupportedError("q", list(q.shape), "at least one head (H >= 1)")
    if grad and q.requires_grad:
        raise _needs_grad("q")
    _check_memory("q", q)


def _check_values(v: Any, H: int) -> tuple[int, int]:
    """Return (HV, V) after checking that v can be read as `[B, T, HV, V]` with HV a multiple of H."""
    if not isinstance(v, torch.Tensor) or v.is_nested:
        raise _no_tensor("v", v)
    if v.ndim != 4:
        raise UnsupportedError("v", list(v.shape), "shape [B, T, HV, V]")
    HV, V = v.shape[2], v.shape[3]
    if HV < H or HV % H:
        hint = "Each q/k head serves HV / H value heads"
        raise UnsupportedError("v", f"HV = {HV} value heads for H = {H} q/k heads", "HV a multiple of H", hint)
    if V not in HEAD_DIMS:
        raise UnsupportedError("v", f"head dim V = {V}", f"V in {HEAD_DIMS}")
    return HV, V


def _check_boundaries(name: str, x: torch.Tensor, T: int) -> None:
    """Check sequence boundaries that lie in host memory: ascending and within the T tokens given."""
    values = x.tolist()
    if values[0] < 0 or values[-1] > T:
        hint = "" if values[-1] <= T else "The last boundary may be below T (padding follows), never above"
        raise UnsupportedError(name, f"boundaries {values[0]} .. {values[-1]}", f"boundaries in 0 .. T = {T}", hint)
    if values != sorted(values):
        at = next(i for i in range(len(values) - 1) if values[i] > values[i + 1])
        got = f"{values[at]} followed by {values[at + 1]} at index {at + 1}"
        raise UnsupportedError(name, got, "boundaries that never decrease", "Pass cumulative lengths, not lengths")


def _check_index(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise _no_tensor(name, x)
    if x.dtype not in _INTS:
        raise UnsupportedError(name, _names((x.dtype,)), _names(_INTS))
    if x.ndim != 1 or x.shape[0] == 0:
        raise UnsupportedError(name, list(x.shape), "shape [N + 1], N >= 0")
    if not x.is_contiguous():
        raise _strided(name, x)
    if x.device.type != "meta":
        _check_memory(name, x)


def _sequences(cu: Any, cpu: Any, B: int, T: int, device: torch.device) -> int:
    """Return the number of sequences N after checking `cu_seqlens` and its host copy."""
    if cu is None:
        if cpu is not None:
            hint = "It is a host copy that helps planning; without cu_seqlens the kernels would not see boundaries"
            raise UnsupportedError("cu_seqlens_cpu", _show(cpu), "cu_seqlens_cpu together with cu_seqlens", hint)
        return B
    _check_index("cu_seqlens", cu)
    if cu.device != device:
        hint = "Copy it to the device once, before the loop over layers; the host copy goes into cu_seqlens_cpu"
        raise UnsupportedError("cu_seqlens", f"a tensor on {cu.device}", f"{device}, where q is", hint)
    if B != 1:
        hint = "Flatten the batch into one row of tokens: x.reshape(1, B * T, ...)"
        raise UnsupportedError("q", f"batch size {B} with cu_seqlens", "batch size 1 with cu_seqlens", hint)
    if device.type == "cpu":  # on the host nothing but this check stands between a bad boundary and a bad address
        _check_boundaries("cu_seqlens", cu, T)
    if cpu is not None:
        _check_index("cu_seqlens_cpu", cpu)
        if cpu.device != _CPU:
            raise UnsupportedError("cu_seqlens_cpu", f"a tensor on {cpu.device}", "a tensor on the CPU")
        if cpu.shape != cu.shape:
            supported = f"the shape of cu_seqlens, {list(cu.shape)}"
            raise UnsupportedError("cu_seqlens_cpu", list(cpu.shape), supported)
        _check_boundaries("cu_seqlens_cpu", cpu, T)
    return int(cu.shape[0]) - 1


def boundaries(op: str, saves: bool, q: Any, k: Any, v: Any, g: Any, beta: Any, cu: Any, cpu: Any, *rest: Any) -> None:
    """Check the values of boundaries that lie in host memory; the call has passed all other checks before."""
    if cu is not None and cu.is_cpu:
        _check_boundaries("cu_seqlens", cu, q.shape[1])
    if cpu is not None:
        _check_boundaries("cu_seqlens_cpu", cpu, q.shape[1])


def _check_state(
    x: Any, N: int, HV: int, K: int, V: int, state_v_first: bool, device: torch.device, grad: bool
) -> None:
    shape, letters = ((N, HV, V, K), "[N, HV, V, K]") if state_v_first else ((N, HV, K, V), "[N, HV, K, V]")
    if isinstance(x, torch.Tensor) and x.shape != shape and K != V and x.shape == (N, HV, shape[3], shape[2]):
        supported = f"shape {letters} = {list(shape)} with state_v_first={state_v_first}"
        raise UnsupportedError("initial_state", list(x.shape), supported, f"Pass state_v_first={not state_v_first}")
    _check("initial_state", x, shape, letters, _STATE, device, grad)


def _check_parameter(name: str, x: Any, size: int, letters: str, device: torch.device, grad: bool) -> None:
    """Check a gate parameter: `size` elements of any contiguous shape (models also keep them as `[1, 1, HV, 1]`)."""
    if not isinstance(x, torch.Tensor):
        raise _no_tensor(name, x)
    if x.numel() != size:
        raise UnsupportedError(name, list(x.shape), f"{size} elements, shape {letters}")
    if not x.is_contiguous():
        raise _strided(name, x)
    _check(name, x, x.shape, letters, _FLOATS, device, grad)


def _check_gate(
    gate: str, A_log: Any, dt_bias: Any, lower_bound: Any, HV: int, K: int, device: torch.device, grad: bool
) -> None:
    """Check what turns raw gates into decays (`use_gate_in_kernel=True`)."""
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float)):
            raise UnsupportedError("lower_bound", _show(lower_bound), "a negative number, or None")
        if not -_LARGEST <= lower_bound < 0:
            raise UnsupportedError("lower_bound", lower_bound, "a negative number that float32 holds, -5 is usual")
    if A_log is None:
        if lower_bound is None:
            hint = "Pass A_log, or pass gates that are already decays and use_gate_in_kernel=False"
            raise UnsupportedError("A_log", None, "a tensor [HV] when use_gate_in_kernel=True", hint)
    else:
        _check_parameter("A_log", A_log, HV, "[HV]", device, grad)
    if dt_bias is not None:
        size, letters = (HV, "[HV]") if gate == "head" else (HV * K, "[HV * K] or [HV, K]")
        _check_parameter("dt_bias", dt_bias, size, letters, device, grad)


def _scale(scale: Any, K: int) -> float:
    if scale is None:
        return float(K**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise UnsupportedError("scale", _show(scale), "a number, or None for K ** -0.5")
    if not abs(scale) <= _LARGEST:  # also where it is NaN, or an int beyond any float
        raise UnsupportedError("scale", scale, "a number that float32 holds, or None for K ** -0.5")
    return float(scale)


def forward_problem(*call: Any) -> Problem:
    """Check a forward call and return it as the runtime takes it.

    Parameters
    ----------
    call : the fields of `Problem` in their order, as the public functions were given them. `op` decides which of g and
        beta the call has and their shapes; `saves` says to return also what a backward pass needs; `beta_double` is
        ``allow_neg_eigval`` of the public functions; `scale` may be None.

    Raises
    ------
    UnsupportedError
        For the first argument that is not supported. Nothing has been allocated or launched by then.
    """
    problem = Problem(*call)
    grad = torch.is_grad_enabled()
    _check_tensors(problem, grad)
    _check_options(problem, grad)
    problem.scale = _scale(problem.scale, problem.q.shape[3])
    if not problem.gate_in_kernel:  # the parameters of the gate have no effect then, as in flash-linear-attention
        problem.A_log = problem.dt_bias = problem.lower_bound = None
    if problem.lower_bound is not None:
        problem.lower_bound = float(problem.lower_bound)
    for name in _FLAGS:
        setattr(problem, name, bool(getattr(problem, name)))
    return problem


def _check_tensors(p: Problem, grad: bool) -> None:
    """Check the tensors of every token, each against q."""
    features = OPS[p.op]
    _check_query(p.q, grad)
    B, T, H, K = p.q.shape
    HV, V = _check_values(p.v, H)
    dtypes, device = (p.q.dtype,), p.q.device
    _check("k", p.k, (B, T, H, K), "[B, T, H, K]", dtypes, device, grad)
    _check("v", p.v, (B, T, HV, V), "[B, T, HV, V]", dtypes, device, grad)
    if features.gate == "head":
        _check("g", p.g, (B, T, HV), "[B, T, HV]", _FLOATS, device, grad)
    elif features.gate == "channel":
        _check("g", p.g, (B, T, HV, K), "[B, T, HV, K]", _FLOATS, device, grad)
    if features.delta:
        _check("beta", p.beta, (B, T, HV), "[B, T, HV]", _FLOATS, device, grad)


def _check_options(p: Problem, grad: bool) -> None:
    """Check all else; shapes follow from q and v, which have been checked."""
    features, device = OPS[p.op], p.q.device
    (B, T, _, K), (HV, V) = p.q.shape, p.v.shape[2:]
    if features.delta and p.beta_double and not p.beta_sigmoid:
        hint = "It doubles the sigmoid; where beta is given as it is, pass values up to 2"
        raise UnsupportedError("allow_neg_eigval", True, "use_beta_sigmoid_in_kernel=True with it", hint)
    N = _sequences(p.cu_seqlens, p.cu_seqlens_cpu, B, T, device)
    if p.initial_state is not None:
        _check_state(p.initial_state, N, HV, K, V, p.state_v_first, device, grad)
    if p.gate_in_kernel:
        _check_gate(features.gate, p.A_log, p.dt_bias, p.lower_bound, HV, K, device, grad)


def keywords(function: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keyword arguments that the function does not read, as Python itself would."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def v_first(state_v_first: bool, given: Mapping[str, Any]) -> bool:
    """Return the state layout, reading the older name of the option too (which warns)."""
    if "transpose_state_layout" not in given:
        return state_v_first
    if state_v_first:
        hint = "Pass state_v_first alone"
        raise UnsupportedError("transpose_state_layout", "given with state_v_first", "one of the two names", hint)
    text = "`transpose_state_layout` is deprecated: it is called `state_v_first` now"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return bool(given["transpose_state_layout"])


def chunk_size(given: Mapping[str, Any], supported: tuple[int, ...]) -> None:
    """Check `chunk_size`. It is a tuning hint elsewhere; here the target decides, and results do not depend on it."""
    size = given.get("chunk_size", 64)
    if size not in supported:
        raise UnsupportedError("chunk_size", _show(size), f"one of {supported}, or leave it out")


def absent(name: str, value: Any, why: str, hint: str = "") -> None:
    """Refuse an option that has no counterpart here when it is set."""
    if value is not None and value is not False:
        raise UnsupportedError(name, _show(value), why, hint)
