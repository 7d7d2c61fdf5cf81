"""Where the buffers of a `scan` lie in shared memory, and what a `prepare` needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qla.codegen.ops import Op
from qla.codegen.program import Program, Vector
from qla.codegen.schedule import Ring
from qla.errors import ScheduleError

_ALIGN = 1024  # of a tile, for the 128-byte swizzle
MATRIX_BYTES, _ROOM_BYTES = 10240, 2048  # of a matrix to be inverted, and of 16 rows of one on their way to memory


@dataclass
class SharedLayout:
    """Byte offsets into shared memory, by tile or ring name."""

    offsets: dict[str, int] = field(default_factory=dict)
    stride: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    workspace_bytes: dict[str, int] = field(default_factory=dict)
    barriers: dict[str, int] = field(default_factory=dict)
    output: int = 0
    output_barriers: int = 0
    tail_barrier: int = 0
    total: int = 0


def record_layout(record: dict[str, Vector], half_bytes: int = 2) -> tuple[dict[str, int], int]:
    """Byte offset of each vector of the record, and the record's size (a multiple of 16, as bulk copies need).

    `half_bytes` is the size of a 16-bit number; 4 where q, k, v are float32.
    """
    offsets, at = {}, 0
    for vector in record.values():
        offsets[vector.name] = at
        at += -(-vector.length * (half_bytes if vector.kind == "half" else 4) // 16) * 16
    return offsets, at


def shared_layout(program: Program, rings: Sequence[Ring], streams: int, chunk: int, limit: int) -> SharedLayout:
    """Lay out tiles, the output buffer, the record and the barriers; raise where they exceed the limit."""
    layout, at = SharedLayout(), 0
    _, record_bytes = record_layout(program.record)
    for ring in rings:
        first = at
        layout.workspace_bytes[ring.name] = record_bytes if "rows" in ring.tiles else 0
        for tile in (program.tiles[t] for t in ring.tiles if t != "rows"):
            size = tile.rows * tile.cols * 2
            layout.offsets[tile.name] = at
            at += size * (streams if tile.by == "columns" else 1)
            layout.workspace_bytes[ring.name] += size if tile.workspace else 0
        layout.stride[ring.name] = at - first
        layout.bytes[ring.name] = at - first + (record_bytes if "rows" in ring.tiles else 0)
        at = first + (at - first) * ring.depth
    layout.output = at
    at += streams * chunk * 128
    for ring in rings:
        if "rows" in ring.tiles:
            layout.offsets["rows"] = at
            at += record_bytes * ring.depth
    for ring in rings:
        layout.barriers[ring.name] = at
        at += 16 * ring.depth
    layout.output_barriers, at = at, at + 16 * streams
    layout.tail_barrier, at = at, at + 8
    layout.total = at
    if at > limit:
        depths = ", ".join(f"{' '.join(r.tiles)}: {r.depth}" for r in rings)
        raise ScheduleError(
            f"{at} bytes of shared memory exceed the target's {limit} (rings {depths}; {streams} streams)"
        )
    return layout


def static_layout(
    program: Program, rings: Sequence[Ring], pad: int, limit: int, turned: dict[str, bool]
) -> SharedLayout:
    """Lay out tiles and the record one after the other, each once; raise where they exceed the limit.

    Rows of a tile are followed by `pad` unused numbers. A column block's own tiles do not pass through shared memory.
    Those that are `turned` lie there by columns, and if True by rows before.
    """
    layout = SharedLayout()
    for ring in rings:
        if ring.depth != 1:
            raise ScheduleError(f"ring {' '.join(ring.tiles)}: {ring.depth} buffers; this target has one of each tile")
    for tile in program.tiles.values():
        if tile.by != "columns":
            layout.offsets[tile.name] = layout.total
            sizes = [tile.cols * (tile.rows + pad)] * (tile.name in turned)
            sizes += [tile.rows * (tile.cols + pad)] * turned.get(tile.name, True)
            layout.total += -(-max(sizes) * 2 // 16) * 16
    layout.offsets["rows"] = layout.total
    layout.total += record_layout(program.record)[1]
    if layout.total > limit:
        raise ScheduleError(f"{layout.total} bytes of shared memory exceed the target's {limit}")
    return layout


def prepare_shared_bytes(
    op: Op, chunk: int, dk: int, dv: int, pad: int, teams: int, saves: bool, reach: bool, keys_alone: bool = False
) -> int:
    """Bytes of what the threads of a `prepare` workgroup share (`struct Shared` of its template).

    Rows of a tile are followed by `pad` unused numbers; several teams invert a matrix each, in blocks. With channel
    gates several teams keep decays in registers and share decayed keys: 8 rows for each pair of blocks of 8; without,
    queries may be in registers (`keys_alone`).
    """
    blocks, matrix = chunk // 16, chunk * (chunk + 4) * 4
    lower = (MATRIX_BYTES if teams > 1 else matrix) * op.delta
    tiles = 2 * chunk * (dk + pad) * 2
    if op.gate == "channel" and teams > 1:
        rows = chunk // 8
        total = tiles + rows * (rows - 1) // 2 * 8 * dk * 2 + lower + 2 * rows * dk * 4 + chunk * 4 * op.delta
    elif op.gate == "channel":
        total = max(tiles, lower) + chunk * (dk + 8) * 4 + blocks * dk * 4 + matrix * (1 + op.delta)
        total += chunk * 4 * op.delta
    else:
        total = max(tiles // (1 + keys_alone), lower)
        if teams > 1:
            total = 4 * _ROOM_BYTES + 80
        total += teams * chunk * 4 * (2 * (op.gate == "head") + op.delta * (1 + (teams > 1)))
    total = -(-(total + (2 + reach) * chunk * 4) // _ALIGN) * _ALIGN
    if op.gate == "channel" or teams == 1:
        return total
    # Two matrices beside the tiles, or four in their place.
    return total + chunk * dv * 2 * (saves and op.delta) + max(tiles + 2 * lower, 4 * lower)
