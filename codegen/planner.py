"""How many segments a sequence is split into: a function of shapes and of the target's measured costs alone."""

from __future__ import annotations

from dataclasses import dataclass

from qla.codegen.spec import BLOCK_COLUMNS, COMBINE_COLUMNS, KernelSpec
from qla.targets import TARGETS
from qla.targets.base import Costs

MOST_SEGMENTS = 64


@dataclass(frozen=True)
class Split:
    """A way of splitting sequences, and the time that is predicted for it.

    Parameters
    ----------
    segment_chunks : chunks of a segment; 0 where sequences are not split.
    segments : of a sequence.
    scan_us, carry_us, combine_us : predicted times of the stages, in microseconds.
    """

    segment_chunks: int
    segments: int
    scan_us: float
    carry_us: float = 0.0
    combine_us: float = 0.0

    @property
    def us(self) -> float:
        """Predicted time of all of them."""
        return self.scan_us + self.carry_us + self.combine_us


def plan_split(spec: KernelSpec, tokens: int, sequences: int, value_heads: int, processors: int) -> Split:
    """The split with the least predicted time.

    Parameters
    ----------
    spec : of the call's `scan`.
    tokens : of all sequences; they are taken to be of equal length, since lengths are not known to the host.
    sequences, value_heads : their numbers.
    processors : multiprocessors (compute units) of the device.
    """
    costs = TARGETS[spec.target].costs
    chunk = TARGETS[spec.target].chunk[spec.features.gate]
    chunks = -(-(-(-tokens // sequences)) // chunk)
    if costs is None:
        return Split(0, 1, 0.0)
    best = _split(costs, spec, chunks, 1, sequences * value_heads, processors)
    if not spec.divisible:
        return best
    for segments in range(2, min(MOST_SEGMENTS, chunks // 2) + 1):
        split = _split(costs, spec, chunks, segments, sequences * value_heads, processors)
        if split.us < best.us:
            best = split
    return best


def _split(costs: Costs, spec: KernelSpec, chunks: int, segments: int, heads: int, processors: int) -> Split:
    length = -(-chunks // segments)
    segments = -(-chunks // length)
    blocks = spec.dv // BLOCK_COLUMNS
    # Decides for two workgroups of `carry` on a processor, which together take longer than one.
    scan = -(-heads * segments * blocks // processors) * length * costs.scan_chunk_us + costs.launch_us
    if segments == 1:
        return Split(0, 1, scan)
    # The first segment of a sequence begins with a known state, the last one's end is not needed.
    workgroups = heads * ((segments - 1) * blocks + (segments - 2) * (spec.dk // BLOCK_COLUMNS))
    rounds = -(-workgroups // processors)
    carry = (rounds // 2 * costs.carry_pair_chunk_us + rounds % 2 * costs.carry_chunk_us) * length + costs.launch_us
    combine = (segments - 2) * costs.combine_step_us * -(-heads * spec.dv // COMBINE_COLUMNS // processors) + costs.launch_us
    return Split(length, segments, scan, carry, combine)
