"""Sequences in segments, whatever the planner thinks of it, against the recurrence and the call in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import inputs
import pytest
import reference
import torch

import qla
from qla.codegen.planner import split
from qla.ops import forward
from qla.runtime import plan
from qla.runtime.problem import Result

pytestmark = pytest.mark.gpu

OPS = ("chunk_gated_delta_rule", "chunk_delta_rule", "chunk_kda")
DTYPES = (torch.bfloat16, torch.float16)
RAGGED = [0, 1, 64, 0, 65, 63, 64, 448]
CHUNK = 64
SEGMENT = 128  # tokens, in these tests

Outputs = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[str, dict[str, Any]], Outputs]

every_op = pytest.mark.parametrize("name", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def in_pieces(monkeypatch: pytest.MonkeyPatch, segment_chunks: int) -> None:
    def forced(*arguments: Any) -> Any:
        return split(*arguments, segment_chunks)

    monkeypatch.setattr(plan, "plan_call", forced)
    monkeypatch.setattr(plan, "layouts", {})


@pytest.fixture
def segmented(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls with segments of two chunks."""

    def run(name: str, a: dict[str, Any]) -> Outputs:
        in_pieces(monkeypatch, 2)
        o, state = getattr(qla, name)(**a)
        (layout,) = plan.layouts.values()
        assert layout is not None
        assert [spec.stage for spec in layout.plan.key.specs()] == ["prepare", "carry", "combine", "scan"]
        return o, state

    return run


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same calls without segments."""

    def run(name: str, a: dict[str, Any]) -> Outputs:
        in_pieces(monkeypatch, 0)
        o, state = getattr(qla, name)(**a)
        return o, state

    return run


def make(name: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"T": 600, "H": 2, "HV": 4, "state": True, "seed": 7, **options}
    if options.get("lengths"):
        given["T"] = sum(options["lengths"]) + 9  # and rows that belong to no sequence
    return inputs.make(name, dtype=dtype, device="cuda", **given)


def check(name: str, a: dict[str, Any], segmented: Run, whole: Run, ungated: bool = False) -> Outputs:
    got, one, expected = segmented(name, a), whole(name, a), reference.forward(name, **a)
    rows = inputs.unpadded(a)
    bar = (reference.BARS_UNGATED if ungated else reference.BARS)[a["q"].dtype]
    for label, x, y, z in (
        ("o", *(r[0][:, :rows] for r in (got, one, expected))),
        ("state", got[1], one[1], expected[1]),
    ):
        error, apart = reference.relative_error(x, z), reference.relative_error(x, y.double())
        print(f"{name} {a['q'].dtype} {label}: {error:.2e} (bar {bar}), from one piece {apart:.2e}")
        assert error <= bar
        assert apart <= 1e-2
    return got


def same(x: Outputs, y: Outputs, rows: Any = slice(None)) -> None:
    assert inputs.same_bits(x[0][:, rows], y[0][:, rows])
    assert inputs.same_bits(x[1], y[1])


@every_op
@every_dtype
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_rows(name: str, dtype: torch.dtype, dim: int, state: bool, batch: int, segmented: Run, whole: Run) -> None:
    check(name, make(name, dtype, K=dim, V=dim, B=batch, state=state), segmented, whole)


@every_op
@every_dtype
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("state", [False, True])
def test_packed_sequences(name: str, dtype: torch.dtype, dim: int, state: bool, segmented: Run, whole: Run) -> None:
    check(name, make(name, dtype, K=dim, V=dim, lengths=RAGGED, state=state), segmented, whole)


@every_op
@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 128, 129, 256, 257, 384, 385])
def test_lengths_around_a_segment(name: str, T: int, segmented: Run, whole: Run) -> None:
    check(name, make(name, torch.bfloat16, T=T), segmented, whole)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
@every_dtype
@pytest.mark.parametrize("lengths", [None, RAGGED])
def test_states_with_values_first(name: str, dtype: torch.dtype, lengths: Any, segmented: Run, whole: Run) -> None:
    check(name, make(name, dtype, lengths=lengths, v_first=True), segmented, whole)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
@every_dtype
@pytest.mark.parametrize("gate", ["none", "long", "strong"])
def test_gates(name: str, dtype: torch.dtype, gate: str, segmented: Run, whole: Run) -> None:
    """With none a state is never forgotten: what segments hand on is all that there is."""
    check(name, make(name, dtype, gate=gate), segmented, whole, ungated=gate != "strong")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [[1200], [9000], [1200, 0, 1, 128, 129, 320, 385, 64, 0]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_some_segments_forget_what_was_before(
    dim: int, state: bool, lengths: list[int], segmented: Run, whole: Run
) -> None:
    """A state that does not reach a segment's end is not combined with it; each head has other segments like that."""
    name, most = OPS[0], max(lengths) // SEGMENT + 1
    a = make(name, torch.bfloat16, K=dim, V=dim, lengths=lengths, state=state, gate="long", HV=6)
    forgetting: list[Any] = [(), range(most), range(0, most, 2), (2, 3, 6, 33, 34), (1, 5), {*range(most)} - {40, 66}]
    start = 0
    for length in lengths:
        gates = a["g"][0, start : start + length]
        for head, segments in enumerate(forgetting):
            for n in segments:
                gates[n * SEGMENT : (n + 1) * SEGMENT, head] = -16.0
        start += length
    check(name, a, segmented, whole, ungated=True)


