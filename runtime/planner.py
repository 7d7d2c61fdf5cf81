"""Which of a target's schedules a call takes: a pure function of shapes and the target's data."""

from __future__ import annotations

from functools import lru_cache

from qla.targets import TARGETS


@lru_cache(maxsize=4096)
def choose_schedule(
    target_name: str, gate: str, dv: int, loads: str, saves: bool, heads: int, multiprocessors: int
) -> str:
    """Name of the schedule with the shortest predicted `scan`; empty for the target's default.

    A workgroup owns `streams` column blocks of one value head; the workgroups run in waves over the chip, so a call
    takes (waves) x (time of a chunk in such a workgroup). More column blocks per workgroup share what they load, fewer
    spread over more of the chip.

    Parameters
    ----------
    target_name : key of `qla.targets.TARGETS`.
    gate : "none", "head" or "channel".
    dv : head dim of v.
    loads, saves : as in `KernelSpec`.
    heads : sequences times value heads.
    multiprocessors : of the device.
    """
    target = TARGETS[target_name]
    best, shortest = "", float("inf")
    for index, schedule in enumerate(target.schedules):
        columns = target.columns(dv) * schedule.streams
        fits = dv % columns == 0 and (index == 0 or (gate in schedule.gates and loads == "tile" and not saves))
        if schedule.chunk_us and fits:
            waves = -(-heads * (dv // columns) // multiprocessors)
            if waves * schedule.chunk_us < shortest:
                best, shortest = schedule.name if index else "", waves * schedule.chunk_us
    return best
