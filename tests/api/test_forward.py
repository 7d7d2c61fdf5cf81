"""Numerics of the four ops against the float64 recurrence, on every target that is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inputs
import pytest
import reference
import torch

import qla

ALL = reference.FUNCTIONS
GDN, DELTA, KDA, GLA = ALL[:4]
STATES = (GDN, KDA, GLA)  # ops with state_v_first
RAW = (GDN, KDA)  # ops with raw gates and raw betas
HALVES = (torch.bfloat16, torch.float16)

Outputs = tuple[torch.Tensor, torch.Tensor | None]


def run(name: str, a: dict[str, Any]) -> Outputs:
    """Call the public function and check that it wrote none of its inputs."""
    before = inputs.copy(a)
    o, state = getattr(qla, name)(**a)
    assert o.dtype == a["v"].dtype
    assert o.shape == a["v"].shape
    for x, value in a.items():
        assert not isinstance(value, torch.Tensor) or inputs.same_bits(value, before[x]), f"{x} was written"
    return o, state


def errors(name: str, a: dict[str, Any], got: Outputs) -> dict[str, float]:
    """Relative errors of the output's real rows and of the state."""
    rows = inputs.unpadded(a)
    o_ref, state_ref = reference.forward(name, **a)
    found = {"o": reference.relative_error(got[0][:, :rows], o_ref[:, :rows])}
    if a["output_final_state"]:
        assert got[1] is not None
        assert got[1].dtype == torch.float32
        found["final_state"] = reference.relative_error(got[1], state_ref)
    else:
        assert got[1] is None
    return found


def check(name: str, a: dict[str, Any], ungated: bool = False, bar: float = 0.0) -> Outputs:
    """Run, compare with the reference and hold the errors to the bars (or to `bar`, where that is looser)."""
    got = run(name, a)
    found = errors(name, a, got)
    bar = max(bar, (reference.BARS_UNGATED if ungated else reference.BARS)[a["q"].dtype])
    text = f"{name} {a['q'].dtype}: " + ", ".join(f"{x} {e:.2e}" for x, e in found.items()) + f" (bar {bar})"
    print(text)
    assert max(found.values()) <= bar, text
    return got


def same(x: Outputs, y: Outputs, rows: slice = slice(None)) -> None:
    for label, left, right in (("o", x[0][:, rows], y[0][:, rows]), ("final_state", x[1], y[1])):
        assert inputs.same_bits(left, right), f"{label} differs: {describe(left, right)}"


def describe(x: torch.Tensor | None, y: torch.Tensor | None) -> str:
    if x is None or y is None or x.shape != y.shape:
        return "one is missing, or shapes differ"
    return f"{int((x != y).sum())} of {x.numel()} elements, relative error {reference.relative_error(x, y):.2e}"


def ungated(name: str, T: int) -> bool:
    """Whether the looser bars apply: no gate over thousands of tokens."""
    return name == DELTA and T > 1000


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 128, 1000, 4096])
@pytest.mark.parametrize("name", ALL)
def test_lengths(name: str, T: int, device: str, dtype: torch.dtype) -> None:
    B, H, HV = (2, 2, 4) if T < 1000 else (1, 1, 2)
    check(
        name, inputs.make(name, T=T, B=B, H=H, HV=HV, dtype=dtype, device=device, seed=T, state=True), ungated(name, T)
    )


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (4, 16), (16, 32), (3, 3)])
@pytest.mark.parametrize("name", ALL)
def test_value_head_groups(name: str, H: int, HV: int, device: str, dtype: torch.dtype) -> None:
    check(name, inputs.make(name, T=130, H=H, HV=HV, dtype=dtype, device=device, seed=HV, state=True))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("name", ALL)
def test_head_dims(name: str, K: int, V: int, v_first: bool, device: str, dtype: torch.dtype) -> None:
    if v_first and name not in STATES:
        v_first = False
    check(name, inputs.make(name, T=150, B=2, K=K, V=V, dtype=dtype, device=device, state=True, v_first=v_first))