def test_a_state_goes_through_many_segments(segmented: Run, whole: Run) -> None:
    for name in OPS:
        check(name, make(name, torch.bfloat16, T=70 * SEGMENT, H=1, HV=2, gate="long"), segmented, whole, ungated=True)


@every_op
def test_no_final_state_is_asked_for(name: str, segmented: Run) -> None:
    a = make(name, torch.bfloat16)
    o, state = segmented(name, a | {"output_final_state": False})
    assert state is None
    assert inputs.same_bits(o, segmented(name, a)[0])


@every_op
@pytest.mark.parametrize("x", ["k", "v", "g", "beta", "initial_state"])
def test_nan_stays_in_its_sequence(name: str, x: str, segmented: Run) -> None:
    a = make(name, torch.bfloat16, lengths=RAGGED)
    if x not in a:
        return
    clean, bounds = segmented(name, a), a["cu_seqlens"].tolist()
    for n in (2, 4, 7):
        bad = inputs.copy(a)
        start, end = bounds[n], bounds[n + 1]
        (bad[x][n] if x == "initial_state" else bad[x][:, start:end]).fill_(float("nan"))
        o, state = segmented(name, bad)
        outside = [t for t in range(bounds[-1]) if not start <= t < end]
        others = [m for m in range(len(RAGGED)) if m != n]
        assert inputs.same_bits(o[:, outside], clean[0][:, outside])
        assert inputs.same_bits(state[others], clean[1][others])
        assert state[n].isnan().any()


@every_op
@every_dtype
@pytest.mark.parametrize("lengths", [None, RAGGED])
def test_repeated_runs_are_bitwise_equal(name: str, dtype: torch.dtype, lengths: Any, segmented: Run) -> None:
    a = make(name, dtype, lengths=lengths)
    first, rows = segmented(name, a), slice(0, inputs.unpadded(a))
    for _ in range(4):
        same(first, segmented(name, a), rows)


def test_the_planner_splits_a_long_sequence(monkeypatch: pytest.MonkeyPatch, whole: Run) -> None:
    """As it is called by default, without a segment length forced on it."""
    name = OPS[0]
    a = make(name, torch.bfloat16, T=16384, H=1, HV=2)
    monkeypatch.setattr(plan, "layouts", {})
    o, state = getattr(qla, name)(**a)
    (layout,) = plan.layouts.values()
    assert layout is not None
    assert layout.plan.key.segments
    expected = whole(name, a)
    assert reference.relative_error(o, expected[0].double()) <= 1e-2
    assert reference.relative_error(state, expected[1].double()) <= 1e-2


# ---- calls that also return the state at each chunk's start ----------------------------------------------------------


