"""The libraries that are measured beside ours, each called so that it computes what a case asks for.

A peer's `call` gets the tensors that ours gets. Conversions that a model would not pay for at each call (linear gates,
logits of given gates, another layout) are made before the timed call; what a peer does not offer is said, never
approximated. One peer is imported in one process only: see `qla.bench.worker`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

import torch

from qla.bench import chunked, inputs
from qla.bench.inputs import Call, MakeCall, boundaries
from qla.bench.workloads import CHUNK, OPS, Case

__all__ = ["OURS", "PEERS", "NotOfferedError", "Peer"]

OURS = "qla"
_TORCH_CHUNKS = 256
_KDA_BOUND = -5.0

Tensors = Mapping[str, torch.Tensor]


class NotOfferedError(Exception):
    """A peer has nothing that computes the case."""


@dataclass(frozen=True)
class Peer:
    """A library.

    Parameters
    ----------
    name : of it.
    modules : that a call needs; the first one's version is the peer's.
    call : as `inputs.call`; raises `NotOfferedError`.
    environment : variables of its process.
    """

    name: str
    modules: tuple[str, ...]
    call: MakeCall
    environment: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> str:
        """Import it and return its version; raises what the import raises."""
        first, *_ = [import_module(module) for module in self.modules]
        return _version(first)


def _version(module: Any) -> str:
    name = module.__name__.partition(".")[0]
    found = getattr(import_module(name), "__version__", None)
    if found is None:
        distributions = metadata.packages_distributions().get(name, [])
        found = metadata.version(distributions[0]) if distributions else "unknown"
    return str(found)


def _needs(holds: object, what: str) -> None:
    if not holds:
        raise NotOfferedError(f"does not offer {what}")


def _keywords(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, if the function has a parameter for each: one that it swallowed would be ignored."""
    known = inspect.signature(function).parameters
    _needs(not (unknown := [name for name in given if name not in known]), ", ".join(unknown))
    return dict(given)


def _packed(case: Case) -> bool:
    """Whether there are several sequences in one row: a single one needs no boundaries."""
    return bool(case.lengths) and len(case.lengths or ()) > 1


def _flat(case: Case, x: torch.Tensor) -> torch.Tensor:
    """All rows one after the other, without the batch dimension."""
    return x.reshape(-1, *x.shape[2:]).contiguous()


def _pair(case: Case) -> Callable[[Any], tuple[torch.Tensor, torch.Tensor]]:
    """Output and state `[N, HV, K, V]` of functions that return both."""
    v_first = bool(case.options.get("state_v_first"))
    return lambda r: (r[0], r[1].mT if v_first else r[1])


# FLA ------------------------------------------------------------------------------------------------------------------

_FLA = {
    "head": ("fla.ops.gated_delta_rule", "gated_delta_rule"),
    "channel": ("fla.ops.kda", "kda"),
    "none": ("fla.ops.delta_rule", "delta_rule"),
}


def _fla(case: Case, given: Tensors) -> Call:
    op = OPS[case.op]
    module, name = _FLA[op.gate] if op.delta else ("fla.ops.gla", "gla")
    step = case.dims.tokens == 1
    function = getattr(import_module(module), f"{'fused_recurrent' if step else 'chunk'}_{name}")
    arguments = {name: x for name, x in given.items() if _packed(case) or not name.startswith("cu_seqlens")}
    if op.head_major:
        arguments = {name: x.transpose(1, 2).contiguous() for name, x in arguments.items()}
    if step:
        arguments.pop("cu_seqlens_cpu", None)  # nothing to plan for single tokens
        if not op.delta:
            arguments["gk"] = arguments.pop("g")
    keywords: dict[str, Any] = {**arguments, **case.options, "output_final_state": True}
    if op.saves and op.delta:
        keywords["scale"] = 1.0
    return Call(lambda: function(**keywords), _pair(case))


# FlashQLA -------------------------------------------------------------------------------------------------------------


def _flashqla(case: Case, given: Tensors) -> Call:
    _needs(OPS[case.op].gate == "head", "this op")
    function = import_module("flash_qla").chunk_gated_delta_rule
    arguments = {name: x for name, x in given.items() if _packed(case) or not name.startswith("cu_seqlens")}
    arguments.pop("cu_seqlens_cpu", None)  # a hint for planning; the result is the same
    keywords = _keywords(function, {**arguments, **case.options, "output_final_state": True})
    return Call(lambda: function(**keywords), _pair(case))


# FlashInfer -----------------------------------------------------------------------------------------------------------


def _flashinfer(case: Case, given: Tensors) -> Call:
    _needs(OPS[case.op].gate == "head", "this op")
    _needs(not case.options.get("allow_neg_eigval"), "allow_neg_eigval")
    return _flashinfer_decode(case, given) if case.dims.tokens == 1 else _flashinfer_prefill(case, given)


def _v_first_state(case: Case, given: Tensors) -> torch.Tensor | None:
    """The initial state as `[N, HV, V, K]`."""
    state = given.get("initial_state")
    if state is None or case.options.get("state_v_first"):
        return state
    return state.mT.contiguous()


