"""The chunk-wise forward ops with what a backward pass needs, under the names and layouts of TileOPs' benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from qla import validate
from qla.errors import UnsupportedError
from qla.ops import forward


def _check_heads(letters: str, q: Any, k: Any, v: Any, extra: tuple[str, Any, str, int]) -> None:
    """Check shapes in the caller's own layout, so that an error names the dimensions as the caller wrote them."""
    name, x, x_letters, dims = extra
    for label, tensor, ndim in (("q", q, 4), ("k", k, 4), ("v", v, 4), (name, x, dims)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != ndim:
            got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise UnsupportedError(label, got, f"a tensor {letters if ndim == 4 else x_letters}")
    if k.shape != q.shape:
        raise UnsupportedError("k", list(k.shape), f"the shape of q, {letters} = {list(q.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise UnsupportedError("v", list(v.shape), f"the first three dims of q, {letters} = {list(q.shape)}")
    if x.shape != q.shape[:dims]:
        raise UnsupportedError(name, list(x.shape), f"shape {x_letters} = {list(q.shape[:dims])}")


class DeltaNetChunkFwd:
    """DeltaNet forward that also returns its chunk states and WY factors (head-major, unscaled).

    Per chunk of 64 tokens, with ``T = (I + strictLower(diag(beta) K K^T))^-1``: ``w = T diag(beta) K``,
    ``u = T diag(beta) V``, ``o = Q S + lower(Q K^T) (u - w S)`` and ``S' = S + K^T (u - w S)`` (Yang et al., DeltaNet,
    arXiv 2406.06484). q is not scaled: scale it before, where that is wanted.

    Parameters
    ----------
    chunk_size : int
        Only 64.

    Examples
    --------
    >>> op = qla.DeltaNetChunkFwd()
    >>> o, S, Aw, Au, w, u = op(q, k, v, beta)
    """

    def __init__(self, chunk_size: int = 64) -> None:
        validate.chunk_size({"chunk_size": chunk_size}, (64,))
        self.chunk_size = chunk_size

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the op.

        Parameters
        ----------
        q, k : Tensor [B, H, L, K]
            K 64 or 128, bfloat16 or float16 (float32 on the CPU only); any strides.
        v : Tensor [B, H, L, V]
            V 64 or 128, dtype of q.
        beta : Tensor [B, H, L]
            bfloat16, float16 or float32.

        Returns
        -------
        o : Tensor [B, H, L, V]
            Dtype of v, as are Aw, Au, w and u. All are views of token-major memory.
        S : Tensor [B, H, ceil(L / 64) + 1, K, V]
            float32; the state at each chunk's start, and after the last token.
        Aw, Au : Tensor [B, H, L, 64]
            Rows of ``T``; without a gate the two are the same tensor. Columns past a last, partial chunk are zero.
        w : Tensor [B, H, L, K]
        u : Tensor [B, H, L, V]

        Raises
        ------
        UnsupportedError
            An argument that is not supported; raised before anything is launched.
        """
        _check_heads("[B, H, L, D]", q, k, v, ("beta", beta, "[B, H, L]", 3))
        transposed = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, beta.transpose(1, 2))
        r = forward("delta_rule", True, *transposed, None, None, 1.0)
        saved = (r.states, r.A, r.w, r.u)
        S, A, w, u = (x.transpose(1, 2) for x in saved if x is not None)
        return r.o.transpose(1, 2), S, A, A, w, u

    forward = __call__


class GLAChunkFwd:
    """GLA forward that also keeps its chunk states (token-major).

    The recurrence is that of `chunk_gla` (Yang et al., GLA, arXiv 2312.06635).

    Parameters
    ----------
    chunk_size : int
        Only 64.
    scale : float, optional
        Factor on q; None or a number that is not positive means ``K ** -0.5``.

    Attributes
    ----------
    h : Tensor [B, ceil(T / 64) + 1, H, K, V] or None
        float32, of the latest call: the state at each chunk's start, and after the last token. Kept until the next
        call; set it to None to free the memory.

    Examples
    --------
    >>> op = qla.GLAChunkFwd(scale=0.125)
    >>> o, final_state = op(q, k, v, g)
    >>> op.h.shape
    """

    def __init__(self, chunk_size: int = 64, scale: float | None = None) -> None:
        validate.chunk_size({"chunk_size": chunk_size}, (64,))
        self.chunk_size = chunk_size
        self.scale = scale
        self.h: torch.Tensor | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        initial_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the op.

        Parameters
        ----------
        q, k : Tensor [B, T, H, K]
            K 64 or 128, bfloat16 or float16 (float32 on the CPU only); any strides.
        v : Tensor [B, T, H, V]
            V 64 or 128, dtype of q.
        g : Tensor [B, T, H, K]
            Log of the decay of each key channel (natural logarithm); bfloat16, float16 or float32.
        initial_state : Tensor [B, H, K, V], optional
            float32; default zeros.

        Returns
        -------
        o : Tensor [B, T, H, V]
            Dtype of v.
        final_state : Tensor [B, H, K, V]
            float32.

        Raises
        ------
        UnsupportedError
            An argument that is not supported; raised before anything is launched.
        """
        _check_heads("[B, T, H, D]", q, k, v, ("g", g, "[B, T, H, K]", 4))
        scale = self.scale
        if isinstance(scale, (int, float)) and scale <= 0:
            scale = None
        r = forward("gla", True, q, k, v, g, None, None, None, scale, initial_state, True)
        assert r.final_state is not None  # asked for above
        self.h = r.states
        return r.o, r.final_state

    forward = __call__