@pytest.mark.parametrize("lengths", [[1, 63, 1000, 3032], [0, 64, 0, 0, 129, 0], [5], [0], [65, 65, 65]])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("host_copy", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_packed_sequences(
    name: str, lengths: list[int], index_dtype: torch.dtype, host_copy: bool, device: str, dtype: torch.dtype
) -> None:
    H, HV = (1, 1) if sum(lengths) > 1000 else (2, 4)
    T = sum(lengths) + 7  # padding that belongs to no sequence
    options: dict[str, Any] = {"lengths": lengths, "index_dtype": index_dtype, "state": True, "dtype": dtype}
    a = inputs.make(name, T=T, H=H, HV=HV, device=device, seed=3, **options)
    if host_copy:
        a["cu_seqlens_cpu"] = a["cu_seqlens"].cpu()
    check(name, a, ungated(name, max(lengths)))


@pytest.mark.parametrize("case", ["T", "B", "N", "N with tokens", "all lengths"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_nothing_to_do(name: str, case: str, state: bool, device: str) -> None:
    """Without tokens states pass through unchanged; without sequences there are none."""
    shape: dict[str, dict[str, Any]] = {
        "T": {"T": 0, "B": 2},
        "B": {"T": 70, "B": 0},
        "N": {"T": 0, "lengths": []},
        "N with tokens": {"T": 70, "lengths": []},
        "all lengths": {"T": 70, "lengths": [0, 0, 0]},
    }
    a = inputs.make(name, **shape[case], device=device, state=state)
    _, final = run(name, a)
    expected = a.get("initial_state")
    if expected is None:
        expected = torch.zeros_like(reference.forward(name, **a)[1], dtype=torch.float32)
    assert final is not None
    assert torch.equal(final, expected)
    a["output_final_state"] = False
    assert run(name, a)[1] is None


# States and options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_states(name: str, initial: bool, final: bool, v_first: bool, device: str, dtype: torch.dtype) -> None:
    v_first = v_first and name in STATES
    options = {"state": initial, "v_first": v_first, "output_final_state": final}
    check(name, inputs.make(name, T=100, B=2, H=2, HV=4, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("name", STATES)
def test_state_layouts_are_transposes_of_each_other(name: str, device: str) -> None:
    a = inputs.make(name, T=100, K=64, V=128, device=device, state=True)
    o, state = run(name, a)
    turned = a | {"initial_state": a["initial_state"].mT.contiguous(), "state_v_first": True}
    o_turned, state_turned = run(name, turned)
    assert state is not None
    assert state_turned is not None
    same((o, state), (o_turned, state_turned.mT))
    if name != GLA:
        del turned["state_v_first"]
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            same((o_turned, state_turned), run(name, turned | {"transpose_state_layout": True}))


RAW_GATE: dict[str, Any] = {"use_gate_in_kernel": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 1.3},
    "l2norm": {"use_qk_l2norm_in_kernel": True, "keys": "raw"},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "negative": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "gate": RAW_GATE,
    "bound": RAW_GATE | {"lower_bound": -5.0},
    "safe": RAW_GATE | {"lower_bound": -5.0, "safe_gate": True},
    "all": {
        "scale": 0.9,
        "use_qk_l2norm_in_kernel": True,
        "keys": "raw",
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "v_first": True,
        **RAW_GATE,
    },
}
ALLOWED = {
    GDN: ("scale", "l2norm", "sigmoid", "negative", "gate", "all"),
    DELTA: ("scale", "l2norm"),
    KDA: tuple(OPTIONS),
    GLA: ("scale",),
}


@pytest.mark.parametrize(("name", "option"), [(n, x) for n in ALL for x in ALLOWED[n]])
def test_options(name: str, option: str, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=200, H=2, HV=4, dtype=dtype, device=device, state=True, **OPTIONS[option])
    check(name, a)


@pytest.mark.parametrize(("name", "left_out"), [(GDN, "dt_bias"), (KDA, "dt_bias"), (KDA, "A_log")])
def test_gate_parameters_that_may_be_left_out(name: str, left_out: str, device: str, dtype: torch.dtype) -> None:
    bound = {"lower_bound": -5.0} if left_out == "A_log" else {}
    a = inputs.make(name, T=100, dtype=dtype, device=device, **RAW_GATE, **bound)
    del a[left_out]
    check(name, a)


@pytest.mark.parametrize("small", HALVES)
@pytest.mark.parametrize("name", [GDN, KDA])
def test_small_dtypes_of_gates_and_betas(name: str, small: torch.dtype, device: str, dtype: torch.dtype) -> None:
    options = {"gate_dtype": small, "beta_dtype": small, "T": 100, "dtype": dtype, "device": device}
    check(name, inputs.make(name, **options))
    a = inputs.make(name, **options, use_beta_sigmoid_in_kernel=True, **RAW_GATE)
    check(name, a | {x: a[x].to(small) for x in ("A_log", "dt_bias")})


def test_gate_parameters_in_other_shapes(device: str) -> None:
    a = inputs.make(KDA, T=100, H=1, HV=2, device=device, **RAW_GATE)
    shaped = a | {"A_log": a["A_log"].view(1, 1, 2, 1), "dt_bias": a["dt_bias"].view(2, 128)}
    same(run(KDA, a), run(KDA, shaped))


def test_raw_gates_far_out(device: str, dtype: torch.dtype) -> None:
    """Softplus is linear far right of zero and vanishes far left of it; neither may overflow."""
    for name in RAW:
        a = inputs.make(name, T=100, dtype=dtype, device=device, **RAW_GATE)
        a["g"] *= 40
        # Cumulative decays reach 1e5 here, so float32 gives their differences to 1e-3 at best.
        check(name, a, bar=5e-4)


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1000, 4096])
@pytest.mark.parametrize("gate", inputs.GATES)
@pytest.mark.parametrize("name", [GDN, KDA, GLA])
def test_gates(name: str, gate: str, T: int, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=T, H=1, HV=2, dtype=dtype, device=device, gate=gate, seed=2, state=True)
    # Sums of such gates reach 1e3 within a chunk, where the spacing of float32 is 6e-5.
    check(name, a, ungated=gate in ("none", "long"), bar=1e-4 if gate == "strong" and dtype == torch.float32 else 0.0)


@pytest.mark.parametrize("borders", [-1e4, -float("inf")], ids=["-1e4", "-inf"])
@pytest.mark.parametrize("name", [GDN, KDA, GLA])
def test_gates_that_clear_the_state_at_borders(name: str, borders: float, device: str, dtype: torch.dtype) -> None:
    """Weak gates beside ones so strong that a sum of both would lose the weak."""
    a = inputs.make(name, T=150, H=1, HV=2, dtype=dtype, device=device, gate="long", seed=9, state=True)
    a["g"][:, 20:60] = borders
    a["g"][:, 100] = borders
    check(name, a, ungated=True, bar=1e-3 if dtype == torch.float32 else 0.0)


@pytest.mark.parametrize("gate", ["ordinary", "none"])
@pytest.mark.parametrize("name", ALL)
def test_raw_keys(name: str, gate: str, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=1000, H=1, HV=2, dtype=dtype, device=device, keys="raw", gate=gate, seed=4, state=True)
    check(name, a, ungated=gate == "none" or name == DELTA)


@pytest.mark.parametrize("name", [GDN, DELTA, KDA])
def test_betas_up_to_two(name: str, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=1000, H=1, HV=2, dtype=dtype, device=device, seed=5)
    check(name, a | {"beta": a["beta"] * 1.99}, ungated=name == DELTA)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ALL)
def test_memory_over_64k_tokens(name: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=65536, H=2, HV=4, dtype=dtype, device="cuda", gate="long", state=True)
    check(name, a, ungated=True)


# Promises -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_repeated_runs_are_bitwise_equal(name: str, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=515, H=2, HV=8, dtype=dtype, device=device, state=True)
    first = run(name, a)
    for _ in range(4):
        same(first, run(name, a))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("x", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("name", ALL)
def test_nan_stays_in_its_sequence(name: str, x: str, value: float, device: str, dtype: torch.dtype) -> None:
    lengths = [70, 1, 61, 64, 33]  # boundaries inside chunks, so that tiles of one sequence hold rows of the next
    options = {"lengths": lengths, "dtype": dtype, "device": device, "state": True}
    a = inputs.make(name, T=sum(lengths), H=1, HV=2, **options)
    if x not in a:
        return
    clean = run(name, a)
    bounds = a["cu_seqlens"].tolist()
    for n in (0, 2, 4):
        bad = inputs.copy(a)
        start, end = bounds[n], bounds[n + 1]
        (bad[x][n] if x == "initial_state" else bad[x][:, start:end]).fill_(value)
        o, state = getattr(qla, name)(**bad)
        assert state is not None
        assert clean[1] is not None
        others = [m for m in range(len(lengths)) if m != n]
        outside = torch.ones(o.shape[1], dtype=torch.bool)
        outside[start:end] = False
        outside = outside.to(o.device)
        assert inputs.same_bits(o[:, outside], clean[0][:, outside]), f"sequence {n}: rows of another one changed"
        assert inputs.same_bits(state[others], clean[1][others]), f"sequence {n}: state of another one changed"
        if value != value and x != "q":
            assert state[n].isnan().any(), "a NaN was lost"


@pytest.mark.parametrize("x", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("name", ALL)
def test_nan_in_padding_changes_nothing(name: str, x: str, device: str, dtype: torch.dtype) -> None:
    lengths = [64, 5, 97]
    a = inputs.make(name, T=sum(lengths) + 40, H=1, HV=2, lengths=lengths, dtype=dtype, device=device, state=True)
    if x not in a:
        return
    bad = inputs.copy(a)
    bad[x][:, sum(lengths) :] = float("nan")
    same(run(name, a), run(name, bad), slice(0, sum(lengths)))


@pytest.mark.parametrize("name", ALL)
def test_batch_rows_do_not_see_each_other(name: str, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=100, B=3, H=1, HV=2, dtype=dtype, device=device, state=True)
    clean = run(name, a)
    bad = inputs.copy(a)
    for x in ("q", "k", "v"):
        bad[x][1] = float("nan")
    o, state = run(name, bad)
    assert state is not None
    assert clean[1] is not None
    for row in (0, 2):
        assert inputs.same_bits(o[row], clean[0][row])
        assert inputs.same_bits(state[row], clean[1][row])


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100, 199])
@pytest.mark.parametrize("name", ALL)
def test_split_anywhere(name: str, cut: int, device: str, dtype: torch.dtype) -> None:
    """Two calls with the state passed on give what one call gives, within the bars of the recurrence."""
    a = inputs.make(name, T=200, B=2, H=1, HV=2, dtype=dtype, device=device, state=True)
    tokens = ("q", "k", "v", "g", "beta")
    first = {x: y[:, :cut] if x in tokens else y for x, y in a.items()}
    second = {x: y[:, cut:] if x in tokens else y for x, y in a.items()}
    o_first, state = run(name, first)
    o_second, final = run(name, second | {"initial_state": state})
    found = errors(name, a, (torch.cat([o_first, o_second], 1), final))
    print(found)
    assert max(found.values()) <= reference.BARS[dtype], found


# Strides --------------------------------------------------------------------------------------------------------------


def slice_of_larger(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_full((x.shape[0] + 1, x.shape[1] + 3, *x.shape[2:-1], x.shape[-1] + 16), float("nan"))
    view = wide[1:, 2:-1, ..., 8:-8]
    view.copy_(x)
    return view


def head_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def odd_offset(x: torch.Tensor) -> torch.Tensor:
    flat = x.new_full((x.numel() + 1,), float("nan"))
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def every_second(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_full((*x.shape[:-1], x.shape[-1] * 2), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


def channel_major(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 1), float("nan"))
    wide[..., :-1] = x
    return wide[..., :-1]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (slice_of_larger, head_major, odd_offset, every_second, channel_major, odd_rows)
}


@pytest.mark.parametrize("which", [("q", "k", "v"), ("v",), ("g", "beta"), ("initial_state",), None])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ALL)
def test_strided_views(name: str, view: str, which: tuple[str, ...] | None, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=150, B=2, H=2, HV=4, K=64, V=128, dtype=dtype, device=device, state=True)
    which = which or ("q", "k", "v", "g", "beta", "initial_state")
    strided = a | {x: VIEWS[view](a[x]) for x in which if x in a}
    assert all(torch.equal(a[x], strided[x]) for x in which if x in a)
    same(run(name, a), run(name, strided))


@pytest.mark.parametrize("name", ALL)
def test_slices_of_one_packed_projection(name: str, device: str, dtype: torch.dtype) -> None:
    a = inputs.make(name, T=150, B=2, H=2, HV=2, dtype=dtype, device=device)
    packed = torch.cat([a[x].flatten(2) for x in ("q", "k", "v")], dim=-1)
    parts = packed.split(2 * 128, dim=-1)
    views = {x: part.unflatten(-1, (2, 128)) for x, part in zip(("q", "k", "v"), parts, strict=True)}
    assert not views["k"].is_contiguous()
    same(run(name, a), run(name, a | views))


@pytest.mark.parametrize("name", ALL)
def test_broadcast_views(name: str, device: str, dtype: torch.dtype) -> None:
    """Stride 0: one row of keys for all heads, one beta for all tokens."""
    a = inputs.make(name, T=100, H=2, HV=4, dtype=dtype, device=device)
    a["k"] = a["k"][:, :, :1].expand(-1, -1, 2, -1)
    for x in ("g", "beta"):
        if x in a:
            a[x] = a[x][:, :1].expand(-1, 100, *a[x].shape[2:])
    got = check(name, a)
    same(got, run(name, {n: x.contiguous() if isinstance(x, torch.Tensor) else x for n, x in a.items()}))


@pytest.mark.parametrize("name", ALL)
def test_more_than_two_billion_elements(name: str, device: str) -> None:
    """Offsets beyond 2^31 elements: rows of q, k and v far apart in one buffer, of which little is touched."""
    a = inputs.make(name, T=300, H=1, HV=2, device=device)
    apart = 1 << 23
    buffer = torch.empty(300 * apart, dtype=torch.bfloat16, device=device)
    far = dict(a)
    for position, x in enumerate(("q", "k", "v")):
        far[x] = buffer.as_strided(a[x].shape, (0, apart, 128, 1), position * 256)
        far[x].copy_(a[x])
    same(getattr(qla, name)(**a), getattr(qla, name)(**far))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_nothing_waits_for_the_device(name: str) -> None:
    """No synchronization, with lengths on the device and never read by the host."""
    a = inputs.make(name, T=300, H=2, HV=4, lengths=[0, 100, 150], device="cuda", state=True)
    longer = torch.tensor([0, 1, 2, 3], device="cuda")
    run(name, a)
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(qla, name)(**a)
        a["cu_seqlens"] += longer
        got = getattr(qla, name)(**a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = errors(name, a, got)
    assert max(found.values()) <= reference.BARS[torch.bfloat16], found
