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
    binary : as compiled.
    resources : registers and memory.
    shared_bytes : of a workgroup, asked for at launch or built in.
    occupancy : on the target's chip.
    count : instructions of one wave: of a pass of the main loop of `scan` and `carry`, of all of the others.
    chunks : that a pass has.
    """

    spec: KernelSpec
    source: Source
    binary: Binary
    resources: Resources
    shared_bytes: int
    occupancy: Occupancy
    count: Count
    chunks: int

    @property
    def compiler(self) -> str:
        """Name and version."""
        return f"{self.binary.compiler.name} {self.binary.compiler.version}"

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
    target, chip, source = TARGETS[spec.target], CHIPS[spec.target], render(spec)
    if target.language == "hip":
        binary, text = ZigHip(target).compile_with_assembly(source)
    else:
        binary = compiler_for(target).compile(source)
        text = resources.disassemble(binary.data, target)
    threads = source.limits.threads
    bound = value_heads(spec) if spec.stage == "prepare" else None
    read = read_amd if target.language == "hip" else read_sass
    count, chunks = _of_a_pass(read(text, threads, bound, _plain_call(source)), spec)
    found = resources.report(binary.data, binary.log, target)
    # CUDA's is asked for at launch and so not in the binary; AMD's is in both.
    shared = max(source.limits.shared_bytes, found.shared_bytes)
    fits = occupancy(chip, threads, found.registers, shared)
    return Measured(spec, source, binary, found, shared, fits, count, chunks)


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
