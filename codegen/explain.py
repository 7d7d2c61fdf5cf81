"""What a call's plan means: per launch the bytes it moves, its operations, its chain and its predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from qla.codegen.ops import OPS
from qla.codegen.planner import CallShape, Choice, choices, split
from qla.codegen.render import render
from qla.codegen.spec import DIVISIBLE, KernelSpec
from qla.targets import TARGETS


@dataclass(frozen=True)
class Launch:
    """One launch.

    Parameters
    ----------
    spec, workgroups : of the kernel.
    chain : chunks (in `combine`, segments) that it takes one after the other; 0 where none waits for another.
    bytes : read and written: each tensor and workspace buffer once.
    flops : floating-point operations; a multiply and an add are two.
    us : predicted microseconds; None where nothing was measured.
    """

    spec: KernelSpec
    workgroups: int
    chain: int
    bytes: int
    flops: int
    us: float | None


@dataclass(frozen=True)
class Explanation:
    """How a call is run, and why so; as text, a table of its launches and the reason."""

    choice: Choice

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """In order."""
        choice, flops = self.choice, _flops(self.choice)
        length = choice.segment_chunks or choice.chunks
        chain = {"prepare": 0, "carry": length, "combine": choice.segments - 1, "scan": length}
        launches = []
        for spec, workgroups in zip(choice.kernels, choice.workgroups, strict=True):
            moved = _moved(choice, spec)
            us = _prepare_us(choice, spec, moved) if spec.stage == "prepare" else choice.us.get(spec.stage)
            launches.append(Launch(spec, workgroups, chain[spec.stage], moved, flops[spec.stage], us))
        return tuple(launches)

    @property
    def bytes(self) -> int:
        """That all launches read and write, the workspace between them included."""
        return sum(launch.bytes for launch in self.launches)

    @property
    def flops(self) -> int:
        """Floating-point operations of all launches."""
        return sum(launch.flops for launch in self.launches)

    @property
    def us(self) -> float | None:
        """Predicted microseconds of all launches; None where nothing was measured that would tell."""
        times = [launch.us for launch in self.launches if launch.us is not None]
        return sum(times) if len(times) == len(self.launches) else None

    @property
    def reason(self) -> str:
        """Why sequences are split as they are, and why workgroups have the column blocks that they have."""
        choice, why = self.choice, self._why_split
        if choice.us and choice.schedule:
            single = split(choice.shape, choice.target, choice.processors, choice.segment_chunks)
            why += f"; scan {choice.schedule}: {choice.us['scan']:.1f} µs, otherwise {single.us['scan']:.1f} µs"
        return why

    @property
    def _why_split(self) -> str:
        choice = self.choice
        if not choice.us:
            what = choice.target if TARGETS[choice.target].costs is None else "loads=strided"
            return f"not split; no time is predicted, since none was measured for {what}"
        if not choice.scan.divisible:
            return f"not split; segments need {DIVISIBLE}"
        every = choices(choice.shape, choice.target, choice.processors)
        others = [other for other in every if other.segment_chunks]
        prepare, predicted = self.launches[0].us or 0.0, "predicted" + " beside prepare" * (self.us is None)
        without = prepare + min(sum(other.us.values()) for other in every if not other.segment_chunks)
        if choice.segment_chunks:
            long, short = (prepare + sum(us.values()) for us in (choice.us, choice.short_us))
            fading = f" ({short:.1f} µs where a state fades within a segment)" if short < long else ""
            return f"split: {long:.1f} µs {predicted}{fading}, without segments {without:.1f} µs"
        if not others:
            return "not split: too few chunks for two segments"
        best = prepare + min(sum(other.us.values()) for other in others)
        return f"not split: {without:.1f} µs {predicted}, with segments {best:.1f} µs at best"

    def table(self) -> list[tuple[str, ...]]:
        """Launches as text, below a line of headings."""
        rows = [(x.spec.name, str(x.workgroups), str(x.chain or "-"), x.us, x.bytes, x.flops) for x in self.launches]
        rows.append(("in all", "", "", self.us, self.bytes, self.flops))
        lines = (
            (name, count, chain, "-" if us is None else f"{us:.1f}", f"{moved / 1e6:.2f}", f"{flops / 1e9:.2f}")
            for name, count, chain, us, moved, flops in rows
        )
        return [("kernel", "workgroups", "chain", "predicted µs", "MB", "GFLOP"), *lines]

    def notes(self) -> tuple[str, str, str]:
        """What the table does not say: the call, its chunks and segments, the reason."""
        choice, s = self.choice, self.choice.shape
        packed = f" in {s.sequences} sequences" if s.sequences else ""
        even = ", if they are split evenly" if s.sequences > 1 else ""
        parts = f", {choice.segments} segments of {choice.segment_chunks}" if choice.segment_chunks else ""
        return (
            f"{s.op}, {s.dtype}, K = {s.dk}, V = {s.dv}: {s.batch} x {s.tokens} tokens{packed}, "
            f"{s.heads} q/k heads, {s.value_heads} value heads",
            f"{choice.target}, {choice.processors} processors: sequences of {choice.chunks} chunks of {choice.chunk} "
            f"tokens{parts}{even}",
            self.reason,
        )

    def __str__(self) -> str:
        rows = self.table()
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        call, chains, reason = self.notes()
        lines = [
            "  ".join([row[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(row[1:], wide[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([call, chains, *lines, reason])


def _lengths(shape: CallShape) -> dict[int, int]:
    """How many sequences have how many tokens; an even split where they are packed."""
    if not shape.sequences:
        return {shape.tokens: shape.batch}
    each, rest = divmod(shape.tokens, shape.sequences)
    return {length: count for length, count in ((each + 1, rest), (each, shape.sequences - rest)) if count}


def _chunks(choice: Choice) -> int:
    """Of all sequences."""
    return sum(count * -(-length // choice.chunk) for length, count in _lengths(choice.shape).items())


def _handed_on(choice: Choice) -> dict[int, int]:
    """How many sequences have how many segments after their first, each of which takes up a state."""
    if not choice.segment_chunks:
        return {0: choice.shape.chains}
    rows = choice.chunk * choice.segment_chunks
    return {max(-(-length // rows) - 1, 0): count for length, count in _lengths(choice.shape).items()}


def _carried(choice: Choice) -> int:
    """Segments with one before and one after them: those of whose start and end no state is known."""
    return sum(max(segments - 1, 0) * count for segments, count in _handed_on(choice).items())


def _prepare_us(choice: Choice, spec: KernelSpec, moved: int) -> float | None:
    """Time of its work, spread evenly, or of its bytes; of one that also writes the factors none was measured."""
    costs, shape, op = TARGETS[choice.target].costs, choice.shape, choice.scan.features
    if costs is None or not choice.us or spec.saves:
        return None
    known = costs.prepare_us.get((op.delta, op.gate))
    if known is None:
        return None
    item = known[max(least for least in known if least <= shape.value_heads // shape.heads)] * shape.dk / 128
    work = _chunks(choice) * shape.value_heads * item / choice.processors
    return max(moved / costs.bandwidth, work) + costs.launch_us


def _flops(choice: Choice) -> dict[str, int]:
    """By stage.

    A chunk of n tokens has, per value head, products with the state of ``2 n K V`` each (K S with the delta rule, Q S,
    K^T V'), and inside it of ``2 n n K`` or ``2 n n V`` each: Q K^T, with the delta rule K K^T, and A K where w is
    returned; P V', and with the delta rule A W. `carry` has all but those of Q and P, with K columns more than V in all
    but the first segment of a sequence, and `combine` one of ``2 K K V`` for each of these.
    """
    shape, chunk, delta = choice.shape, choice.chunk, choice.scan.features.delta
    inside = 2 * shape.dk * (1 + delta + (delta and shape.saves))
    with_state, values = 2 * shape.dk * shape.dv * (2 + delta), 2 * shape.dv * (1 + delta)
    squares = sum(n * (t // chunk * chunk**2 + (t % chunk) ** 2) for t, n in _lengths(shape).items())
    handed_on = sum(segments * count for segments, count in _handed_on(choice).items())
    of_column = 2 * chunk * (2 * shape.dk + chunk) * choice.segment_chunks
    carried = _carried(choice)
    return {
        "prepare": shape.value_heads * squares * inside,
        "carry": shape.value_heads * of_column * (handed_on * shape.dv + carried * shape.dk),
        "combine": shape.value_heads * carried * 2 * shape.dk**2 * shape.dv,
        "scan": shape.value_heads * (shape.batch * shape.tokens * with_state + squares * values),
    }


def _moved(choice: Choice, spec: KernelSpec) -> int:
    """Bytes of a launch: of the tensors in its argument block, and of its workspace.

    Gates and beta count as models hand them over: float32, but in the dtype of q where gates are per channel or none.
    Initial states are left out, final ones not; where chunk states are saved with factors, the last is among them.
    """
    shape, op, source = choice.shape, OPS[choice.shape.op], render(spec)
    size, rows = 4 if shape.dtype == "fp32" else 2, shape.batch * shape.tokens
    values, state = rows * shape.value_heads, shape.value_heads * shape.dk * shape.dv * 4
    narrow = size if op.gate != "head" else 4
    tensors = {
        "q": rows * shape.heads * shape.dk * size,
        "k": rows * shape.heads * shape.dk * size,
        "v": values * shape.dv * size,
        "o": values * shape.dv * size,
        "g": values * {"none": 0, "head": narrow, "channel": shape.dk * narrow}[op.gate],
        "beta": values * (size if op.gate == "none" else 4),
        "cu_seqlens": (shape.sequences + 1) * 8 * bool(shape.sequences),
        "final_state": shape.chains * state * (not (shape.saves and op.delta)),
        "states": shape.batch * (-(-shape.tokens // 64) + 1) * state,
        "A_out": values * 64 * size,
        "w_out": values * shape.dk * size,
        "u_out": values * shape.dv * size,
    }
    handed_on = sum(segments * count for segments, count in _handed_on(choice).items())
    chunks, part = _chunks(choice), 1.0
    if spec.stage == "carry":  # the last segment hands nothing on
        part = handed_on * choice.segment_chunks / chunks
    names = {field.name.removesuffix("_map") for field in source.abi if field.kind in ("ptr", "tensormap")}
    moved = sum(tensors.get(name, 0) for name in names) * part
    for name, each in source.workspace:
        moved += (handed_on if name == "carry" else chunks * part) * shape.value_heads * each
    if spec.stage == "scan":
        moved += handed_on * state
    elif spec.stage != "prepare":  # first segments have no columns of the identity
        moved -= (handed_on - _carried(choice)) * shape.value_heads * shape.dk**2 * 4
    if spec.stage == "combine":  # written where N was
        moved += _carried(choice) * state
    return round(moved)
