"""Makers of what tests hand to schedules and drivers: declared programs and small sources."""

from __future__ import annotations

from dataclasses import replace

from qla.codegen.ops import OPS
from qla.codegen.program import Program
from qla.codegen.render import environment
from qla.codegen.spec import Field, KernelSpec, Limits, Source
from qla.targets import TARGETS

HOPPER = TARGETS["sm_90a"]
_NAMED = {schedule.name: schedule for schedule in HOPPER.schedules}
SERIAL = _NAMED["serial"]
# Skewed, with products and the decay in parts.
SKEWED = replace(
    _NAMED["skewed"],
    order=(
        *("Vr", "S", "O", ">save", ">Sr", ">U", "out", "store", ">QS:1/2", ">V", ">decay:1/2"),
        *(">W", ">V2", ">QS:2/2", ">rows", ">decay:2/2"),
    ),
)


def declare(op: str, saves: bool = False, dk: int = 128, outputs: bool = True) -> Program:
    """What the scan template declares for an op."""
    program, features = Program(), OPS[op]
    environment().get_template("kernels/scan.j2").render(
        delta=features.delta, gate=features.gate, saves=saves, outputs=outputs, loads="tile", C=64, K=dk, V=64,
        columns=64, factors="half", reach=False,
        tile=program.tile, vector=program.vector, register=program.register, step=program.step,
    )  # fmt: skip
    return program


def source(entry: str = "entry", target: str = "host", shared_bytes: int = 0, abi: tuple[Field, ...] = ()) -> Source:
    """A source without text, for drivers that do not look at it."""
    spec = KernelSpec("delta_rule", "scan", "bf16", 64, 64, target)
    return Source(spec, entry, "c++", "", abi, Limits(128, shared_bytes, 64, 64))
