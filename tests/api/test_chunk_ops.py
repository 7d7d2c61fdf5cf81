"""The published chunk ops: every output against float64 formulas."""

from __future__ import annotations

import inputs
import pytest
import reference
import torch

import qla

CHUNK = 64
# Factors are products inside one chunk; their errors stay below those of an output.
BARS = reference.BARS


def report(found: dict[str, float], bar: float) -> None:
    text = ", ".join(f"{x} {e:.2e}" for x, e in found.items()) + f" (bar {bar})"
    print(text)
    assert max(found.values()) <= bar, text


def delta_factors(k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return T = (I + strictLower(diag(b) K K^T))^-1 and T diag(b) K, T diag(b) V per chunk, head-major float64."""
    k, v, beta = k.double(), v.double(), beta.double()
    A = k.new_zeros(*k.shape[:3], CHUNK)
    w, u = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, k.shape[2], CHUNK):
        rows = slice(start, min(start + CHUNK, k.shape[2]))
        K, V, b = k[:, :, rows], v[:, :, rows], beta[:, :, rows, None]
        C = K.shape[2]
        inverse = torch.linalg.inv(torch.eye(C, dtype=K.dtype, device=K.device) + (b * (K @ K.mT)).tril(-1))
        A[:, :, rows, :C] = inverse
        w[:, :, rows], u[:, :, rows] = inverse @ (b * K), inverse @ (b * V)
    return A, w, u


@pytest.mark.parametrize(("L", "K", "V"), [(64, 64, 64), (256, 128, 128), (320, 64, 128), (100, 128, 64), (1, 64, 64)])
@pytest.mark.parametrize("keys", ["unit", "raw"])
def test_delta_net_chunk_forward(L: int, K: int, V: int, keys: str, device: str, dtype: torch.dtype) -> None:
    options = {"B": 2, "H": 3, "K": K, "V": V, "dtype": dtype, "device": device, "beta_dtype": dtype, "keys": keys}
    token_major = inputs.make("chunk_delta_rule", T=L, **options)
    del token_major["output_final_state"]
    a = {x: y.transpose(1, 2).contiguous() for x, y in token_major.items()}
    before = inputs.copy(a)
    o, S, Aw, Au, w, u = qla.DeltaNetChunkFwd()(**a)
    assert all(inputs.same_bits(a[x], before[x]) for x in a)
    chunks = -(-L // CHUNK)
    assert {x.dtype for x in (o, Aw, Au, w, u)} == {dtype}
    assert S.dtype == torch.float32
    assert S.shape == (2, 3, chunks + 1, K, V)
    assert Aw.shape == Au.shape == (2, 3, L, CHUNK)
    A_ref, w_ref, u_ref = delta_factors(a["k"], a["v"], a["beta"])
    o_ref, _ = reference.forward("chunk_delta_rule", **token_major, scale=1.0)
    S_ref = reference.chunk_states("chunk_delta_rule", **token_major).transpose(1, 2)
    assert not S[:, :, 0].any()
    pairs = {"o": (o, o_ref.transpose(1, 2)), "S": (S, S_ref), "Aw": (Aw, A_ref), "Au": (Au, A_ref)}
    pairs |= {"w": (w, w_ref), "u": (u, u_ref)}
    bars = BARS if keys == "unit" else reference.BARS_UNGATED
    report({x: reference.relative_error(*pair) for x, pair in pairs.items()}, bars[dtype])


def test_delta_net_chunk_forward_reads_views(device: str, dtype: torch.dtype) -> None:
    """Head-major views of token-major memory, and token-major memory itself, give the same bits."""
    token_major = inputs.make("chunk_delta_rule", T=192, B=2, H=3, dtype=dtype, device=device)
    del token_major["output_final_state"]
    views = {x: y.transpose(1, 2) for x, y in token_major.items()}
    for x, y in zip(
        qla.DeltaNetChunkFwd()(**views),
        qla.DeltaNetChunkFwd()(**{n: t.contiguous() for n, t in views.items()}),
        strict=True,
    ):
        assert inputs.same_bits(x, y)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("T", "K", "V"), [(64, 64, 64), (320, 128, 128), (256, 64, 128), (100, 128, 64)])
def test_gla_chunk_forward(T: int, K: int, V: int, state: bool, device: str, dtype: torch.dtype) -> None:
    options = {"B": 2, "H": 3, "K": K, "V": V, "dtype": dtype, "device": device, "gate_dtype": dtype}
    a = inputs.make("chunk_gla", T=T, state=state, **options)
    del a["output_final_state"]
    op = qla.GLAChunkFwd(scale=0.125)
    o, final_state = op(**a)
    assert op.h is not None
    assert (op.h.dtype, final_state.dtype, o.dtype) == (torch.float32, torch.float32, dtype)
    o_ref, final_ref = reference.forward("chunk_gla", **a, scale=0.125)
    h_ref = reference.chunk_states("chunk_gla", **a)
    pairs = {"o": (o, o_ref), "final_state": (final_state, final_ref), "h": (op.h, h_ref)}
    report({x: reference.relative_error(*pair) for x, pair in pairs.items()}, BARS[dtype])
    if state:
        assert torch.equal(op.h[:, 0], a["initial_state"])


@pytest.mark.parametrize("scale", [None, -1.0])
def test_gla_chunk_default_scale(scale: float | None, device: str) -> None:
    a = inputs.make("chunk_gla", T=64, K=64, device=device)
    del a["output_final_state"]
    o, _ = qla.GLAChunkFwd(scale=scale)(**a)
    assert reference.relative_error(o, reference.forward("chunk_gla", **a, scale=64**-0.5)[0]) < BARS[torch.bfloat16]
