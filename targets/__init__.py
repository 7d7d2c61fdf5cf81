"""Targets as data: one module per target, each exporting one `Target` named `TARGET`. No logic per op lives here."""

from __future__ import annotations

from qla.targets import gfx942, gfx950, host, sm_90a
from qla.targets.base import Costs, Schedule, Target

TARGETS: dict[str, Target] = {m.TARGET.name: m.TARGET for m in (sm_90a, gfx942, gfx950, host)}

__all__ = ["TARGETS", "Costs", "Schedule", "Target"]
