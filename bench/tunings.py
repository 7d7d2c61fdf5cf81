"""What a target lets one choose: every legal tuning of a workload, and how to force one.

A tuning is a schedule of the target with other numbers in it. To force one, the target's data is replaced before
anything is rendered, so what is measured is what these data would give if they stood in `targets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qla.targets import TARGETS, Schedule, Target

__all__ = ["apply", "tunings"]

Tuning = dict[str, Any]

_DEPTHS = (-1, 0, 1)  # buffers of every ring, more or fewer than in the schedule


def _numbers(schedule: Schedule, target: Target) -> list[tuple[list[int], int, int]]:
    """Ring depths, unrolling and column blocks to try with a schedule, those it has itself first."""
    own = (list(schedule.rings.values()), schedule.unroll, schedule.streams)
    found = [own]
    depths = [own[0]]
    if target.asynchronous:
        depths += [[max(1, depth + more) for depth in own[0]] for more in _DEPTHS]
    for rings in depths:
        # Slots of a ring are known to the compiler where a pass of the loop goes around it.
        unrolls = {own[1], 1, max(rings)} if target.asynchronous else {own[1]}
        for unroll in sorted(unrolls):
            for streams in target.facts["scan_threads"]:
                if (choice := (rings, unroll, streams)) not in found:
                    found.append(choice)
    return found


def tunings(target: str) -> list[Tuning]:
    """Return what can be forced on a target; whether it fits a workload's shared memory is found out by trying."""
    facts = TARGETS[target]
    each = [(schedule, *numbers) for schedule in facts.schedules for numbers in _numbers(schedule, facts)]
    # Schedules may differ in numbers alone: what one has itself is its own.
    whose = {(s.order, *s.rings.values(), s.unroll, s.streams): s.name for s in facts.schedules}
    return [
        {"schedule": schedule.name, "rings": rings, "unroll": unroll, "streams": streams}
        for schedule, rings, unroll, streams in each
        if whose.setdefault((schedule.order, *rings, unroll, streams), schedule.name) == schedule.name
    ]


def apply(target: str, tuning: Mapping[str, Any]) -> None:
    """Force a tuning on this process, which must not have rendered anything yet."""
    facts = TARGETS[target]
    schedule = {schedule.name: schedule for schedule in facts.schedules}[tuning["schedule"]]
    chosen = replace(
        schedule,
        rings=dict(zip(schedule.rings, tuning["rings"], strict=True)),
        unroll=tuning["unroll"],
        streams=tuning["streams"],
    )
    # It alone: an op that it cannot run must fail, not run with another.
    TARGETS[target] = replace(facts, schedules=(chosen,))
