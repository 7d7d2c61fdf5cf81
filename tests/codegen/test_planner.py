"""The planner: sequences are split where that should take less time, which follows from shapes alone."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from itertools import product
from typing import Any, cast, get_type_hints

import pytest
from typer.testing import CliRunner

from qla.codegen import cli
from qla.codegen.explain import Explanation
from qla.codegen.matrix import full
from qla.codegen.ops import OPS
from qla.codegen.planner import MOST_SEGMENTS, CallShape, Choice, choices, plan_call, split
from qla.codegen.render import render
from qla.codegen.spec import HEAD_DIMS, Dtype, KernelSpec
from qla.errors import UnsupportedError
from qla.targets import TARGETS, sm_90a
from qla.targets.base import Costs

HOPPER = TARGETS["sm_90a"]
GDN = CallShape("gated_delta_rule", "bf16", 128, 128, 1, 8192, 16, 32)
LONG = replace(GDN, tokens=65536, heads=2, value_heads=8)
COSTS = cast(Costs, TARGETS["sm_90a"].costs)
FULL = replace(GDN, batch=8, value_heads=64)
HEADS = ((1, 1), (2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (16, 16), (32, 32))
DELTA = [op for op, features in OPS.items() if features.delta]


def us(choice: Choice) -> float:
    assert choice.us
    return sum(choice.us.values())


def best(shape: CallShape, processors: int = 132) -> Choice:
    return plan_call(shape, "sm_90a", processors)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sequences", [0, 8])
def test_more_tokens_never_take_less_time(op: str, heads: tuple[int, int], sequences: int) -> None:
    lengths = (1, 8, 63, 64, 65, 512, 513, 1000, 2048, 8192, 8193, 65536, 262144)
    times = [us(best(CallShape(op, "bf16", 128, 128, 1, tokens, *heads, sequences))) for tokens in lengths]
    assert times == sorted(times)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1000, 16384])
def test_more_of_anything_never_takes_less_time(op: str, tokens: int) -> None:
    shape = CallShape(op, "bf16", 128, 128, 2, tokens, 4, 8)
    least = us(best(shape))
    for more in ({"batch": 20}, {"heads": 8, "value_heads": 16}, {"value_heads": 16}, {"heads": 8}):
        assert us(best(replace(shape, **more))) >= least
    assert us(best(shape, 66)) >= least


@pytest.mark.parametrize("processors", [8, 66, 132])
@pytest.mark.parametrize("op", DELTA)
def test_the_choice_is_the_least_of_all_splits(op: str, processors: int) -> None:
    for tokens, (heads, value_heads), batch in product((64, 2048, 32768), HEADS, (1, 8)):
        shape = CallShape(op, "fp16", 128, 128, batch, tokens, heads, value_heads)
        choice, chunks = best(shape, processors), -(-tokens // 64)
        schedules = choice.scan.schedules
        every = [split(shape, "sm_90a", processors, n, name) for n in range(2, chunks) for name in schedules]
        allowed = [c for c in every if c.segments <= MOST_SEGMENTS]
        whole = [split(shape, "sm_90a", processors, schedule=name) for name in schedules]
        assert choice.cost == min(each.cost for each in [*whole, *allowed])
        assert choice in choices(shape, "sm_90a", processors)
        assert (choice.segment_chunks == 0) == (choice.segments == 1)


def test_long_sequences_with_few_heads_are_split_and_a_full_chip_is_left_alone() -> None:
    assert best(LONG).segments > 1
    assert [spec.stage for spec in best(LONG).kernels] == ["prepare", "carry", "combine", "scan"]
    assert us(best(LONG)) < 0.5 * us(split(LONG, "sm_90a", 132))
    for few in (replace(LONG, op="kda"), replace(LONG, op="delta_rule"), replace(LONG, dk=64, dv=64, dtype="fp16")):
        assert best(few).segments > 1
    for other in (FULL, replace(LONG, tokens=128), replace(FULL, tokens=65536, batch=1, sequences=8)):
        assert best(other).segment_chunks == 0
        assert [spec.stage for spec in best(other).kernels] == ["prepare", "scan"]


@pytest.mark.parametrize(
    "change",
    [
        *({"op": "gla"}, {"dk": 64}, {"dv": 64}, {"loads": "strided"}),
        *({"op": "delta_rule", "saves": True, "dv": 64}, {"op": "gla", "saves": True}),
    ],
)
def test_what_cannot_be_split_is_not(change: dict[str, Any]) -> None:
    shape = replace(LONG, **change)
    choice = best(shape)
    assert choice.segment_chunks == 0
    assert choice in choices(shape, "sm_90a", 132)
    assert not any(other.segment_chunks for other in choices(shape, "sm_90a", 132))
    # Strided loads were not measured.
    assert bool(choice.us) == (shape.loads == "tile")
    assert "split" in Explanation(choice).reason


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [512, 8192, 65536])
def test_calls_that_save_are_split_as_others(dim: int, tokens: int) -> None:
    shape = CallShape("delta_rule", "fp16", dim, dim, 2, tokens, 4, 4)
    plain, saving = best(shape), best(replace(shape, saves=True))
    assert (plain.segments > 1) == (tokens > 512)
    assert (saving.segment_chunks, saving.us, saving.short_us) == (plain.segment_chunks, plain.us, plain.short_us)
    assert saving.workgroups[1:] == plain.workgroups[1:]
    # Products of the factors take registers and tiles: half as many workgroups of `prepare` run at once.
    assert saving.deal.apart
    assert saving.deal.stride * 2 == plain.deal.stride
    changed = [x.stage for x, y in zip(saving.kernels, plain.kernels, strict=True) if x != y]
    assert changed == ["prepare", "scan"]
    assert all(spec.saves == (spec.stage in changed) for spec in saving.kernels)
    # Each state is written once, however many segments there are.
    states = 2 * (-(-tokens // 64) + 1) * 4 * dim * dim * 4
    moved = [Explanation(choice).launches[-1].bytes for choice in (saving, plain)]
    assert moved[0] - moved[1] == states - 2 * 4 * dim * dim * 4  # the final state is one of them


def test_what_prepare_saves_was_not_measured() -> None:
    saving = Explanation(best(replace(LONG, op="delta_rule", saves=True)))
    assert saving.us is None
    assert [launch.us is None for launch in saving.launches] == [True, False, False, False]
    total = sum(saving.choice.us.values())
    assert saving.reason.startswith(f"split: {total:.1f} µs predicted beside prepare, without segments ")
    full = Explanation(best(replace(FULL, op="delta_rule", saves=True)))
    assert full.reason.startswith(f"not split: {sum(full.choice.us.values()):.1f} µs predicted beside prepare, with ")
    # Without a delta rule it is `scan` alone that saves.
    assert Explanation(best(replace(LONG, op="gla", saves=True))).us is not None


def test_of_equals_the_one_with_the_fewest_segments_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HOPPER.costs is not None
    nothing = {"head": (0.0, 0.0)}
    free = replace(
        HOPPER.costs, scan_chunk_us=nothing, carry_chunk_us=nothing, combine_step_us=0.0, combine_short_step_us=0.0,
        launch_us=0.0, prepare_us={},
    )  # fmt: skip
    monkeypatch.setitem(TARGETS, "sm_90a", replace(HOPPER, costs=free))
    assert best(LONG).segment_chunks == 0


def test_two_column_blocks_share_a_workgroup_where_the_chip_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """By costs that are not tuned to few workloads."""
    monkeypatch.setitem(TARGETS, "sm_90a", replace(TARGETS["sm_90a"], costs=sm_90a._COSTS))
    for full_chip in (FULL, replace(FULL, op="delta_rule"), replace(FULL, dk=64), replace(GDN, batch=4, tokens=2048)):
        choice, single = best(full_chip), split(full_chip, "sm_90a", 132)
        assert choice.schedule == choice.kernels[-1].schedule == "paired"
        assert choice.workgroups == (single.workgroups[0], single.workgroups[1] // 2)
        assert us(choice) < us(single)
    # Single ones fill the chip, or fit on it; there is one column block; nothing was measured.
    others = ({"batch": 1}, {"batch": 1, "value_heads": 16}, {"dv": 64}, {"op": "kda"}, {"op": "gla"})
    for other in (*others, {"loads": "strided"}, {"op": "delta_rule", "saves": True}):
        assert best(replace(FULL, **other)).schedule == ""


def test_pairs_and_segments_together() -> None:
    """`carry` has single column blocks whatever `scan` has."""
    single, pairs = (split(LONG, "sm_90a", 132, 64, name) for name in ("", "paired"))
    assert [spec.schedule for spec in pairs.kernels] == ["", "", "", "paired"]
    assert pairs.workgroups == (*single.workgroups[:3], single.workgroups[3] // 2) == (2048, 512, 64, 128)
    assert {stage: t for stage, t in pairs.us.items() if stage != "scan"} == {
        stage: t for stage, t in single.us.items() if stage != "scan"
    }
    alone, full = COSTS.pair_chunk_us["head"]
    assert pairs.us["scan"] == pytest.approx(64 * (alone + (full - alone) * 128 / 132) + COSTS.launch_us)
    with pytest.raises(UnsupportedError, match="paired for kda"):
        split(replace(LONG, op="kda"), "sm_90a", 132, 64, "paired")


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "sm_90a"])
def test_nothing_is_predicted_where_nothing_was_measured(target: str) -> None:
    explanation = Explanation(plan_call(LONG, target, 8))
    assert explanation.choice.segment_chunks == 0
    assert explanation.us is None
    assert [launch.us for launch in explanation.launches] == [None, None]
    assert explanation.flops == Explanation(split(LONG, "sm_90a", 132)).flops
    assert explanation.bytes > 0
    assert explanation.reason == f"not split; no time is predicted, since none was measured for {target}"


def test_numbers_of_a_call_by_hand() -> None:
    shape = replace(GDN, heads=16, value_heads=64)
    prepare, scan = Explanation(split(shape, "sm_90a", 132)).launches
    assert (prepare.workgroups, scan.workgroups) == (128 * 16, 128)
    assert (prepare.chain, scan.chain) == (0, 128)
    alone, full = COSTS.scan_chunk_us["head"]
    chunk_us = alone + (full - alone) * 128 / 132
    assert scan.us == pytest.approx(128 * chunk_us + COSTS.launch_us)
    item = COSTS.prepare_us[True, "head"][4]
    assert prepare.us == pytest.approx(128 * 64 * item / 132 + COSTS.launch_us)
    assert prepare.flops == 128 * 64 * 2 * 2 * 64 * 64 * 128
    assert scan.flops == 128 * 64 * (3 * 2 * 64 * 128 * 128 + 2 * 2 * 64 * 64 * 128)
    q, v = 8192 * 16 * 128 * 2, 8192 * 64 * 128 * 2
    workspace = 128 * 64 * sum(size for _, size in render(prepare.spec).workspace)
    assert prepare.bytes == 2 * q + 2 * 8192 * 64 * 4 + workspace
    assert scan.bytes == 2 * q + 2 * v + workspace + 64 * 128 * 128 * 4


def test_numbers_of_a_call_in_segments_by_hand() -> None:
    choice = split(LONG, "sm_90a", 132, 128)
    assert (choice.segments, choice.segment_slots, choice.slots) == (8, 8, 1024)
    prepare, carry, combine, scan = Explanation(choice).launches
    assert [x.workgroups for x in (prepare, carry, combine, scan)] == [1024 * 2, 8 * 8 * 4, 8 * 8, 8 * 8 * 2]
    assert [x.chain for x in (prepare, carry, combine, scan)] == [0, 128, 7, 128]
    # 7 segments of 8 value heads with 2 column blocks, and 2 more for all but the first: two on some processor.
    two = COSTS.carry_chunk_us["head"][1]
    assert carry.us == pytest.approx(128 * two + COSTS.launch_us)
    assert combine.us == pytest.approx(6 * COSTS.combine_step_us + COSTS.launch_us)
    # Where only the last chunks of a segment tell of its end, those of the identity have nothing to do.
    one, reach = COSTS.carry_chunk_us["head"][0], COSTS.reach_chunks["head"]
    assert choice.short_us["carry"] == pytest.approx(reach * one + COSTS.launch_us)
    assert choice.short_us["combine"] == pytest.approx(6 * COSTS.combine_short_step_us + COSTS.launch_us)
    assert choice.short_us["scan"] == choice.us["scan"]
    alone, full = COSTS.scan_chunk_us["head"]
    chunk_us = alone + (full - alone) * 128 / 132
    assert scan.us == pytest.approx(128 * chunk_us + COSTS.launch_us)
    assert carry.flops == (7 + 6) * 8 * 128 * 2 * 64 * 128 * (128 + 64 + 128)
    assert combine.flops == 6 * 8 * 2 * 128**3
    state, q, v = 128 * 128 * 4, 65536 * 2 * 128 * 2, 65536 * 8 * 128 * 2
    made = dict(render(prepare.spec).workspace)
    flags = 7 * 8 * 128
    # N of 7, M of 6, and what takes the place of 6 N.
    assert combine.bytes == (7 + 6 + 6) * 8 * state + flags
    assert carry.bytes == (q + v + 1024 * 8 * (made["a"] + made["rows"])) * 7 // 8 + (7 * 2 - 1) * 8 * state + flags
    assert scan.bytes == 2 * q + 2 * v + 1024 * 8 * sum(made.values()) + 8 * state + 7 * 8 * state
    whole = Explanation(split(LONG, "sm_90a", 132)).launches
    assert (prepare.bytes, prepare.flops, scan.flops) == (whole[0].bytes, whole[0].flops, whole[1].flops)


def test_two_workgroups_of_carry_share_a_processor_where_they_fit() -> None:
    for op, fit in (("gated_delta_rule", True), ("delta_rule", True), ("kda", False)):
        # 3 segments of 8 value heads with 2 column blocks, and 2 more for 2 of them: 80 workgroups on 40, and on 27.
        shape = replace(LONG, op=op, tokens=64 * 40)
        two, three = (split(shape, "sm_90a", processors, 10).us["carry"] for processors in (40, 27))
        one, pair = COSTS.carry_chunk_us[OPS[op].gate]
        assert (pair < 2 * one) == fit
        assert two == pytest.approx(10 * pair + COSTS.launch_us)
        assert three == pytest.approx(10 * (pair + one) + COSTS.launch_us)


@pytest.mark.parametrize(
    ("op", "group", "known"),
    [
        *(("gated_delta_rule", 8, 4), ("gated_delta_rule", 4, 4), ("gated_delta_rule", 3, 2)),
        *(("gated_delta_rule", 1, 1), ("delta_rule", 2, 2), ("kda", 4, 1), ("gla", 1, 1)),
    ],
)
def test_time_of_prepare(op: str, group: int, known: int) -> None:
    item = COSTS.prepare_us[OPS[op].delta, OPS[op].gate][known]
    shape = CallShape(op, "bf16", 128, 128, 1, 64 * 132, 4, 4 * group)
    launch = Explanation(split(shape, "sm_90a", 132)).launches[0]
    assert launch.us == pytest.approx(4 * group * item + COSTS.launch_us)
    half = Explanation(split(replace(shape, dk=64, dv=64), "sm_90a", 132)).launches[0]
    assert half.us == pytest.approx(max(half.bytes / COSTS.bandwidth, 4 * group * item / 2) + COSTS.launch_us)


def test_bytes_bound_prepare_where_there_are_more_of_them() -> None:
    prepare = Explanation(split(GDN, "sm_90a", 100_000)).launches[0]
    assert prepare.us == pytest.approx(prepare.bytes / 4.3e6 + COSTS.launch_us)


def test_packed_sequences_are_taken_as_an_even_split() -> None:
    explanation = Explanation(best(replace(GDN, tokens=1000, sequences=7)))
    assert explanation.choice.chunks == 3  # 6 sequences of 143 tokens and one of 142
    assert "if they are split evenly" in str(explanation)
    assert Explanation(split(explanation.choice.shape, "sm_90a", 132)).launches[-1].workgroups == 7 * 32 * 2
    whole = Explanation(best(replace(GDN, tokens=1000, sequences=1)))
    assert "evenly" not in str(whole)
    assert us(whole.choice) == us(best(replace(GDN, tokens=1000)))
    # More sequences than tokens: some are empty.
    assert best(replace(GDN, tokens=3, sequences=7)).chunks == 1
    parts = split(replace(GDN, tokens=1000, sequences=7), "sm_90a", 132, 2)
    assert (parts.segments, parts.segment_slots) == (2, 1000 // 128 + 7)


@pytest.mark.parametrize("target", TARGETS)
def test_planned_kernels_are_those_of_the_list_and_do_what_the_plan_says(target: str) -> None:
    listed = set(full(target))
    for spec in [s for s in listed if s.stage == "scan" and s.dtype == "bf16" and not s.schedule]:
        shape = CallShape(spec.op, spec.dtype, spec.dk, spec.dv, 3, 200, 2, 4, 0, spec.loads, spec.saves)
        for segment_chunks, schedule in product((0, 2) if spec.divisible else (0,), spec.schedules):
            choice = split(shape, target, 132, segment_chunks, schedule)
            assert set(choice.kernels) <= listed
            sources = [render(kernel) for kernel in choice.kernels]
            limits = {source.spec.stage: source.limits for source in sources}
            assert {x.chunk for x in limits.values()} == {choice.chunk}
            counts = dict(zip(limits, choice.workgroups, strict=True))
            assert counts["scan"] == choice.segment_slots * 4 * (spec.dv // limits["scan"].value_columns)
            if segment_chunks:
                assert choice.segment_slots == 3 * 2
                assert counts["combine"] == 3 * 4 * (spec.dv // limits["combine"].value_columns)
                assert counts["carry"] == 3 * 2 * 4 * ((spec.dv + spec.dk) // limits["carry"].value_columns)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 0}, "tokens: got 0"),
        ({"batch": -1}, "batch: got -1"),
        ({"value_heads": 0}, "value_heads: got 0"),
        ({"value_heads": 24}, "a multiple of heads = 16"),
        ({"sequences": -1}, "sequences: got -1"),
        ({"sequences": 2, "batch": 2}, "1 with packed sequences"),
        ({"op": "softmax"}, "op: got softmax"),
        ({"dtype": "fp32"}, "dtype: got fp32"),
        ({"dk": 96}, "dk: got 96"),
        ({"saves": True}, "saves: got True for gated_delta_rule"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        best(replace(GDN, **change))


def test_other_arguments_are_checked() -> None:
    with pytest.raises(UnsupportedError, match="target: got sm_80"):
        plan_call(GDN, "sm_80", 132)
    with pytest.raises(UnsupportedError, match="processors: got 0"):
        plan_call(GDN, "sm_90a", 0)


def test_planning_sees_shapes_only() -> None:
    """Nothing it is given can hold a tensor, and nothing it imports can wait for a device."""
    hints = get_type_hints(CallShape)
    assert {str(hints[f.name]) for f in fields(CallShape)} <= {
        str(t) for t in (str, int, bool, Dtype, get_type_hints(CallShape)["loads"])
    }
    assert list(inspect.signature(plan_call).parameters) == ["shape", "target", "processors"]
    code = (
        "import sys; from qla.codegen.planner import *;"
        "plan_call(CallShape('kda', 'bf16', 128, 128, 1, 64, 1, 1), 'sm_90a', 132);"
        "print({'torch', 'cupy', 'hip', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    with pytest.raises(FrozenInstanceError):
        cast(Any, best(GDN)).segment_chunks = 2


def test_text_of_an_explanation() -> None:
    lines = str(Explanation(best(LONG))).splitlines()
    assert lines[0] == "gated_delta_rule, bf16, K = 128, V = 128: 1 x 65536 tokens, 2 q/k heads, 8 value heads"
    assert lines[1] == "sm_90a, 132 processors: sequences of 1024 chunks of 64 tokens, 8 segments of 128"
    assert [line.split()[0].removeprefix("gated_delta_rule_") for line in lines[2:]] == [
        "kernel", "prepare_bf16_k128_v128", "carry_bf16_k128_v128", "combine_bf16_k128_v128", "scan_bf16_k128_v128",
        "in", "split:",
    ]  # fmt: skip
    assert len({len(line) for line in lines[2:8]}) == 1
    total, without = (Explanation(c).us for c in (best(LONG), split(LONG, "sm_90a", 132)))
    short = total - sum(best(LONG).us.values()) + sum(best(LONG).short_us.values())
    assert short < total
    fading = f"({short:.1f} µs where a state fades within a segment)"
    assert lines[-1] == f"split: {total:.1f} µs predicted {fading}, without segments {without:.1f} µs"


def test_reasons_not_to_split() -> None:
    assert Explanation(best(replace(LONG, tokens=64))).reason == "not split: too few chunks for two segments"
    gla = Explanation(best(replace(LONG, op="gla"))).reason
    assert gla == "not split; segments need a delta op, K = V, loads=tile, and a target with segments"
    strided = Explanation(best(replace(LONG, loads="strided"))).reason
    assert strided.endswith("none was measured for loads=strided")
    explanation = Explanation(best(FULL))
    assert explanation.us is not None
    assert explanation.reason.startswith(f"not split: {explanation.us:.1f} µs predicted, with segments ")
    pairs, single = (split(FULL, "sm_90a", 132, schedule=name).us["scan"] for name in ("paired", ""))
    assert explanation.reason.endswith(f"at best; scan paired: {pairs:.1f} µs, otherwise {single:.1f} µs")


def explain(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["explain", *arguments])


def test_the_command_line_shows_the_same() -> None:
    result = explain("--op", "gated_delta_rule", "--tokens", "65536", "--heads", "2", "--value-heads", "8")
    assert result.exit_code == 0, result.output
    explanation = Explanation(best(LONG))
    for text in (*explanation.notes(), *(cell for row in explanation.table() for cell in row)):
        assert text in result.output
    result = explain("--op", "kda", "--tokens", "4096", "--heads", "4", "--sequences", "3", "--target", "gfx942")
    shape = CallShape("kda", "bf16", 128, 128, 1, 4096, 4, 4, 3)
    for text in Explanation(plan_call(shape, "gfx942", 304)).notes():
        assert text in result.output
    result = explain("--op", "gla", "--tokens", "64", "--heads", "4", "--processors", "7", "--dtype", "fp16")
    assert "7 processors" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--op", "softmax"), "op: got softmax"),
        (("--op", "kda", "--value-heads", "3"), "a multiple of heads = 2"),
        (("--op", "kda", "--target", "sm_80"), "--target: got sm_80"),
        (("--op", "kda", "--processors", "0"), "processors: got 0"),
        (("--op", "kda", "--dtype", "fp32"), "bf16, fp16 on sm_90a"),
        ((), "--op"),
    ],
)
def test_the_command_line_refuses(arguments: tuple[str, ...], said: str) -> None:
    result = explain("--tokens", "64", "--heads", "2", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def heads(shape: CallShape, processors: int = 132) -> tuple[int, int, int, bool]:
    deal = split(shape, "sm_90a", processors).deal
    return deal.heads, deal.passes, deal.workgroups, deal.apart


def test_heads_at_once_of_prepare() -> None:
    """The fewest with which all workgroups run at once, else the most; then as even as passes allow."""
    few = CallShape("gated_delta_rule", "bf16", 128, 128, 1, 2048, 2, 8)
    assert heads(few) == (1, 4, 32 * 2 * 4, True)
    assert heads(replace(few, tokens=8192)) == (2, 2, 128 * 2 * 2, False)
    assert heads(replace(few, tokens=16384)) == (4, 1, 256 * 2, False)
    assert heads(replace(few, tokens=65536)) == (4, 1, 1024 * 2, False)
    long = replace(few, tokens=65536)
    assert [heads(replace(long, value_heads=2 * group))[:2] for group in (2, 3, 5, 6, 7, 8)] == [
        (2, 1), (3, 1), (3, 2), (3, 2), (4, 2), (4, 2),
    ]  # fmt: skip
    # One head at a time: workgroups take one item after the other, four of them on a multiprocessor, or two.
    assert heads(replace(long, value_heads=2)) == (1, 1, 4 * 132, True)
    assert heads(replace(long, value_heads=2, loads="strided")) == (1, 1, 2 * 132, True)
    assert heads(replace(long, op="delta_rule", value_heads=2, saves=True)) == (1, 1, 2 * 132, True)
    assert heads(replace(long, op="kda")) == (1, 4, 1024 * 8, False)
    assert split(long, "gfx942", 304).deal.heads == 1


@pytest.mark.parametrize("op", ["gated_delta_rule", "delta_rule"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_four_workgroups_of_prepare_fit_on_a_multiprocessor(op: str, dim: int) -> None:
    limits = render(KernelSpec(op, "prepare", "bf16", dim, dim, "sm_90a")).limits
    for at_once, apart in ((1, True), (2, False), (3, False), (4, False)):
        assert 4 * (limits.shared_for(at_once, apart) + 1024) <= 233472
        assert limits.shared_for(at_once, apart) <= limits.shared_bytes
    # Without tiles of q and k in the way: two heads and both tiles.
    saving = render(KernelSpec("delta_rule", "prepare", "bf16", dim, dim, "sm_90a", saves=True)).limits
    assert 2 * (saving.shared_for(2, True) + 1024) <= 233472
