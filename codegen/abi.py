"""The argument blocks of the stages: names as `runtime/arguments.py` fills them."""

from __future__ import annotations

from qla.codegen.program import Program
from qla.codegen.spec import Field, KernelSpec


def _strides(name: str, axes: str) -> list[Field]:
    return [Field(f"{name}_stride_{a}", "i64") for a in axes]


def scan_abi(spec: KernelSpec, program: Program, tensor_maps: bool) -> tuple[Field, ...]:
    """Arguments of a `scan` with the program's tiles."""
    sources = {t.source: t for t in program.tiles.values()}
    direct = [s for s, t in sources.items() if not t.workspace]
    maps = [f"{s}_map" for s in direct] if tensor_maps and spec.loads == "tile" else []
    maps += ["o_map"] if tensor_maps else []
    pointers = [*direct, *(f"ws_{s}" for s, t in sources.items() if t.workspace)]
    pointers += ["ws_rows"] if program.record else []
    pointers += ["cu_seqlens", "initial_state", "final_state", "o"] + (["states"] if spec.saves else [])
    wide = [f for s in direct for f in _strides(s, "bthd")] + _strides("o", "bth")
    wide += _strides("initial", "nhkv") + _strides("final", "nhkv")
    narrow = ["batch", "tokens", "sequences", "heads", "value_heads", "has_cu_seqlens", "cu_is_int64"]
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
    narrow = ["batch", "tokens", "sequences", "heads", "value_heads", "has_cu_seqlens", "cu_is_int64", "flags", "slots"]
    if op.gate != "none":
        pointers += ["g", "A_log", "dt_bias"]
        wide += _strides("g", "bthd" if op.gate == "channel" else "bth")
        narrow += ["g_type", "A_log_type", "dt_bias_type"]
    if op.delta:
        pointers += ["beta"]
        wide += _strides("beta", "bth")
        narrow += ["beta_type"]
    if spec.saves and op.delta:
        pointers += ["A_out", "w_out", "u_out"]
    return (
        *(Field(p, "ptr") for p in pointers),
        *wide,
        *(Field(n, "i32") for n in narrow),
        Field("scale", "f32"),
        Field("lower_bound", "f32"),
    )
