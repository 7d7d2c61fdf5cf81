"""Where a segment lies: the arithmetic of the kernels, compiled for the CPU, and its argument blocks."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qla.codegen.abi import segment_workspace
from qla.codegen.planner import CallShape, split
from qla.codegen.render import environment, render
from qla.codegen.spec import Field, KernelSpec, Limits, Source
from qla.runtime.compilers.zig import ZigHost
from qla.targets import TARGETS

C = 64
NARROW = ("tokens", "has_cu_seqlens", "cu_is_int64", "sequences", "segment_chunks")
ABI = (Field("cu_seqlens", "ptr"), *(Field(name, "i32") for name in NARROW))
TEXT = """
typedef long long i64;
#define DEV static inline
{%- import "tile/common.j2" as common with context %}
{{ common.arguments(abi) }}
{{ common.segments() }}
extern "C" void entry(const Args& args, int n, int* out) {
  const Segment segment = segment_at(args, n);
  const Sequence sequence = segment.rows;
  {{ states }}
  const int all[] = {sequence.batch, sequence.start, sequence.length, sequence.slot, segment.n_sequence, segment.first,
                     segment.last, args.segment_chunks ? first_segment(args, segment.n_sequence) : segment.n_sequence,
                     (int)states};
  for (int i = 0; i < 9; i++) out[i] = all[i];
}
"""
Place = dict[str, int]
NAMES = ("batch", "start", "length", "slot", "n_sequence", "first", "last", "first_segment", "states")


class Args(ctypes.Structure):
    _fields_ = (("cu_seqlens", ctypes.c_void_p), *((name, ctypes.c_int) for name in NARROW))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Place]:
    """``place(segment, tokens, sequences, segment_chunks, boundaries)``."""
    # How many saved states are before a segment's, as the kernel has it.
    saving = render(KernelSpec("delta_rule", "scan", "bf16", 64, 64, "sm_90a", saves=True)).text
    (states,) = re.findall(r"const i64 states = .*?;", saving, re.DOTALL)
    text = environment().from_string(TEXT).render(abi=ABI, C=C, K=64, V=64, states=states)
    spec = KernelSpec("delta_rule", "scan", "bf16", 64, 64, "host")
    source = Source(spec, "entry", "c++", text, ABI, Limits(1, 0, 64, C))
    path = Path(tmp_path_factory.mktemp("segments")) / "segments.so"
    path.write_bytes(ZigHost(TARGETS["host"]).compile(source).data)
    function = ctypes.CDLL(str(path)).entry

    def call(segment: int, tokens: int, sequences: int, chunks: int, boundaries: list[int] | None, wide: bool) -> Place:
        kind = ctypes.c_int64 if wide else ctypes.c_int32
        array = (kind * len(boundaries or [0]))(*(boundaries or [0]))
        args = Args(ctypes.addressof(array), tokens, boundaries is not None, wide, sequences, chunks)
        out = (ctypes.c_int * len(NAMES))()
        function(ctypes.byref(args), segment, out)
        return dict(zip(NAMES, out, strict=True))

    return call


LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 192, 256, 257, 640)
PACKED = [
    *([length] for length in LENGTHS),
    [0, 0, 0],
    [0, 1, 64, 0, 65, 63, 64, 448],
    [128, 0, 128, 0, 0, 256],
    [640, 0, 1, 1, 1, 1, 640],
    [1] * 70,
    [65, 127, 129, 191, 193],
]


def check(
    place: Callable[..., Place], rows: list[tuple[int, int, int]], tokens: int, chunks: int, cu: Any, wide: bool
) -> None:
    """Rows are (batch, start, length) of each sequence; walks over all places that a launch has workgroups for."""
    sequences = len(rows)
    shape = CallShape("delta_rule", "bf16", 64, 64, 1 if cu else sequences, tokens, 1, 1, sequences if cu else 0)
    choice = split(shape, "sm_90a", 132, chunks)
    assert choice.chunk == C
    seen: dict[int, list[Place]] = {n: [] for n in range(sequences)}
    for segment in range(choice.segment_slots):
        found = place(segment, tokens, sequences, chunks, cu, wide)
        if found["length"] < 0:
            assert not found["first"], "a sequence without rows still has a state"
            continue
        assert found["length"] > 0 or found["first"]
        assert segment == found["first_segment"] + len(seen[found["n_sequence"]])
        seen[found["n_sequence"]].append(found)
    for n, (batch, start, length) in enumerate(rows):
        parts = seen[n]
        assert parts, f"sequence {n} has no segment"
        assert [p["first"] for p in parts] == [1] + [0] * (len(parts) - 1)
        assert [p["last"] for p in parts] == [0] * (len(parts) - 1) + [1]
        assert {p["batch"] for p in parts} == {batch}
        assert sum(p["length"] for p in parts) == length
        assert all(p["length"] == C * chunks for p in parts[:-1])
        at = start
        slot = start // C + n if cu else n * -(-tokens // C)
        for p in parts:
            assert (p["start"], p["slot"]) == (at, slot)
            at, slot = at + p["length"], slot + chunks
        assert parts[-1]["slot"] + -(-parts[-1]["length"] // C) <= choice.slots


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", PACKED, ids=lambda lengths: "-".join(map(str, lengths))[:30])
@pytest.mark.parametrize("padding", [0, 7, 200])
def test_segments_of_packed_sequences(
    place: Callable[..., Place], lengths: list[int], chunks: int, padding: int
) -> None:
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    tokens = bounds[-1] + padding
    if tokens:
        rows = [(0, start, end - start) for start, end in pairwise(bounds)]
        for wide in (False, True):
            check(place, rows, tokens, chunks, bounds, wide)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("tokens", [n for n in LENGTHS if n])
@pytest.mark.parametrize("batch", [1, 3])
def test_segments_of_rows(place: Callable[..., Place], tokens: int, chunks: int, batch: int) -> None:
    check(place, [(n, 0, tokens) for n in range(batch)], tokens, chunks, None, False)


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("tokens", [n for n in LENGTHS if n])
@pytest.mark.parametrize("batch", [1, 3])
def test_each_state_is_saved_once(place: Callable[..., Place], tokens: int, chunks: int, batch: int) -> None:
    """The state at the start of each chunk by the segment it lies in, the one after the last token by the last."""
    choice = split(CallShape("delta_rule", "bf16", 64, 64, batch, tokens, 1, 1, saves=True), "sm_90a", 132, chunks)
    saved: list[int] = []
    for segment in range(choice.segment_slots):
        found = place(segment, tokens, batch, chunks, None, False)
        count = -(-found["length"] // C) + found["last"]
        saved += range(found["states"], found["states"] + count)
    assert saved == list(range(batch * (-(-tokens // C) + 1)))


@pytest.mark.parametrize("lengths", PACKED, ids=lambda lengths: "-".join(map(str, lengths))[:30])
def test_not_split_each_sequence_is_one(place: Callable[..., Place], lengths: list[int]) -> None:
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    for n, (start, end) in enumerate(pairwise(bounds)):
        found = place(n, bounds[-1], len(lengths), 0, bounds, True)
        assert (found["start"], found["length"], found["n_sequence"]) == (start, end - start, n)
        assert (found["first"], found["last"]) == (1, 1)


# ---- argument blocks and workspace -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["gated_delta_rule", "delta_rule", "kda"])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_carry_reads_and_writes(op: str, dim: int) -> None:
    prepare, carry, combine, scan = (render(s) for s in _kernels(op, dim))
    names = {source.spec.stage: {f.name for f in source.abi} for source in (carry, combine, scan)}
    assert "ws_carry" in names["carry"] & names["combine"] & names["scan"]
    assert not names["carry"] & {"o", "o_map", "q_map", "ws_q_in", "ws_p", "final_state"}
    assert "initial_state" in names["carry"] & names["scan"]  # a first segment starts from it
    assert names["combine"].isdisjoint({"initial_state", "q_map", "k_map", "v_map", "final_state", "ws_a"})
    for each in names.values():
        assert {"segment_chunks", "sequences", "has_cu_seqlens", "cu_is_int64", "tokens", "value_heads"} <= each
    # All that it reads of the chunks is what `prepare` made.
    made = dict(prepare.workspace)
    assert {n: size for n, size in carry.workspace if n != "carry"}.items() <= made.items()
    states = dict(segment_workspace(scan.spec))
    assert states == {"carry": 4 * dim * (dim + dim) + 128}
    assert dict(carry.workspace)["carry"] == states["carry"]
    assert dict(combine.workspace) == states
    assert {source.limits.chunk for source in (prepare, carry, combine, scan)} == {C}
    assert (carry.limits.threads, carry.limits.value_columns) == (192, 64)
    assert (combine.limits.threads, combine.limits.value_columns) == (2 * dim, 16)
    assert carry.limits.shared_bytes < scan.limits.shared_bytes


@pytest.mark.parametrize("dim", [64, 128])
def test_only_the_last_segment_saves_the_state_at_its_end(dim: int) -> None:
    """What the others end with the next one saves, as the state that it starts from."""
    text = render(KernelSpec("delta_rule", "scan", "bf16", dim, dim, "sm_90a", saves=True)).text
    loop, rest = text.split("if (!end.last) return;")
    assert rest.count("save_state(S, chunks);") == 1
    assert "save_state(S, chunks);" not in loop


def _kernels(op: str, dim: int) -> tuple[KernelSpec, ...]:
    return KernelSpec(op, "scan", "bf16", dim, dim, "sm_90a").kernels(segments=True)