def _flashinfer_prefill(case: Case, given: Tensors) -> Call:
    function = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    # Its Hopper kernels take the first option and do not look at it.
    for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"):
        _needs(not case.options.get(name), f"{name} in prefill")
    d, lengths = case.dims, case.sequence_lengths()
    device = given["q"].device
    keywords: dict[str, Any] = {name: _flat(case, given[name]) for name in ("q", "k", "v", "beta")}
    keywords |= {
        "g": _flat(case, given["g"].exp()),  # linear, not a logarithm
        "scale": case.options.get("scale"),
        "initial_state": _v_first_state(case, given),
        "output_final_state": True,
        "cu_seqlens": boundaries(case).to(device),
        "output": torch.empty_like(_flat(case, given["v"])),
        "output_state": torch.empty(d.sequences, d.value_heads, d.dv, d.dk, device=device),
    }
    if "max_seqlen" in inspect.signature(function).parameters:
        keywords["max_seqlen"] = max(lengths)
    shape = given["v"].shape
    return Call(lambda: function(**keywords), lambda r: (r[0].reshape(shape), r[1].mT))


def _flashinfer_decode(case: Case, given: Tensors) -> Call:
    function = import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    d, options, state = case.dims, case.options, _v_first_state(case, given)
    _needs(not _packed(case), "packed sequences of one token")
    _needs(state is not None, "one token without a state")
    assert state is not None
    state = state.clone()  # it is updated in place
    q, k, v = (given[name] for name in ("q", "k", "v"))
    # It takes raw gates: with rate 1 and no bias, g = -softplus(a); and b is the logit of beta.
    rate = bias = torch.zeros(d.value_heads, device=state.device)
    a, b = given["g"], given["beta"]
    if options.get("use_gate_in_kernel"):
        rate, bias = given["A_log"].float(), given["dt_bias"].float()
    else:
        a = _inverse_softplus(-a)
    if not options.get("use_beta_sigmoid_in_kernel"):
        b = b.logit()
    a, b = a.to(q.dtype), b.to(q.dtype)
    out, scale, l2norm = torch.empty_like(v), options.get("scale"), bool(options.get("use_qk_l2norm_in_kernel"))

    def run() -> Any:
        return function(q, k, v, state, rate, a, bias, b, scale, out, l2norm)

    return Call(run, lambda r: (r[0], r[1].mT))


def _inverse_softplus(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x + torch.log(-torch.expm1(-x))


# FlashKDA -------------------------------------------------------------------------------------------------------------


def _flashkda(case: Case, given: Tensors) -> Call:
    op, d, options = OPS[case.op], case.dims, case.options
    _needs(op.gate == "channel" and op.delta and not op.saves, "this op")
    _needs(case.dtype == "bfloat16", case.dtype)
    function = import_module("flash_kda").fwd
    q, k, v = (given[name] for name in ("q", "k", "v"))
    # It always normalizes q and k (ours have norm 1 where the case does not ask for that), takes the logit of beta, and
    # raw gates with a lower bound.
    beta = given["beta"] if options.get("use_beta_sigmoid_in_kernel") else given["beta"].logit()
    _needs(not options.get("allow_neg_eigval"), "allow_neg_eigval")
    if options.get("use_gate_in_kernel"):
        _needs(options.get("lower_bound") is not None, "raw gates without a lower bound")
        g, rate, bias, bound = given["g"], given["A_log"], given["dt_bias"], options["lower_bound"]
    else:
        _needs(bool((given["g"] > _KDA_BOUND).all()), f"gates below {_KDA_BOUND}")
        g, bound = (given["g"].float() / _KDA_BOUND).logit(), _KDA_BOUND
        rate = torch.zeros(d.value_heads, device=q.device)
        bias = torch.zeros(d.value_heads, d.dk, device=q.device)
    out = torch.empty_like(v)
    final = torch.empty(d.sequences, d.value_heads, d.dv, d.dk, device=q.device)
    arguments = (q, k, v, g.bfloat16(), beta.bfloat16(), options.get("scale") or d.dk**-0.5, out, rate.float())
    more = (bias.float().reshape(d.value_heads, d.dk), bound)
    state = _v_first_state(case, given)
    cu = given.get("cu_seqlens") if _packed(case) else None

    def run() -> None:
        function(*arguments, *more, initial_state=state, final_state=final, cu_seqlens=cu)

    return Call(run, lambda r: (out, final.mT))


# torch ----------------------------------------------------------------------------------------------------------------


def _compiled() -> Callable[..., Any]:
    # Anew for each case: beyond a few shapes of one function, torch would quietly stop compiling.
    torch.compiler.reset()
    return torch.compile(chunked.chunk_step, dynamic=False, fullgraph=True)


def _torch(case: Case, given: Tensors, compiled: bool = False) -> Call:
    chunks = -(-max(case.sequence_lengths()) // CHUNK)
    _needs(chunks <= _TORCH_CHUNKS, f"{chunks} chunks one after the other (a profile holds {_TORCH_CHUNKS})")

    step = _compiled() if compiled else chunked.chunk_step

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        o, state = chunked.forward(case, given, torch.float32, step)
        return o.to(given["v"].dtype), state

    return Call(run, lambda r: r)


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, ("qla",), inputs.call),
        # It hands calls over to FlashQLA or FlashKDA where it finds them.
        Peer("fla", ("fla.ops",), _fla, {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0"}),
        Peer("flashinfer", ("flashinfer.gdn_prefill",), _flashinfer),
        Peer("flashqla", ("flash_qla",), _flashqla),
        Peer("flashkda", ("flash_kda",), _flashkda),
        Peer("torch", ("torch",), _torch),
        Peer("torch.compile", ("torch",), lambda case, given: _torch(case, given, True)),
    )
}
"""By name; ours first."""
