"""Sequences in segments, whatever the planner thinks of it, against the recurrence and the call in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inputs
import pytest
import reference
import torch

import qla
from qla.codegen.planner import split
from qla.runtime import plan

pytestmark = pytest.mark.gpu

OPS = ("chunk_gated_delta_rule", "chunk_delta_rule", "chunk_kda")
DTYPES = (torch.bfloat16, torch.float16)
RAGGED = [0, 1, 64, 0, 65, 63, 64, 448]
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
