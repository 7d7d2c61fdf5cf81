"""A stated model of how long a kernel takes, from its machine code, its registers and its chip.

For one chunk of one workgroup (all of it in `prepare`) the cycles of each part of a processor are added up:

    matrix, vector   of a scheduler (SIMD): those of all waves, spread evenly
    issue            of a scheduler: one instruction per `issue_cycles`. On CDNA each wave has such turns of its own, so
                     that with more waves the time per chunk falls
    shared, L1       of the processor: those of all waves
    memory           bytes of tensors and workspace, over the share of the bandwidth of each processor that has work

The largest is the *floor*, and names the *bound*: so long it takes if all else happens beside it. A wave alone on its
scheduler waits for each result instead: it takes the *sum* of matrix, of issue or vector (whichever is more) and of
shared. With w waves on a scheduler, what exceeds the floor is taken to be hidden but for 1/w:

    time = max(floor + (sum - floor) / w, memory)

All waves are taken to go the longest way. Not in it: bank conflicts, latencies of memory, barriers, the caches, clocks
below the peak, and launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from qla.codegen.instruction_costs import Cycles
from qla.targets.chips import Chip

_WARPGROUP = 128


@dataclass(frozen=True)
class Occupancy:
    """How many workgroups fit on a processor at once, and waves on each of its schedulers."""

    workgroups: int
    waves: int


def occupancy(chip: Chip, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """What registers and shared memory leave room for.

    The waves of a workgroup are dealt to the schedulers in turn.

    Parameters
    ----------
    chip : where it runs.
    threads, shared_bytes : of a workgroup.
    registers : vector registers of a thread; on CDNA the unified count.
    """
    waves = -(-threads // chip.lanes)
    per_scheduler = -(-waves // chip.schedulers)
    fits = min(chip.registers // _up(max(registers, 1), chip.register_granule), chip.most_waves)
    most = fits // per_scheduler
    asked = _up(shared_bytes, chip.shared_granule) + chip.shared_reserved
    most = min(most, chip.most_workgroups, chip.shared_bytes // asked if asked else most)
    return Occupancy(most, most * per_scheduler)


def _up(number: int, granule: int) -> int:
    return -(-number // granule) * granule


@dataclass(frozen=True)
class Time:
    """Of one chunk of one workgroup, on a processor that has `workgroups` of them.

    Parameters
    ----------
    parts : cycles by part of the processor; memory included.
    floor, sum : as in the model.
    cycles : the time.
    us : the same in microseconds.
    """

    parts: dict[str, float]
    floor: float
    sum: float
    cycles: float
    us: float

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def time_of(cycles: Cycles, chip: Chip, waves: int, workgroups: int, moved: float, busy: int) -> Time:
    """Time per chunk and workgroup.

    Parameters
    ----------
    cycles : of one wave for one chunk.
    chip : where it runs.
    waves : of a workgroup, that do this work.
    workgroups : on the processor at once.
    moved : bytes between the workgroup and memory for the chunk.
    busy : processors that have work and share the bandwidth.
    """
    per_scheduler = waves / chip.schedulers
    together = max(1.0, workgroups * per_scheduler)
    turns = per_scheduler if chip.issues_shared else per_scheduler / together
    parts = {
        "matrix": cycles.matrix * per_scheduler,
        "vector": cycles.vector * per_scheduler,
        "issue": cycles.issue * turns,
        "LDS" if chip.lanes == 64 else "shared": cycles.shared * waves,
        "L1": cycles.l1 * waves,
    }
    floor = max(parts.values())
    # A wave's own turns are not divided: alone, it waits for all of them.
    alone = max(cycles.vector, cycles.issue) * per_scheduler
    total = max(floor, cycles.matrix * per_scheduler + alone + cycles.shared * waves)
    parts["memory"] = moved * busy / chip.bandwidth * chip.mhz
    time = max(floor + (total - floor) / together, parts["memory"])
    return Time(parts, max(floor, parts["memory"]), total, time, time / chip.mhz)


def working_waves(chip: Chip, threads: int, stage: str) -> int:
    """Waves of a workgroup that do what is counted: on Hopper, others (two or more) of `scan` load and store."""
    if chip.lanes == 32 and stage in ("scan", "carry"):
        return (threads - 2 * chip.lanes) // _WARPGROUP * _WARPGROUP // chip.lanes
    return threads // chip.lanes
