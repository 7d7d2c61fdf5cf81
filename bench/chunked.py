"""The chunk-wise form written plainly in torch, a step per chunk.

It is the peer ``torch`` (in float32), what ``torch.compile`` is measured on, and in float64 the carrier of states over
long sequences, whose chunks are then checked token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from qla.bench.reference import Operands, operands, unpack
from qla.bench.workloads import CHUNK, Case

__all__ = ["chunk_step", "forward", "states"]

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
    early_q, early_k, late_k, kept, scores, gram = _inside(q, k, g)
    values = v
    if b is not None:
        # With unitriangular, the ones on the diagonal are not read.
        values = torch.linalg.solve_triangular(
            b * gram.tril(-1), b * (v - early_k @ S), upper=False, unitriangular=True
        )
    return early_q @ S + scores.tril() @ values, (S if kept is None else kept * S) + late_k.mT @ values


def _inside(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor | None) -> tuple[Any, ...]:
    """What of a chunk no state enters: q and k decayed from its start, k to its end, the decay of the state, products.

    Returns
    -------
    early_q, early_k, late_k : Tensor [N, HV, C, K]
    kept : Tensor [N, HV, 1 or K, 1] or None
        None without a decay.
    scores, gram : Tensor [N, HV, C, C]
        Of q and k, and of k and k, decayed from one token to the other; right where j <= i.
    """
    if g is None:
        return q, k, k, None, q @ k.mT, k @ k.mT
    G = g.cumsum(-2)
    # The upper triangle goes before e^x, which overflows there.
    above = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    between = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(above[..., None], -torch.inf).exp()
    if g.shape[-1] == 1:
        scores, gram = (q @ k.mT) * between[..., 0], (k @ k.mT) * between[..., 0]
    else:
        scores = torch.einsum("nhid,nhjd,nhijd->nhij", q, k, between)
        gram = torch.einsum("nhid,nhjd,nhijd->nhij", k, k, between)
    last = G[..., -1:, :]
    return q * G.exp(), k * G.exp(), k * (last - G).exp(), last.mT.exp(), scores, gram


def transitions(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What chunks do to the state, all at once: ``S -> M S + N``; arguments as of `chunk_step`, N of them chunks.

    Returns
    -------
    M : Tensor [N, HV, K, K]
    N : Tensor [N, HV, K, V]
    """
    _, early, late, kept, _, gram = _inside(k, k, g)
    M = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    M = M if kept is None else kept * M
    if b is None:
        return M, late.mT @ v
    both = torch.cat([b * v, b * early], -1)
    solved = torch.linalg.solve_triangular(b * gram.tril(-1), both, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    return M - late.mT @ keys, late.mT @ values


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


def states(x: Operands, at_once: int = 64) -> Iterator[torch.Tensor]:
    """States `[1, HV, K, V]` before each chunk of the only sequence.

    Only a product of two small matrices waits for the chunk before it: what the chunks do is found out for `at_once` of
    them together.
    """
    S, length, rows = x.state, x.q.shape[1], at_once * CHUNK
    for at in range(0, length, rows):
        whole = min(rows, length - at) // CHUNK

        def split(part: torch.Tensor, at: int = at, whole: int = whole) -> torch.Tensor:
            return part[0, at : at + whole * CHUNK].view(whole, CHUNK, *part.shape[2:]).transpose(1, 2)

        decay, step = (None if part is None else split(part) for part in (x.decay, x.step))
        for M, N in zip(*transitions(split(x.k), split(x.v), decay, step), strict=True):
            yield S
            S = torch.baddbmm(N, M, S[0])[None]
    if length % CHUNK:  # after whole chunks, one that is left
        yield S
