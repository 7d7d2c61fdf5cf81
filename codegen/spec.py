"""What a kernel is (`KernelSpec`) and what rendering one gives (`Source`).

Both are frozen values: rendering is a pure function between them, so a spec names a kernel on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qla.codegen.ops import OPS, Op
from qla.errors import UnsupportedError

Stage = Literal["prepare", "scan"]
Dtype = Literal["bf16", "fp16", "fp32"]
FieldKind = Literal["tensormap", "ptr", "i64", "i32", "f32"]

HEAD_DIMS = (64, 128)
FIELD_BYTES: dict[str, int] = {"tensormap": 128, "ptr": 8, "i64": 8, "i32": 4, "f32": 4}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of the family.

    Parameters
    ----------
    op : key of `qla.codegen.ops.OPS`, e.g. ``"gated_delta_rule"``.
    stage : ``"prepare"`` (parallel over chunks) or ``"scan"`` (the chain over chunks).
    dtype : of q, k, v and o.
    dk, dv : head dims of q/k and of v.
    target : key of `qla.targets.TARGETS`.
    loads : ``"tile"`` for rows the target's bulk loads can address (16-byte aligned), ``"strided"`` for any strides.
    saves : also write what the published chunk ops return (chunk states; w, u and A of delta ops).
    schedule : name of one of the target's schedules; empty takes the target's default.
    """

    op: str
    stage: Stage
    dtype: Dtype
    dk: int
    dv: int
    target: str
    loads: Literal["tile", "strided"] = "tile"
    saves: bool = False
    schedule: str = ""

    def __post_init__(self) -> None:
        from qla.targets import TARGETS

        if self.op not in OPS:
            raise UnsupportedError("op", self.op, f"one of {', '.join(OPS)}")
        if self.target not in TARGETS:
            raise UnsupportedError("target", self.target, f"one of {', '.join(TARGETS)}")
        if self.stage not in ("prepare", "scan"):
            raise UnsupportedError("stage", self.stage, "'prepare' or 'scan'")
        for name in ("dk", "dv"):
            if getattr(self, name) not in HEAD_DIMS:
                raise UnsupportedError(name, getattr(self, name), f"a head dim of {HEAD_DIMS}")
        supported = TARGETS[self.target].dtypes
        if self.dtype not in supported:
            raise UnsupportedError("dtype", self.dtype, f"{', '.join(supported)} on {self.target}")

    @property
    def features(self) -> Op:
        """The op's features (delta or not, gate kind)."""
        return OPS[self.op]

    @property
    def name(self) -> str:
        """Entry symbol and file stem: everything that distinguishes the kernel, in reading order."""
        parts = [self.op, self.stage, self.dtype, f"k{self.dk}", f"v{self.dv}"]
        parts += [self.loads] if self.loads != "tile" else []
        parts += ["saves"] if self.saves else []
        parts += [self.schedule] if self.schedule else []
        return "_".join(parts)


@dataclass(frozen=True)
class Field:
    """One member of the kernel's argument block; `kind` fixes its size and alignment."""

    name: str
    kind: FieldKind


@dataclass(frozen=True)
class Limits:
    """What the launch must respect.

    Parameters
    ----------
    threads : of one workgroup.
    shared_bytes : dynamic shared memory (CUDA) or static LDS (HIP) of one workgroup; 0 on host.
    value_columns : columns of the value dimension that one workgroup owns (scan), 0 where it owns all.
    chunk : tokens of one chunk.
    """

    threads: int
    shared_bytes: int
    value_columns: int
    chunk: int


@dataclass(frozen=True)
class Source:
    """A rendered kernel: self-contained text and what is needed to build and launch it.

    `abi` lists the members of the one argument block (a C struct, members in that order, natural alignment; tensor
    maps first at 64-byte alignment). `workspace` gives, per workspace buffer, its bytes per (chunk, head).
    """

    spec: KernelSpec
    entry: str
    language: Literal["cuda", "hip", "c++"]
    text: str
    abi: tuple[Field, ...]
    limits: Limits
    workspace: tuple[tuple[str, int], ...] = field(default=())
