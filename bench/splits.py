"""The ways in which the planner could run a call: which of them to measure, and how to force one.

A choice goes by its knobs: whatever it has beside the call, the device and the predicted time. They are what
`qla.codegen.planner.split` takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from qla.codegen.planner import CallShape, Choice, choices
from qla.codegen.render import render
from qla.runtime import plan

__all__ = ["candidates", "forced", "knobs", "stages_ms"]

_NOT_KNOBS = ("shape", "target", "processors", "us", "short_us")
_STEP = 1.3  # from one number of segments to the next that is measured


def knobs(choice: Choice) -> dict[str, Any]:
    """What distinguishes a choice from the others for the same call."""
    return {field.name: getattr(choice, field.name) for field in fields(choice) if field.name not in _NOT_KNOBS}


def candidates(shape: CallShape, target: str, processors: int) -> list[Choice]:
    """Choices for a call, those by length of segments at distances at which times differ."""
    found: list[Choice] = []
    most: dict[str, int] = {}
    for choice in choices(shape, target, processors):
        others = json.dumps({name: value for name, value in knobs(choice).items() if name != "segment_chunks"})
        if choice.segments >= _STEP * most.get(others, 0):
            found.append(choice)
            most[others] = choice.segments
    return found


def forced(call: Callable[[], Any], choice: Choice) -> Callable[[], Any]:
    """The call, run as chosen, whatever the planner would choose."""
    layouts: dict[Any, Any] = {}  # of its own: a call is looked up by its shapes, and not planned again

    def run() -> Any:
        runtime = vars(plan)
        kept = {name: runtime[name] for name in ("layouts", "plan_call")}
        runtime.update(layouts=layouts, plan_call=lambda *call: choice)
        try:
            return call()
        finally:
            runtime.update(kept)

    return run


def stages_ms(choice: Choice, kernels: dict[str, float]) -> dict[str, float]:
    """Times of a call's stages from those of its kernels; empty where not each stage is among them."""
    found: dict[str, float] = {}
    for spec in choice.kernels:
        found[spec.stage] = sum(ms for name, ms in kernels.items() if render(spec).entry in name)
    return found if all(found.values()) else {}
