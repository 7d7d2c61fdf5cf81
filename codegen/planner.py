"""How a call is run: into how many segments its sequences are split, how many column blocks a workgroup of `scan` has,
and with which launches.

`plan_call` is a pure function of shapes and of a target's data. It is given no tensors, so it reads no values: a call
with other sequence lengths in `cu_seqlens` is planned the same, and nothing waits for a device. What explains a choice
to people (bytes, operations, the time of `prepare`, which no choice changes) is in `qla.codegen.explain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qla.codegen.spec import COMBINE_COLUMNS, Dtype, KernelSpec, Loads, Stage
from qla.errors import UnsupportedError
from qla.targets import TARGETS, Costs

MOST_SEGMENTS = 64


@dataclass(frozen=True)
class CallShape:
    """All of a call that planning looks at.

    Parameters
    ----------
    op, dtype, dk, dv, loads, saves : as in `KernelSpec`.
    batch, tokens : B and T of q `[B, T, H, K]` and v `[B, T, HV, V]`.
    heads, value_heads : H and HV, a multiple of H.
    sequences : packed into the one row of tokens (B = 1); 0 where there is no `cu_seqlens`, and each row is one.

    Raises
    ------
    UnsupportedError
        A number that no call has, or that leaves nothing to run. What `KernelSpec` refuses is refused by `plan_call`.
    """

    op: str
    dtype: Dtype
    dk: int
    dv: int
    batch: int
    tokens: int
    heads: int
    value_heads: int
    sequences: int = 0
    loads: Loads = "tile"
    saves: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "heads", "value_heads"):
            if getattr(self, name) < 1:
                raise UnsupportedError(name, getattr(self, name), "1 or more")
        if self.value_heads % self.heads:
            raise UnsupportedError("value_heads", self.value_heads, f"a multiple of heads = {self.heads}")
        if self.sequences < 0:
            raise UnsupportedError("sequences", self.sequences, "the number of packed sequences, or 0 for none")
        if self.sequences and self.batch != 1:
            raise UnsupportedError("batch", self.batch, "1 with packed sequences")

    @property
    def chains(self) -> int:
        """Sequences, each of which is a chain of chunks for every value head."""
        return self.sequences or self.batch

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; of an even split where they are packed, since lengths are not known."""
        return -(-self.tokens // self.sequences) if self.sequences else self.tokens

    def places(self, tokens: int) -> int:
        """Pieces of so many tokens, enough for every split into that many sequences.

        With `cu_seqlens`, sequence n starts at place ``cu_seqlens[n] // tokens + n``: no length is needed for that.
        """
        return self.tokens // tokens + self.sequences if self.sequences else self.batch * -(-self.tokens // tokens)


@dataclass(frozen=True)
class Deal:
    """How `prepare` is dealt out. An item is a chunk and some value heads of a group, which share a q and a k head.

    Parameters
    ----------
    heads : value heads of an item, at most.
    passes : items of a chunk and a group.
    items : of the call.
    workgroups : of the launch.
    apart : matrices that are inverted have a place apart from the tiles of q and k, so that those of a workgroup's next
        item can be loaded early; otherwise a workgroup has one item, and asks for tiles of a later one.
    stride : from a workgroup's item to that next or later one.
    """

    heads: int
    passes: int
    items: int
    workgroups: int
    apart: bool
    stride: int


@dataclass(frozen=True)
class Choice:
    """How a call is run.

    Parameters
    ----------
    shape, target, processors : what was asked.
    segment_chunks : chunks of a segment; 0 where sequences are not split.
    schedule : of `scan`, as in `KernelSpec`.
    us : predicted microseconds of the stages whose time depends on that, where every state reaches the end of its
        segment, and as if nothing were saved; empty where nothing was measured.
    short_us : the same where decays are such that a segment's end tells only of its last chunks.
    """

    shape: CallShape
    target: str
    processors: int
    segment_chunks: int
    schedule: str
    us: Mapping[Stage, float]
    short_us: Mapping[Stage, float]

    @property
    def cost(self) -> float:
        """What the least is chosen of: the product of both times, since values of gates are not known."""
        return sum(self.us.values()) * sum(self.short_us.values())

    @property
    def scan(self) -> KernelSpec:
        """The kernel that walks the chunks."""
        return _scan(self.shape, self.target, self.schedule)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """In the order of their launches."""
        return self.scan.kernels(segments=bool(self.segment_chunks))

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return TARGETS[self.target].chunk[self.scan.features.gate]

    @property
    def chunks(self) -> int:
        """Of the longest sequence."""
        return -(-self.shape.longest // self.chunk)

    @property
    def segments(self) -> int:
        """Of the longest sequence."""
        return -(-self.chunks // self.segment_chunks) if self.segment_chunks else 1

    @property
    def slots(self) -> int:
        """Chunks that the workspace has room for."""
        return self.shape.places(self.chunk)

    @property
    def segment_slots(self) -> int:
        """Segments that workgroups and the workspace have room for; sequences where they are not split."""
        rows = self.chunk * self.segment_chunks
        return self.shape.places(rows) if rows else self.shape.chains

    @property
    def deal(self) -> Deal:
        """What workgroups of `prepare` take."""
        return _deal(self)

    @property
    def workgroups(self) -> tuple[int, ...]:
        """Of each launch."""
        shape, columns = self.shape, _columns(self.scan)
        carry_columns = TARGETS[self.target].columns(shape.dv)
        counts = {
            "prepare": self.deal.workgroups,
            "carry": self.segment_slots * shape.value_heads * ((shape.dv + shape.dk) // carry_columns),
            "combine": shape.chains * shape.value_heads * (shape.dv // COMBINE_COLUMNS),
            "scan": self.segment_slots * shape.value_heads * (shape.dv // columns),
        }
        return tuple(counts[spec.stage] for spec in self.kernels)


def plan_call(shape: CallShape, target: str, processors: int) -> Choice:
    """What has the least `Choice.cost`; of equals that with the fewest segments, and with the default schedule.

    Nothing is split where nothing was measured. Packed sequences are taken to be of equal length.

    Parameters
    ----------
    shape : of the call.
    target : key of `qla.targets.TARGETS`.
    processors : multiprocessors, compute units or cores of the device.

    Raises
    ------
    UnsupportedError
        The target has no kernels for this.
    """
    return min(choices(shape, target, processors), key=lambda choice: choice.cost)


def choices(shape: CallShape, target: str, processors: int) -> list[Choice]:
    """What `plan_call` chooses from: not split, then segments from long to short, each with every schedule."""
    whole = split(shape, target, processors)
    schedules = whole.scan.schedules if whole.us else ("",)
    most = min(MOST_SEGMENTS, whole.chunks // 2) if whole.us and whole.scan.divisible else 1
    lengths = dict.fromkeys(-(-whole.chunks // segments) for segments in range(2, most + 1))
    return [split(shape, target, processors, length, name) for length in (0, *lengths) for name in schedules]


def split(shape: CallShape, target: str, processors: int, segment_chunks: int = 0, schedule: str = "") -> Choice:
    """The call with segments of so many chunks, whatever time that takes; 0 does not split sequences."""
    if processors < 1:
        raise UnsupportedError("processors", processors, "1 or more")
    scan = _scan(shape, target, schedule)
    costs = TARGETS[target].costs
    if costs is None or shape.loads != "tile":
        return Choice(shape, target, processors, segment_chunks, schedule, {}, {})
    chunks = -(-shape.longest // TARGETS[target].chunk[scan.features.gate])
    heads, gate = shape.chains * shape.value_heads, scan.features.gate
    long, short = (
        _predict(costs, scan, heads, chunks, segment_chunks, processors, reach)
        for reach in (chunks, costs.reach_chunks.get(gate, chunks))
    )
    return Choice(shape, target, processors, segment_chunks, schedule, long, short)


def _deal(choice: Choice) -> Deal:
    """The fewest value heads at once with which all workgroups run at once; else as many as there are matrices for."""
    shape, op, facts = choice.shape, choice.scan.features, TARGETS[choice.target].facts
    group = shape.value_heads // shape.heads
    at_once = facts.get("prepare_workgroups", 0) * choice.processors
    if op.gate == "channel" or not at_once:
        heads = 1 if op.gate == "channel" else min(group, facts.get("teams", 1))
        items = choice.slots * shape.heads * -(-group // heads)
        return Deal(heads, -(-group // heads), items, items, False, 0)
    factors = shape.saves and op.delta  # their products need the tiles, and take registers
    if factors or shape.loads != "tile":
        at_once //= 2
    most = -(-group // -(-group // (2 if factors else facts["teams"])))
    for heads in range(1, most + 1):
        passes = -(-group // heads)
        items = choice.slots * shape.heads * passes
        if items <= at_once:
            break
    apart = not op.delta or factors or heads == 1
    return Deal(heads, passes, items, min(items, at_once) if apart else items, apart, at_once)


def _scan(shape: CallShape, target: str, schedule: str) -> KernelSpec:
    return KernelSpec(shape.op, "scan", shape.dtype, shape.dk, shape.dv, target, shape.loads, shape.saves, schedule)


def _columns(scan: KernelSpec) -> int:
    """Value columns of a workgroup of `scan`."""
    target = TARGETS[scan.target]
    columns = target.columns(scan.dv)
    return columns * min(target.schedule(scan.schedule).streams, scan.dv // columns)


def _predict(
    costs: Costs, scan: KernelSpec, heads: int, chunks: int, segment_chunks: int, processors: int, reach: int
) -> dict[Stage, float]:
    """Times of the stages with so many sequences times value heads; chunks of `scan` go one after the other.

    A state matters for `reach` chunks.
    """
    length, gate = segment_chunks or chunks, scan.features.gate
    segments, columns = -(-chunks // length), TARGETS[scan.target].columns(scan.dv)
    workgroups = heads * segments * (scan.dv // _columns(scan))
    scan_us = {**costs.scan_chunk_us, **(costs.pair_chunk_us if _columns(scan) > columns else {})}
    alone, full = scan_us[gate]
    chunk_us = alone + (full - alone) * min(1, workgroups / processors)
    us: dict[Stage, float] = {"scan": -(-workgroups // processors) * length * chunk_us + costs.launch_us}
    if not segment_chunks:
        return us
    # Two workgroups of `carry` may run on a processor at the same time, which takes longer than one. The last segment
    # has none: nothing comes after it. The first one starts from a known state and has those of values only, as all
    # have whose start does not reach their end.
    carries, step_us = (segments - 1) * (scan.dv // columns), costs.combine_short_step_us
    if reach >= length:
        carries, step_us = carries + (segments - 2) * (scan.dk // columns), costs.combine_step_us
    rounds = -(-heads * carries // processors)
    pairs, single = divmod(rounds, 2)
    alone, two = costs.carry_chunk_us[gate]
    us["carry"] = (pairs * two + single * alone) * min(length, reach) + costs.launch_us
    rounds = -(-heads * (scan.dv // COMBINE_COLUMNS) // processors)
    us["combine"] = rounds * (segments - 2) * step_us + costs.launch_us
    return us
