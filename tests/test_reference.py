"""The reference against two independent writings of the same math: a scalar loop, and the chunk formulas."""

from __future__ import annotations

import math
from typing import Any

import inputs
import numpy as np
import pytest
import reference
import torch

EXACT = 1e-12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "state": {"state": True},
    "state_v_first": {"state": True, "v_first": True},
    "l2norm": {"use_qk_l2norm_in_kernel": True, "keys": "raw"},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "negative": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "raw_gate": {"use_gate_in_kernel": True},
    "lower_bound": {"use_gate_in_kernel": True, "lower_bound": -5.0},
    "grouped": {"H": 2, "HV": 6},
    "lengths": {"B": 1, "T": 29, "lengths": [3, 0, 20, 1], "state": True},
}
ALLOWED = {
    "chunk_gated_delta_rule": set(OPTIONS) - {"lower_bound"},
    "chunk_delta_rule": {"plain", "scale", "state", "state_v_first", "l2norm", "grouped", "lengths"},
    "chunk_kda": set(OPTIONS),
    "chunk_gla": {"plain", "scale", "state", "state_v_first", "grouped", "lengths"},
}
CASES = [(name, option) for name in reference.FUNCTIONS for option in OPTIONS if option in ALLOWED[name]]


def case(name: str, option: str) -> dict[str, Any]:
    """Small inputs in float32 (their values are what counts), with head dims that differ."""
    return inputs.make(name, **{"B": 2, "T": 37, "K": 8, "V": 12, "dtype": torch.float32, "seed": 5, **OPTIONS[option]})


