"""What a built kernel occupies, read from the compiler's log (CUDA) or the code object's metadata (AMD)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from qla.codegen import elf
from qla.errors import CompilerNotFoundError, UnsupportedError
from qla.targets.base import Target

_AMDGPU_METADATA = 32
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized")
_INJECTED = re.compile(r"\(C7517\)|warpgroup\.wait is injected")
_DISASSEMBLY_SECONDS = 120


@dataclass(frozen=True)
class Resources:
    """Per-kernel resources; where one binary holds several kernels, the largest of each.

    Parameters
    ----------
    registers : vector registers of one thread. On CDNA the unified count: it includes `accumulators`.
    accumulators : accumulation registers among them (CDNA), else 0.
    scalars : scalar registers of one wave (CDNA), else 0.
    shared_bytes : statically allocated shared memory (LDS) of one workgroup.
    spill_bytes : bytes of registers spilled to memory, stores plus loads (CUDA) or registers times four (CDNA).
    scratch_bytes : private memory (stack frame) of one thread.
    code_bytes : machine code.
    binary_bytes : the whole file.
    serialized_wgmma : the assembler gave up overlapping `wgmma`.
    injected_waits : places where the assembler added a `wgmma` wait of its own.
    """

    registers: int
    accumulators: int
    scalars: int
    shared_bytes: int
    spill_bytes: int
    scratch_bytes: int
    code_bytes: int
    binary_bytes: int
    serialized_wgmma: bool
    injected_waits: int

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes the kernel unfit to ship, in words; empty where nothing does."""
        found = []
        if self.serialized_wgmma:
            found.append("wgmma instructions are serialized")
        if self.spill_bytes:
            found.append(f"{self.spill_bytes} bytes of registers are spilled")
        if self.scratch_bytes:
            found.append(f"{self.scratch_bytes} bytes of scratch memory per thread")
        return tuple(found)


def report(binary_bytes: bytes, log: str, target: Target) -> Resources:
    """Read the resources of a binary built for `target`.

    Parameters
    ----------
    binary_bytes : as the compiler returned it.
    log : as the compiler returned it; for CUDA it must hold the assembler's verbose lines.
    target : that it was built for.
    """
    counts = {"cuda": _from_ptxas_log, "hip": _from_code_object, "c++": _from_nothing}[target.language](
        binary_bytes, log
    )
    return Resources(
        registers=counts.get("registers", 0),
        accumulators=counts.get("accumulators", 0),
        scalars=counts.get("scalars", 0),
        shared_bytes=counts.get("shared", 0),
        spill_bytes=counts.get("spill", 0),
        scratch_bytes=counts.get("scratch", 0),
        code_bytes=elf.code_bytes(binary_bytes),
        binary_bytes=len(binary_bytes),
        serialized_wgmma=bool(_SERIALIZED.search(log)),
        injected_waits=sum(bool(_INJECTED.search(line)) for line in log.splitlines()),
    )


def _from_nothing(data: bytes, log: str) -> dict[str, int]:
    return {}


def _from_ptxas_log(data: bytes, log: str) -> dict[str, int]:
    # Without these lines a spill would read as "none", which is the one wrong answer that goes unnoticed.
    if not re.search(r"Used \d+ registers", log):
        raise ValueError("the log has no register counts; compile with --ptxas-options=-v")

    def largest(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, log)), default=0)

    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return {
        "registers": largest(r"Used (\d+) registers"),
        "shared": largest(r"(\d+) bytes smem"),
        "scratch": largest(r"(\d+) bytes stack frame"),
        "spill": max((int(stores) + int(loads) for stores, loads in spills), default=0),
    }


def _from_code_object(data: bytes, log: str) -> dict[str, int]:
    kernels = code_object_metadata(data)["amdhsa.kernels"]

    def largest(key: str) -> int:
        return max((int(k.get(key, 0)) for k in kernels), default=0)

    # Scalar spills go to vector registers first; what reaches memory shows in the vector count and in scratch.
    return {
        "registers": largest(".vgpr_count"),
        "accumulators": largest(".agpr_count"),
        "scalars": largest(".sgpr_count"),
        "shared": largest(".group_segment_fixed_size"),
        "scratch": largest(".private_segment_fixed_size"),
        "spill": 4 * largest(".vgpr_spill_count"),
    }


def code_object_metadata(data: bytes) -> dict[str, list[dict[str, int]]]:
    """The metadata map of an AMD code object: kernels, their arguments, registers, LDS and scratch."""
    for note in elf.notes(data):
        if note.owner == "AMDGPU" and note.kind == _AMDGPU_METADATA:
            metadata: dict[str, list[dict[str, int]]] = elf.unpack_msgpack(note.payload)
            return metadata
    raise ValueError("not an AMD code object: it has no AMDGPU metadata note")


def disassemble(binary: bytes, target: Target) -> str:
    """Machine code as text, for tests and for reading (CUDA only).

    Nothing that pip installs disassembles AMD code: the `assembly` method of the zig HIP compiler gives the text that
    its object was assembled from.
    """
    if target.language != "cuda":
        raise UnsupportedError(
            "target", target.name, "CUDA targets", "For AMD targets use `ZigHip(target).assembly(source)`"
        )
    with tempfile.TemporaryDirectory(prefix="qla-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        done = subprocess.run(
            [str(_nvdisasm()), str(path)], capture_output=True, text=True, timeout=_DISASSEMBLY_SECONDS, check=False
        )
    if done.returncode:
        raise ValueError(f"nvdisasm refused the binary: {done.stderr.strip()}")
    return done.stdout


def _nvdisasm() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("*/bin/nvdisasm"), reverse=True):
            return path
    raise CompilerNotFoundError("no nvdisasm; install it with: pip install nvidia-cuda-nvdisasm")


_SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_GCN = re.compile(r"^\s+([svd][_a-z0-9]*_\w+|ds_\w+|global_\w+|buffer_\w+|flat_\w+|scratch_\w+)\b")


def count_instructions(text: str) -> Counter[str]:
    """How often each instruction occurs in SASS (without its modifiers: ``HGMMA``) or in AMD assembly (whole name)."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _SASS.match(line) or _GCN.match(line):
            found[match.group(1)] += 1
    return found
