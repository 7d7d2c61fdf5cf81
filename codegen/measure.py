"""What a kernel's machine code says of it: registers, memory, occupancy, and the instructions of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

from qla.codegen import resources
from qla.codegen.abi import FLAGS
from qla.codegen.instruction_costs import Kind, kinds
from qla.codegen.machine_code import Code, Count, read_amd, read_sass
from qla.codegen.model import Occupancy, occupancy
from qla.codegen.render import render, schedule_of
from qla.codegen.resources import Resources
from qla.codegen.spec import KernelSpec, Source
from qla.errors import UnsupportedError
from qla.runtime.arguments import Packer
from qla.runtime.compilers import Binary, compiler_for
from qla.runtime.compilers.zig import ZigHip
from qla.targets import TARGETS
from qla.targets.chips import CHIPS

_MATRIX = r"v_mfma|HGMMA"


@dataclass(frozen=True)
class Measured:
    """A kernel as compiled.

    Parameters
    ----------
    spec, source : of the kernel.
    compiler : name and version.
    resources : registers and memory.
    shared_bytes : of a workgroup, asked for at launch or built in.
    occupancy : on the target's chip.
    count : instructions of one wave: of a pass of the main loop of `scan` and `carry`, of all of the others.
    chunks : that a pass has.
    """

    spec: KernelSpec
    source: Source
    compiler: str
    resources: Resources
    shared_bytes: int
    occupancy: Occupancy
    count: Count
    chunks: int

    @property
    def kinds(self) -> dict[Kind, int]:
        """Instructions by kind."""
        return kinds(self.count, self.source.language)


def measure(spec: KernelSpec) -> Measured:
    """Compile a kernel and look at it.

    AMD code is compiled by the clang of the package ziglang wherever this runs, because only that one gives the text
    that its object is assembled from.

    Raises
    ------
    UnsupportedError
        The target has no machine whose code is read here.
    """
    if spec.target not in CHIPS:
        raise UnsupportedError("target", spec.target, ", ".join(CHIPS))
    target, source = TARGETS[spec.target], render(spec)
    compiler = ZigHip(target) if target.language == "hip" else compiler_for(target)
    return look_at(source, compiler.compile(source))


def look_at(source: Source, binary: Binary) -> Measured:
    """Of a kernel that is compiled already, if for AMD by `ZigHip`."""
    spec = source.spec
    target, chip = TARGETS[spec.target], CHIPS[spec.target]
    threads = source.limits.threads
    bound = value_heads(spec) if spec.stage == "prepare" else None
    if target.language == "hip":
        code = read_amd(ZigHip(target).assembly(source), threads, bound, _plain_call(source))
    else:
        code = read_sass(resources.disassemble(binary.data, target), threads, bound, _plain_call(source))
    found = resources.report(binary.data, binary.log, target)
    shared = max(source.limits.shared_bytes, found.shared_bytes)
    count, chunks = _of_a_pass(code, spec)
    return Measured(
        spec,
        source,
        f"{binary.compiler.name} {binary.compiler.version}",
        found,
        shared,
        occupancy(chip, threads, found.registers, shared),
        count,
        chunks,
    )


def _plain_call(source: Source) -> dict[int, int]:
    """Arguments that decide ways, as most calls give them: no packed sequences, gates as they are, queries and keys
    normalized, numbers in float32. By offset in the argument block."""
    plain = {"has_cu_seqlens": 0, "flags": FLAGS["L2NORM"], "g_type": 0, "beta_type": 0}
    offsets = Packer(source.abi, [f.name for f in source.abi if f.kind in ("ptr", "tensormap")]).offsets
    return {offsets[name][1]: value for name, value in plain.items() if name in offsets}


def _of_a_pass(code: Code, spec: KernelSpec) -> tuple[Count, int]:
    """Instructions of the longest way, and how many chunks they are for."""
    if spec.stage in ("prepare", "combine"):
        return code.count(), 1
    unroll = schedule_of(spec).unroll if spec.stage == "scan" else 1
    return code.count(code.main_loop(_MATRIX)), unroll


def value_heads(spec: KernelSpec) -> int:
    """That one workgroup of `prepare` works on, at most."""
    teams = 1 if spec.features.gate == "channel" else TARGETS[spec.target].facts.get("teams", 1)
    return int(teams)
