"""The chunk-wise form written plainly in torch, a step per chunk.

It is the peer ``torch`` (in float32), what ``torch.compile`` is measured on, and in float64 the carrier of states over
long sequences, whose chunks are then checked token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from qla.bench.reference import Operands, operands, unpack
from qla.bench.workloads import CHUNK, Case

__all__ = ["chunk_step", "forward"]

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def chunk_step(
    S: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    b: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of C tokens of all sequences and heads.

    Parameters
    ----------
    S : Tensor [N, HV, K, V]
        State before the chunk.
    q, k, v : Tensor [N, HV, C, K or V]
        q is scaled.
    g : Tensor [N, HV, C, 1 or K] or None
        Log-decay of each token.
    b : Tensor [N, HV, C, 1] or None
        Step of the delta rule; None without it.

    Returns
    -------
    o : Tensor [N, HV, C, V]
    S : Tensor [N, HV, K, V]
        State after the chunk.
    """
    early_q, early_k, late_k = q, k, k
    if g is None:
        scores, gram = q @ k.mT, k @ k.mT
        kept = S
    else:
        G = g.cumsum(-2)
        # The upper triangle goes before e^x, which overflows there.
        above = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        between = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(above[..., None], -torch.inf).exp()
        if g.shape[-1] == 1:
            scores, gram = (q @ k.mT) * between[..., 0], (k @ k.mT) * between[..., 0]
        else:
            scores = torch.einsum("nhid,nhjd,nhijd->nhij", q, k, between)
            gram = torch.einsum("nhid,nhjd,nhijd->nhij", k, k, between)
        early_q, early_k = q * G.exp(), k * G.exp()
        last = G[..., -1:, :]
        late_k, kept = k * (last - G).exp(), last.mT.exp() * S
    values = v
    if b is not None:
        # With unitriangular, the ones on the diagonal are not read.
        values = torch.linalg.solve_triangular(
            b * gram.tril(-1), b * (v - early_k @ S), upper=False, unitriangular=True
        )
    return early_q @ S + scores.tril() @ values, kept + late_k.mT @ values


def forward(
    case: Case, given: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32, step: Step = chunk_step
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a case chunk by chunk; returns what `reference.recurrence` returns, in `dtype`."""
    x = operands(case, given, dtype)
    S = x.state
    outputs = []
    for chunk in chunks(x):
        o, S = step(S, *chunk)
        outputs.append(o)
    return unpack(case, torch.cat(outputs, 2).transpose(1, 2)), S


def chunks(x: Operands) -> Iterator[Chunk]:
    """Arguments of `chunk_step` after the state, for each chunk."""
    for at in range(0, x.q.shape[1], CHUNK):

        def rows(part: torch.Tensor, at: int = at) -> torch.Tensor:
            return part[:, at : at + CHUNK].transpose(1, 2)

        decay, step = (None if part is None else rows(part) for part in (x.decay, x.step))
        yield rows(x.q), rows(x.k), rows(x.v), decay, step
