"""From a case to tensors as a model produces them, and to a call of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize, pad

import qla
from qla.bench.workloads import OPS, Case

__all__ = ["Call", "MakeCall", "boundaries", "call", "tensors"]

Tensors = dict[str, torch.Tensor]


def boundaries(case: Case) -> torch.Tensor:
    """`cu_seqlens` of a case, on the CPU."""
    return pad(torch.tensor(case.sequence_lengths(), dtype=torch.int64).cumsum(0), (1, 0))


def tensors(case: Case, device: str, seed: int = 0) -> Tensors:
    """Draw the inputs of a case.

    Keys and queries have norm 1, unless the op normalizes them itself: then they are standard normal. Gates are
    ``logsigmoid(x + 2)`` and beta ``sigmoid(x)`` of standard normal x; raw ones are x itself. `A_log` is the logarithm
    of rates between 1 and 16, and `dt_bias` inverts softplus for steps between 0.001 and 0.1, as models start out.

    Parameters
    ----------
    case : of an op that can be run.
    device : where the tensors are drawn and stay.
    seed : of the generator; the same one gives the same tensors on the same kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    options = case.options

    def uniform(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == "A_log":
            return uniform(shape, 1.0, 16.0).log()
        if name == "dt_bias":
            step = uniform(shape, math.log(1e-3), math.log(0.1)).exp()
            return step + (-torch.expm1(-step)).log()
        x = torch.randn(shape, generator=generator, device=device)
        if name in ("q", "k") and not options.get("use_qk_l2norm_in_kernel"):
            return normalize(x, dim=-1)
        if name == "g" and not options.get("use_gate_in_kernel"):
            return logsigmoid(x.add_(2.0))
        if name == "beta" and not options.get("use_beta_sigmoid_in_kernel"):
            return x.sigmoid_()
        return x

    given: Tensors = {}
    for name, shape in case.shapes.items():
        if not name.startswith("cu_seqlens"):
            given[name] = draw(name, shape).to(getattr(torch, case.dtype_of(name)))
    if case.lengths:
        given["cu_seqlens"] = boundaries(case).to(device)
        if case.host_lengths:
            given["cu_seqlens_cpu"] = boundaries(case)
    return given


@dataclass(frozen=True)
class Call:
    """A call with its arguments in place.

    Parameters
    ----------
    run : makes the call.
    outputs : picks output `[B, T, HV, V]` and final state `[N, HV, K, V]` from what `run` returned.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


MakeCall = Callable[[Case, Mapping[str, torch.Tensor]], Call]


def call(case: Case, given: Mapping[str, torch.Tensor]) -> Call:
    """Return our call for a case; the final state is always asked for."""
    op = OPS[case.op]
    function = getattr(qla, op.name)
    if op.saves and op.delta:
        chunk_op = function()
        arguments = [given[name] for name in ("q", "k", "v", "beta")]
        # Output and chunk states come head-major; the last state is the one after the last token.
        return Call(lambda: chunk_op(*arguments), lambda r: (r[0].transpose(1, 2), r[1][:, :, -1]))
    if op.saves:
        chunk_op = function(scale=case.options.get("scale"))
        arguments = [given[name] for name in ("q", "k", "v", "g")]
        state = given.get("initial_state")
        return Call(lambda: chunk_op(*arguments, initial_state=state), lambda r: (r[0], r[1]))
    keywords: dict[str, Any] = {**given, **case.options, "output_final_state": True}
    v_first = bool(case.options.get("state_v_first"))
    return Call(lambda: function(**keywords), lambda r: (r[0], r[1].mT if v_first else r[1]))
