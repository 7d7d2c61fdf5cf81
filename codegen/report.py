"""What a call would take on a target's chip by the model of `qla.codegen.model`, beside floors and measured times."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qla.codegen.explain import Explanation, Launch
from qla.codegen.instruction_costs import Cycles, cycles
from qla.codegen.measure import Measured, measure, value_heads
from qla.codegen.model import Time, time_of, working_waves
from qla.codegen.planner import CallShape, Choice, split
from qla.targets import TARGETS
from qla.targets.chips import CHIPS, Chip

_JOBS = 2


@dataclass(frozen=True)
class Kernel:
    """One launch of a call.

    Parameters
    ----------
    measured : its kernel.
    launch : its workgroups, bytes and chain.
    chip : where it runs.
    """

    measured: Measured
    launch: Launch
    chip: Chip

    @property
    def stage(self) -> str:
        """prepare or scan."""
        return self.measured.spec.stage

    @cached_property
    def cycles(self) -> Cycles:
        """Of one wave for one chunk."""
        return cycles(self.measured.count, self.chip) * (1 / self.measured.chunks)

    @property
    def unit(self) -> str:
        """What a workgroup takes at a time."""
        if self.stage == "prepare":
            heads = value_heads(self.measured.spec)
            return "chunk x value head" if heads == 1 else f"chunk x {heads} value heads"
        columns = self.measured.source.limits.value_columns
        return "chunk x value head" if columns >= self.measured.spec.dv else f"chunk x {columns} columns"

    @property
    def together(self) -> int:
        """Workgroups on a processor at once."""
        deal = -(-self.launch.workgroups // self.chip.processors)
        return min(self.measured.occupancy.workgroups, deal)

    @property
    def time(self) -> Time:
        """Per unit, where as many processors have work as the call has workgroups for."""
        busy = min(self.chip.processors, self.launch.workgroups)
        return self.time_with(self.together, busy)

    def time_with(self, together: int, busy: int) -> Time:
        """Per unit, with so many workgroups on each of so many processors."""
        units = self.launch.workgroups * max(self.launch.chain, 1)
        waves = working_waves(self.chip, self.measured.source.limits.threads, self.stage)
        return time_of(self.cycles, self.chip, waves, together, self.launch.bytes / units, busy)

    @property
    def us(self) -> float:
        """Of the launch, without what launching takes."""
        if not self.launch.chain:
            deal = -(-self.launch.workgroups // self.chip.processors)
            return deal * self.time.us
        rounds = -(-self.launch.workgroups // (self.chip.processors * self.together))
        return rounds * self.launch.chain * self.together * self.time.us

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        m, time = self.measured, self.time
        return {
            "kernel": m.spec.name,
            "compiler": m.compiler,
            "registers": m.resources.registers,
            "accumulators": m.resources.accumulators,
            "scalars": m.resources.scalars,
            "shared_bytes": m.shared_bytes,
            "scratch_bytes": m.resources.scratch_bytes,
            "spill_bytes": m.resources.spill_bytes,
            "waves_per_scheduler": m.occupancy.waves,
            "workgroups_per_processor": m.occupancy.workgroups,
            "chunks_of_a_pass": m.chunks,
            "open_loops": m.count.open_loops,
            "instructions_of_a_pass": m.kinds,
            "unit": self.unit,
            "cycles": time.parts,
            "floor_us": time.floor / self.chip.mhz,
            "sum_us": time.sum / self.chip.mhz,
            "us": time.us,
            "bound": time.bound,
            "launch_us": self.us,
        }


@dataclass(frozen=True)
class Check:
    """A predicted time beside one that was measured on this chip."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a part of the measured time."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Report:
    """A call in one piece on a target's chip."""

    shape: CallShape
    chip: Chip
    choice: Choice
    kernels: tuple[Kernel, ...]

    @property
    def us(self) -> float:
        """Of all launches."""
        return sum(kernel.us for kernel in self.kernels)

    @cached_property
    def bandwidth_floor(self) -> float:
        """Microseconds that the call's own tensors take, each read or written once, at the peak bandwidth."""
        s, size = self.shape, 2
        tokens = s.batch * s.tokens
        gates = {"none": 0, "head": 4, "channel": size * s.dk}[self.choice.scan.features.gate]
        per_value_head = 2 * s.dv * size + gates + 4 * self.choice.scan.features.delta
        return tokens * (2 * s.heads * s.dk * size + s.value_heads * per_value_head) / self.chip.bandwidth

    @cached_property
    def matrix_floor(self) -> float:
        """Microseconds that the call's operations take at the peak of matrix products."""
        return sum(kernel.launch.flops for kernel in self.kernels) / self.chip.tflops / 1e6

    def checks(self) -> list[Check]:
        """What was measured on this chip, per (chunk, 64 columns) of `scan` and (chunk, value head) of `prepare`."""
        costs, features = TARGETS[self.chip.target].costs, self.choice.scan.features
        if costs is None or (self.shape.dk, self.shape.dv) != (128, 128):
            return []
        prepare, scan = self.kernels
        heads = value_heads(prepare.measured.spec)
        known = costs.prepare_us.get((features.delta, features.gate), {})
        found = []
        if features.delta:
            alone, full = costs.scan_chunk_us[features.gate]
            found.append(Check("scan, a workgroup alone on the chip", scan.time_with(1, 1).us, alone))
            found.append(Check("scan, one on each multiprocessor", scan.time_with(1, self.chip.processors).us, full))
        if heads in known:
            time = prepare.time_with(prepare.measured.occupancy.workgroups, self.chip.processors)
            what = f"prepare, {heads} value heads of a group" if heads > 1 else "prepare"
            found.append(Check(what, time.us / heads, known[heads]))
        return found

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "target": self.chip.target,
            "chip": self.chip.name,
            "processors": self.chip.processors,
            "kernels": [kernel.as_json() for kernel in self.kernels],
            "us": self.us,
            "bandwidth_floor_us": self.bandwidth_floor,
            "matrix_floor_us": self.matrix_floor,
            "checks": [{"what": c.what, "us": c.predicted, "measured_us": c.measured} for c in self.checks()],
        }


def reports(shapes: list[CallShape], target: str) -> list[Report]:
    """Compile the kernels of these calls, each once, and predict their times.

    Parameters
    ----------
    shapes : of the calls; none of them is split into segments.
    target : key of `qla.targets.chips.CHIPS`.
    """
    chip = CHIPS[target]
    choices = [split(shape, target, chip.processors) for shape in shapes]
    specs = list(dict.fromkeys(spec for choice in choices for spec in choice.kernels))
    with ThreadPoolExecutor(_JOBS) as pool:
        measured = dict(zip(specs, pool.map(measure, specs), strict=True))
    found = []
    for shape, choice in zip(shapes, choices, strict=True):
        launches = Explanation(choice).launches
        kernels = tuple(Kernel(measured[x.spec], x, chip) for x in launches)
        found.append(Report(shape, chip, choice, kernels))
    return found
