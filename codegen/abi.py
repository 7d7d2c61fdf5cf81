"""The argument blocks of the stages: names as `runtime/arguments.py` fills them, and only what the kernel reads."""

from __future__ import annotations

from qla.codegen.ops import Op
from qla.codegen.program import Program
from qla.codegen.spec import Field, KernelSpec
from qla.targets import TARGETS

#: Run-time features of a call, as bits of the member `flags`.
FLAGS = {"L2NORM": 1, "BETA_SIGMOID": 2, "BETA_DOUBLE": 4, "GATE_IN_KERNEL": 8, "LOWER_BOUND": 16}


def flags_of(op: Op) -> dict[str, int]:
    """Those of `FLAGS` that an op's `prepare` looks at."""
    unused = [] if op.delta else ["BETA_SIGMOID", "BETA_DOUBLE"]
    unused += [] if op.gate != "none" else ["GATE_IN_KERNEL", "LOWER_BOUND"]
    return {name: bit for name, bit in FLAGS.items() if name not in unused}


def _strides(name: str, axes: str) -> list[Field]:
    return [Field(f"{name}_stride_{a}", "i64") for a in axes]


def scan_abi(spec: KernelSpec, program: Program, tensor_maps: bool) -> tuple[Field, ...]:
    """Arguments of a `scan`, or of a `carry`, with the program's tiles."""
    carry, segments = spec.stage == "carry", TARGETS[spec.target].segments
    sources = {t.source: t for t in program.tiles.values()}
    direct = [s for s, t in sources.items() if not t.workspace]
    # What comes by tensor map needs neither address nor strides.
    mapped = direct if tensor_maps and spec.loads == "tile" else []
    plain = [s for s in direct if s not in mapped]
    # Bulk loads take neighbouring columns; the host has no other loads than those of any strides.
    axes = "bth" if spec.loads == "tile" and TARGETS[spec.target].language != "c++" else "bthd"
    maps = [f"{s}_map" for s in mapped] + (["o_map"] if tensor_maps and not carry else [])
    pointers = [*plain, *(f"ws_{s}" for s, t in sources.items() if t.workspace)]
    pointers += ["ws_rows"] if program.record else []
    pointers += ["cu_seqlens"]
    wide = [f for s in plain for f in _strides(s, axes)]
    pointers += ["initial_state"]
    if carry:
        pointers += ["ws_carry"]
        wide += _strides("initial", "nhkv")
    else:
        pointers += ["final_state", "o"] + (["states"] if spec.saves else [])
        pointers += ["ws_carry"] if segments else []
        wide += _strides("o", "bth") + _strides("initial", "nhkv") + _strides("final", "nhkv")
    narrow = ["tokens"] + (["heads"] if any(t.by == "head" for t in sources.values()) else [])
    narrow += ["value_heads", "has_cu_seqlens", "cu_is_int64"]
    narrow += ["sequences", "segment_chunks"] if segments else []
    return (
        *(Field(m, "tensormap") for m in maps),
        *(Field(p, "ptr") for p in pointers),
        *wide,
        *(Field(n, "i32") for n in narrow),
    )


def prepare_abi(spec: KernelSpec, buffers: tuple[tuple[str, int], ...]) -> tuple[Field, ...]:
    """Arguments of a `prepare` that fills these workspace buffers."""
    op = spec.features
    tensors = ["q", "k"] + (["v"] if spec.saves and op.delta else [])
    pointers = [*tensors, "cu_seqlens", *(f"ws_{name}" for name, _ in buffers)]
    wide = [f for t in tensors for f in _strides(t, "bthd")]
    narrow = ["tokens", "sequences", "heads", "value_heads", "has_cu_seqlens", "cu_is_int64", "flags"]
    takes_items = TARGETS[spec.target].asynchronous and op.gate != "channel"
    narrow += ["items", "heads_at_once", "group", "passes", "stride"] * takes_items + ["apart"] * (
        takes_items and op.delta
    )
    numbers = ["scale"]
    if op.gate != "none":
        pointers += ["g", "A_log", "dt_bias"]
        wide += _strides("g", "bthd" if op.gate == "channel" else "bth")
        narrow += ["g_type", "A_log_type", "dt_bias_type"]
        numbers += ["lower_bound"]
    if op.delta:
        pointers += ["beta"]
        wide += _strides("beta", "bth")
        narrow += ["beta_type"]
    if spec.saves and op.delta:
        pointers += ["A_out", "w_out", "u_out"]
    maps: list[str] = []
    if takes_items and spec.loads == "tile" and not (spec.saves and op.delta):
        maps, pointers, wide = ["q_map", "k_map"], pointers[2:], wide[8:]
    return (
        *(Field(m, "tensormap") for m in maps),
        *(Field(p, "ptr") for p in pointers),
        *wide,
        *(Field(n, "i32") for n in narrow),
        *(Field(n, "f32") for n in numbers),
    )


def combine_abi() -> tuple[Field, ...]:
    """Arguments of a `combine`."""
    narrow = ["tokens", "value_heads", "has_cu_seqlens", "cu_is_int64", "sequences", "segment_chunks"]
    return (
        *(Field(p, "ptr") for p in ("cu_seqlens", "ws_carry")),
        *(Field(n, "i32") for n in narrow),
    )


def segment_workspace(spec: KernelSpec) -> tuple[tuple[str, int], ...]:
    """Workspace per (segment, value head) in bytes: what each segment makes of a state, then the state at its end."""
    # N and M, then whether M is anything but zero, in a line of its own: rows begin where lines do.
    return (("carry", spec.dk * (spec.dv + spec.dk) * 4 + 128),)
