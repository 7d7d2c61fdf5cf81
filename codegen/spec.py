"""What a kernel is (`KernelSpec`) and what rendering one gives (`Source`).

Both are frozen values: rendering is a pure function between them, so a spec names a kernel on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from qla.codegen.ops import OPS, Op
from qla.errors import ScheduleError, UnsupportedError

if TYPE_CHECKING:
    from qla.targets import Schedule

Stage = Literal["prepare", "carry", "combine", "scan"]
Dtype = Literal["bf16", "fp16", "fp32"]
Loads = Literal["tile", "strided"]
FieldKind = Literal["tensormap", "ptr", "i64", "i32", "f32"]

STAGES: tuple[Stage, ...] = ("prepare", "carry", "combine", "scan")
SEGMENT_STAGES: tuple[Stage, ...] = ("carry", "combine")
HEAD_DIMS = (64, 128)
COMBINE_COLUMNS = 16  # of a workgroup of `combine`: as many as a product has rows
DIVISIBLE = "a delta op, K = V, loads=tile, and a target with segments"
SUFFIX = {"cuda": ".cu", "hip": ".hip", "c++": ".cpp"}  # of a source file, by language
FIELD_BYTES: dict[str, int] = {"tensormap": 128, "ptr": 8, "i64": 8, "i32": 4, "f32": 4}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of the family.

    Parameters
    ----------
    op : key of `qla.codegen.ops.OPS`, e.g. ``"gated_delta_rule"``.
    stage : ``"prepare"`` (parallel over chunks) or ``"scan"`` (the chain over chunks); where sequences are split into
        segments also ``"carry"`` (what each segment makes of a state) and ``"combine"`` (the state where each begins).
    dtype : of q, k, v and o.
    dk, dv : head dims of q/k and of v.
    target : key of `qla.targets.TARGETS`.
    loads : ``"tile"`` for rows the target's bulk loads can address (16-byte aligned), ``"strided"`` for any strides.
        The host reads any strides with ``"tile"`` too, and has no other.
    saves : also write what the published chunk ops return (chunk states; w, u and A of delta ops).
    schedule : of `scan`: name of one of the target's schedules; empty takes the target's default.

    Raises
    ------
    UnsupportedError
        A field has a value that is not supported.
    ScheduleError
        The target has no schedule of that name.
    """

    op: str
    stage: Stage
    dtype: Dtype
    dk: int
    dv: int
    target: str
    loads: Loads = "tile"
    saves: bool = False
    schedule: str = ""

    def __post_init__(self) -> None:
        from qla.targets import TARGETS

        if self.op not in OPS:
            raise UnsupportedError("op", self.op, f"one of {', '.join(OPS)}")
        if self.target not in TARGETS:
            raise UnsupportedError("target", self.target, f"one of {', '.join(TARGETS)}")
        if self.stage not in STAGES:
            raise UnsupportedError("stage", self.stage, f"one of {', '.join(STAGES)}")
        for name in ("dk", "dv"):
            if getattr(self, name) not in HEAD_DIMS:
                raise UnsupportedError(name, getattr(self, name), f"a head dim of {HEAD_DIMS}")
        target = TARGETS[self.target]
        if self.dtype not in target.dtypes:
            raise UnsupportedError("dtype", self.dtype, f"{', '.join(target.dtypes)} on {self.target}")
        if self.loads not in target.loads:
            raise UnsupportedError("loads", self.loads, f"{', '.join(target.loads)} on {self.target}")
        if self.saves and not OPS[self.op].saves:
            saving = ", ".join(name for name, op in OPS.items() if op.saves)
            raise UnsupportedError("saves", f"True for {self.op}", f"the ops {saving}")
        if self.stage in SEGMENT_STAGES and not self.divisible:
            what = f"{self.stage} for {self.op} with K = {self.dk}, V = {self.dv}, loads={self.loads} on {self.target}"
            raise UnsupportedError("stage", what, f"prepare and scan; segments need {DIVISIBLE}")
        if self.schedule and self.stage != "scan":
            raise UnsupportedError("schedule", f"{self.schedule} for {self.stage}", "the stage scan")
        known = [schedule.name for schedule in target.schedules]
        if self.schedule and self.schedule not in known:
            raise ScheduleError(f"{self.target} has no schedule `{self.schedule}`; it has {', '.join(known)}")
        schedule = target.schedule(self.schedule)
        if self.schedule and not self._fits(schedule):
            options = f"V = {self.dv}, loads={self.loads}, saves={self.saves}"
            gates, columns = ", ".join(schedule.gates), target.columns(self.dv) * schedule.streams
            only = f"gates {gates}, V = {columns}, loads=tile, saves=False"
            raise UnsupportedError("schedule", f"{self.schedule} for {self.op} with {options}", only)

    def _fits(self, schedule: Schedule) -> bool:
        """Whether a schedule has kernels like this one: one with more column blocks than the default has plain ones."""
        from qla.targets import TARGETS

        target = TARGETS[self.target]
        more = schedule.streams > target.schedules[0].streams
        plain = self.loads == "tile" and not self.saves
        plain &= self.features.gate in schedule.gates and self.dv % (target.columns(self.dv) * schedule.streams) == 0
        return plain or not more

    def canonical(self) -> KernelSpec:
        """The one spec among those with the same code that lists, names and loaded kernels go by.

        `prepare` never looks at states, and at values only where it writes the factors of a delta op. What is saved is
        written by `prepare` and `scan` alone. A default schedule has no name of its own.
        """
        from qla.targets import TARGETS

        if self.stage == "scan":
            default = self.schedule == TARGETS[self.target].schedules[0].name
            return replace(self, schedule="") if default else self
        if self.stage == "combine":  # states are float32 whatever the op
            return replace(self, op="gated_delta_rule", dtype="bf16", saves=False)
        if self.stage == "carry":
            return replace(self, saves=False)
        factors = self.saves and self.features.delta
        return replace(self, saves=factors, dv=self.dv if factors else self.dk)

    @property
    def divisible(self) -> bool:
        """Whether a call can be split into segments: see `SEGMENT_STAGES`."""
        from qla.targets import TARGETS

        return TARGETS[self.target].segments and self.features.delta and self.loads == "tile" and self.dk == self.dv

    @property
    def schedules(self) -> tuple[str, ...]:
        """What a call with this `scan` can be run with: the default, and more column blocks to a workgroup."""
        from qla.targets import TARGETS

        default, *others = TARGETS[self.target].schedules
        return ("", *(x.name for x in others if x.streams > default.streams and self._fits(x)))

    def kernels(self, segments: bool = False) -> tuple[KernelSpec, ...]:
        """The kernels of a call with this `scan`, as canonical specs in the order of their launches."""
        stages = STAGES if segments else ("prepare", "scan")
        return tuple(replace(self, stage=s, schedule=self.schedule * (s == "scan")).canonical() for s in stages)

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
    tile_bytes, matrix_bytes : of the shared memory, where a launch chooses how many value heads a workgroup of
        `prepare` works on at once: those of q and k, and those of a matrix to be inverted for each head.
    """

    threads: int
    shared_bytes: int
    value_columns: int
    chunk: int
    tile_bytes: int = 0
    matrix_bytes: int = 0

    def shared_for(self, heads: int, apart: bool) -> int:
        """Bytes of dynamic shared memory of a launch with so many value heads at once: see `planner.Deal`."""
        if not self.matrix_bytes:
            return self.shared_bytes
        others = self.shared_bytes - max(self.tile_bytes + 2 * self.matrix_bytes, 4 * self.matrix_bytes)
        matrices = heads * self.matrix_bytes
        return others + (self.tile_bytes + matrices if apart else max(self.tile_bytes, matrices))


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