def scalar_loop(name: str, **a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the recurrence out per batch row, head and token, sharing no code with the reference."""
    x = {n: t.numpy().astype(np.float64) for n, t in a.items() if isinstance(t, torch.Tensor) and n != "cu_seqlens"}
    q, k, v = x["q"], x["k"], x["v"]
    (B, T, H, K), HV, V = q.shape, v.shape[2], v.shape[3]
    bounds = [0, T] if "cu_seqlens" not in a else a["cu_seqlens"].tolist()
    N = len(bounds) - 1
    o, finals = np.zeros((B, T, HV, V)), []
    for row in range(max(B, N)):
        b, start, end = (row, 0, T) if N == 1 else (0, bounds[row], bounds[row + 1])
        for head in range(HV):
            S = np.zeros((K, V))
            if "initial_state" in x:
                S = x["initial_state"][row, head].copy()
                S = S.T if a.get("state_v_first") else S
            for t in range(start, end):
                key, query = k[b, t, head // (HV // H)], q[b, t, head // (HV // H)]
                if a.get("use_qk_l2norm_in_kernel"):
                    key, query = (y / math.sqrt(sum(y**2) + 1e-6) for y in (key, query))
                if "g" in x:
                    S = np.exp(scalar_gate(x, a, b, t, head)).reshape(-1, 1) * S
                value = v[b, t, head]
                if "beta" in x:
                    step = x["beta"][b, t, head]
                    if a.get("use_beta_sigmoid_in_kernel"):
                        step = (2.0 if a.get("allow_neg_eigval") else 1.0) / (1.0 + math.exp(-step))
                    value = step * (value - key @ S)
                S = S + np.outer(key, value)
                o[b, t, head] = query @ S * (a["scale"] if a.get("scale") else 1 / math.sqrt(K))
            finals.append(S.T if a.get("state_v_first") else S)
    return torch.from_numpy(o), torch.from_numpy(np.stack(finals).reshape(-1, HV, *finals[0].shape))


def scalar_gate(x: dict[str, Any], a: dict[str, Any], b: int, t: int, head: int) -> Any:
    g = x["g"][b, t, head]
    if not a.get("use_gate_in_kernel"):
        return g
    g = g + x["dt_bias"].reshape(x["g"].shape[2:])[head]
    rate = math.exp(x["A_log"][head])
    if a.get("lower_bound"):
        return a["lower_bound"] / (1.0 + np.exp(-rate * g))
    return -rate * np.log1p(np.exp(g))


def chunked(name: str, C: int, **a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the chunk formulas with chunks of C tokens: intra-chunk Gram products, a triangular inverse, one state."""
    q, k, v, decay, beta = (x.transpose(1, 2) for x in reference.prepare(name, **a))  # q is scaled already
    decay = decay.expand_as(k)
    state = a.get("initial_state")
    S = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.double()
    S = S.mT if state is not None and a.get("state_v_first") else S
    o = []
    for start in range(0, q.shape[2], C):
        Q, K, V, g, b = (x[:, :, start : start + C] for x in (q, k, v, decay, beta))
        G = g.cumsum(2)
        gap = (G[:, :, :, None] - G[:, :, None]).clamp(max=0.0).exp()
        gram = torch.einsum("...id,...jd,...ijd->...ij", K, K, gap)
        P = torch.einsum("...id,...jd,...ijd->...ij", Q, K, gap).tril()
        new = V
        if reference.DELTA[name]:
            L = (b[..., None] * gram).tril(-1)
            A = torch.linalg.inv(torch.eye(L.shape[-1], dtype=L.dtype) + L) * b[..., None, :]
            new = A @ (V - (G.exp() * K) @ S)
        o.append((G.exp() * Q) @ S + P @ new)
        S = G[:, :, -1, :, None].exp() * S + ((G[:, :, -1:] - G).exp() * K).mT @ new
    return torch.cat(o, 2).transpose(1, 2), S.mT if a.get("state_v_first") else S


def assert_close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for label, x, ref in zip(("o", "final_state"), got, want, strict=True):
        error = reference.relative_error(x, ref)
        print(f"{label}: {error:.2e}")
        assert error < EXACT, label


@pytest.mark.parametrize(("name", "option"), CASES)
def test_reference_equals_scalar_loop(name: str, option: str) -> None:
    a = case(name, option)
    assert_close(reference.forward(name, **a), scalar_loop(name, **a))


@pytest.mark.parametrize("C", [1, 16, 64])
@pytest.mark.parametrize(("name", "option"), [c for c in CASES if c[1] != "lengths"])
def test_reference_equals_chunk_formulas(name: str, option: str, C: int) -> None:
    a = case(name, option)
    assert_close(chunked(name, C, **a), reference.forward(name, **a))


@pytest.mark.parametrize("name", reference.FUNCTIONS)
def test_options_matter(name: str) -> None:
    """Each option changes the result, so that agreeing on a case says something about it."""
    plain = case(name, "plain")
    o, state = reference.forward(name, **plain)
    assert o.norm() > 1
    assert state.norm() > 1
    longer = plain | {"k": plain["k"] * 1.1}
    for base, change in ((plain, {"scale": 0.7}), (longer, {"use_qk_l2norm_in_kernel": True})):
        o_base = reference.forward(name, **base)[0]
        assert reference.relative_error(reference.forward(name, **base | change)[0], o_base) > 0.01, change
    for x in ("q", "k", "v", "g", "beta"):
        if x in plain:
            changed = plain | {x: plain[x] * 0.5}
            assert reference.relative_error(reference.forward(name, **changed)[0], o) > 0.01, x


def test_relative_error_never_passes_what_is_not_finite() -> None:
    ref = torch.tensor([3.0, 4.0])
    assert reference.relative_error(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert reference.relative_error(torch.tensor([math.nan, 4.0]), ref) == math.inf
    assert reference.relative_error(torch.tensor([3.0, math.inf]), ref) == math.inf
    assert reference.relative_error(ref, torch.tensor([math.nan, 4.0])) == math.inf
    assert reference.relative_error(ref, torch.zeros(2)) == math.inf
    assert reference.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert reference.relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("name", [n for n in reference.FUNCTIONS if reference.DELTA[n]])
def test_raw_keys_stay_where_the_recurrence_converges(name: str) -> None:
    a = inputs.make(name, T=64, keys="raw", H=2, HV=4, beta_dtype=torch.bfloat16)
    length = a["k"].double().square().sum(-1).repeat_interleave(2, dim=2) * a["beta"].double()
    assert 0.1 < length.max() <= 2