class Saving:
    """`chunk_delta_rule` that also returns what a backward pass needs, in segments of so many chunks; 0 for none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, a: dict[str, Any], segment_chunks: int = 2) -> Result:
        in_pieces(self.monkeypatch, segment_chunks)
        options = (
            *("scale", "initial_state", "output_final_state", "state_v_first"),
            *("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
        )

        def call() -> Result:
            tensors = (a["q"], a["k"], a["v"], None, a["beta"], None, None)
            return forward("delta_rule", True, *tensors, *map(a.get, options))

        call()
        (layout,) = plan.layouts.values()
        assert layout is not None
        stages = ["prepare", "carry", "combine", "scan"] if segment_chunks else ["prepare", "scan"]
        assert [spec.stage for spec in layout.plan.key.specs()] == stages
        # What is not written shall not be what an earlier call has left there.
        empty = layout.empty
        self.monkeypatch.setattr(layout, "empty", lambda *each: empty(*each).fill_(float("nan")))
        return call()


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Saving:
    return Saving(monkeypatch)


def make_saving(dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return make("chunk_delta_rule", dtype, **options)


def tensors_of(result: Result) -> dict[str, torch.Tensor]:
    return {f.name: x for f in fields(result) if (x := getattr(result, f.name)) is not None}


def check_saved(a: dict[str, Any], saving: Saving, segment_chunks: int = 2, bar: float | None = None) -> Result:
    got, one = saving(a, segment_chunks), saving(a, 0)
    bar = bar or reference.BARS[a["q"].dtype]
    o, final = reference.forward("chunk_delta_rule", **a)
    states = reference.chunk_states("chunk_delta_rule", **a)
    assert got.states is not None
    assert one.states is not None
    pairs = {"o": (got.o, one.o, o), "final_state": (got.final_state, one.final_state, final)}
    pairs |= {f"state {n}": (got.states[:, n], one.states[:, n], states[:, n]) for n in range(states.shape[1])}
    for label, (x, y, z) in pairs.items():
        assert x is not None
        assert y is not None
        error, apart = reference.relative_error(x, z), reference.relative_error(x, y.double())
        print(f"{a['q'].dtype} {label}: {error:.2e} (bar {bar}), from one piece {apart:.2e}")
        assert error <= bar
        assert apart <= 1e-2
    # What does not depend on the state, and the first segment, are what they are in one piece.
    for name in ("A", "w", "u"):
        assert inputs.same_bits(getattr(got, name), getattr(one, name))
        assert getattr(got, name).isfinite().all()
    assert inputs.same_bits(got.states[:, :segment_chunks], one.states[:, :segment_chunks])
    rows = slice(0, segment_chunks * CHUNK)
    assert inputs.same_bits(got.o[:, rows], one.o[:, rows])
    assert got.final_state is not None
    assert inputs.same_bits(got.states[:, -1], got.final_state.mT if a.get("state_v_first") else got.final_state)
    return got


@every_dtype
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_saved_states(dtype: torch.dtype, dim: int, state: bool, batch: int, saving: Saving) -> None:
    check_saved(make_saving(dtype, K=dim, V=dim, B=batch, state=state), saving)


@every_dtype
@pytest.mark.parametrize("segment_chunks", [1, 3, 9, 10])
def test_saved_states_of_segments_of_any_length(dtype: torch.dtype, segment_chunks: int, saving: Saving) -> None:
    check_saved(make_saving(dtype, B=2), saving, segment_chunks)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 128, 129, 256, 384])
def test_saved_states_of_lengths_around_a_segment(T: int, saving: Saving) -> None:
    check_saved(make_saving(torch.bfloat16, T=T, B=2), saving)


@every_dtype
@pytest.mark.parametrize(
    "options",
    [
        {"keys": "raw", "T": 260},
        {"keys": "raw", "use_qk_l2norm_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"beta_dtype": torch.bfloat16, "scale": 1.0},
        {"v_first": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_saved_states_with_options(dtype: torch.dtype, options: dict[str, Any], saving: Saving) -> None:
    check_saved(make_saving(dtype, **options), saving, bar=reference.BARS_UNGATED[dtype])


@pytest.mark.parametrize("x", ["k", "v", "beta", "initial_state"])
def test_nan_is_saved_in_its_sequence_from_its_chunk_on(x: str, saving: Saving) -> None:
    a = make_saving(torch.bfloat16, B=3)
    clean, bad = tensors_of(saving(a)), inputs.copy(a)
    at = 0 if x == "initial_state" else 5 * CHUNK - 20  # in the first chunk of the third segment
    (bad[x][1] if x == "initial_state" else bad[x][1, at]).fill_(float("nan"))
    found = tensors_of(saving(bad))
    for name, each in found.items():
        assert inputs.same_bits(each[[0, 2]], clean[name][[0, 2]])
    first = 0 if x == "initial_state" else at // CHUNK + 1
    assert inputs.same_bits(found["states"][1, :first], clean["states"][1, :first])
    assert all(state.isnan().any() for state in found["states"][1, first:])
    before = at // CHUNK * CHUNK
    for name in ("o", "A", "w", "u"):
        assert inputs.same_bits(found[name][1, :before], clean[name][1, :before])


@every_dtype
def test_repeated_runs_save_the_same_bits(dtype: torch.dtype, saving: Saving) -> None:
    a = make_saving(dtype, B=2)
    first = tensors_of(saving(a))
    for _ in range(4):
        again = tensors_of(saving(a))
        assert all(inputs.same_bits(x, again[name]) for name, x in first.items())


@every_dtype
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_chunk_op_in_segments(
    dtype: torch.dtype, contiguous: bool, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without states of its own to begin or end with, head-major: of contiguous tensors, and of views."""
    a = make_saving(dtype, B=2, HV=2, state=False)
    expected = saving(a | {"scale": 1.0})
    in_pieces(monkeypatch, 2)
    views = {x: a[x].transpose(1, 2) for x in ("q", "k", "v", "beta")}
    found = qla.DeltaNetChunkFwd()(**{n: x.contiguous() if contiguous else x for n, x in views.items()})
    (layout,) = plan.layouts.values()
    assert layout is not None
    assert layout.plan.key.segments
    for x, y in zip(found, (expected.o, expected.states, expected.A, expected.A, expected.w, expected.u), strict=True):
        assert y is not None
        assert inputs.same_bits(x.transpose(1, 2), y)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_planner_splits_a_long_sequence_that_is_saved(
    dim: int, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make_saving(torch.bfloat16, B=2, T=4096, H=4, K=dim, V=dim, state=False)
    monkeypatch.setattr(plan, "layouts", {})
    head_major = {x: a[x].transpose(1, 2).contiguous() for x in ("q", "k", "v", "beta")}
    o, states, *_ = qla.DeltaNetChunkFwd()(**head_major)
    (layout,) = plan.layouts.values()
    assert layout is not None
    assert layout.plan.key.segments
    one = saving(a | {"scale": 1.0}, 0)
    assert one.states is not None
    assert reference.relative_error(o.transpose(1, 2), one.o.double()) <= 1e-2
    for n in range(states.shape[2]):
        assert reference.relative_error(states[:, :, n], one.states[:, n].double()) <= 1e-2
