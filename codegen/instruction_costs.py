"""Kinds of machine instructions, and the cycles that each takes of which part of a processor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qla.codegen.machine_code import Count
from qla.targets.chips import Chip

Kind = Literal["matrix", "vector", "shared", "global", "scalar", "wait", "barrier"]
KINDS: tuple[Kind, ...] = ("matrix", "vector", "shared", "global", "scalar", "wait", "barrier")

# By the beginning of the name; the first that fits counts.
_AMD_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"v_mfma|v_smfmac", "matrix"),
    (r"v_", "vector"),
    (r"ds_", "shared"),
    (r"global_|buffer_|flat_|scratch_", "global"),
    (r"s_barrier", "barrier"),
    (r"s_waitcnt|s_nop|s_sleep", "wait"),
    (r"s_", "scalar"),
)
_SASS_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"[HIQBD]GMMA|[HIDB]MMA", "matrix"),
    (r"WARPGROUP|NOP|SYNCS|DEPBAR|LDGDEPBAR|WARPSYNC|FENCE|MEMBAR|NANOSLEEP|ERRBAR|CCTL", "wait"),
    (r"BAR", "barrier"),
    (r"LDS|STS|ATOMS", "shared"),
    (r"LDG|STG|LD\.|ST\.|LDL|STL|RED|ATOM|UTMA|UBLKCP", "global"),
    (r"U\w|R2UR|S2R|S2UR|LDC|BRA|BSSY|BSYNC|EXIT|CALL|RET|BREAK|ELECT|BMOV|YIELD", "scalar"),
    (r"", "vector"),
)


def kind_of(name: str, language: str) -> Kind:
    """What an instruction is; unknown ones of CUDA are taken for vector instructions.

    Parameters
    ----------
    name : whole.
    language : "hip" or "cuda".
    """
    for pattern, kind in _AMD_KINDS if language == "hip" else _SASS_KINDS:
        if re.match(pattern, name):
            return kind
    raise ValueError(f"{name} is not an AMD instruction")


def kinds(count: Count, language: str) -> dict[Kind, int]:
    """How many there are of each kind."""
    found: Counter[Kind] = Counter()
    for name, number in count.instructions.items():
        found[kind_of(name, language)] += number
    return {kind: found[kind] for kind in KINDS}


@dataclass(frozen=True)
class Cycles:
    """Cycles of the parts of a processor, for one wave.

    Parameters
    ----------
    matrix, vector : of a scheduler's matrix and vector units.
    issue : of the wave itself, which issues one instruction after the other.
    shared, l1 : of the processor's shared memory (LDS), and of its way to the memory behind.
    """

    matrix: float = 0.0
    vector: float = 0.0
    issue: float = 0.0
    shared: float = 0.0
    l1: float = 0.0

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(*(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def __mul__(self, factor: float) -> Cycles:
        return Cycles(*(factor * part for part in self.parts))

    @property
    def parts(self) -> tuple[float, float, float, float, float]:
        """All of them, in order."""
        return self.matrix, self.vector, self.issue, self.shared, self.l1


def cycles(count: Count, chip: Chip) -> Cycles:
    """Of all instructions that a wave runs; bank conflicts and waiting are not among them."""
    return _sum(_one(name, chip) * number for name, number in count.instructions.items())


def _sum(parts: Iterable[Cycles]) -> Cycles:
    total = Cycles()
    for part in parts:
        total += part
    return total


def _one(name: str, chip: Chip) -> Cycles:
    return _amd(name, chip) if chip.lanes == 64 else _cuda(name, chip)


# ---- AMD

_DS_BYTES = {
    "b8": 1,
    "u8": 1,
    "i8": 1,
    "b16": 2,
    "u16": 2,
    "i16": 2,
    "b32": 4,
    "f32": 4,
    "b64": 8,
    "b96": 12,
    "b128": 16,
}
_GLOBAL_BYTES = {
    "byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12,
    "dwordx4": 16,
}  # fmt: skip


def _amd(name: str, chip: Chip) -> Cycles:
    kind, issue = kind_of(name, "hip"), float(chip.issue_cycles)
    if kind == "matrix":
        return Cycles(matrix=chip.matrix[amd_shape(name, chip)], vector=chip.vector_cycles, issue=issue)
    if kind == "vector":
        return Cycles(vector=_vector(name, chip), issue=issue)
    if kind == "shared":
        return Cycles(issue=issue, shared=_lds(name, chip))
    if kind == "global":
        width = next((size for word in name.split("_") for what, size in _GLOBAL_BYTES.items() if word == what), 4)
        return Cycles(issue=issue, l1=max(issue, chip.lanes * width / chip.l1_bytes))
    return Cycles(issue=issue)


def amd_shape(name: str, chip: Chip) -> str:
    """The key of a matrix instruction in `Chip.matrix`."""
    match = re.match(r"v_mfma_f32_(\d+x\d+x\d+)_?(bf16|f16|f32)", name)
    shape = f"{match[1]}_f32" if match and match[2] == "f32" else match[1] if match else ""
    if shape not in chip.matrix:
        raise ValueError(f"targets/chips.py has no cycles for {name} on {chip.name}")
    return shape


def _vector(name: str, chip: Chip) -> float:
    known = [start for start in chip.slow if name.startswith(start)]
    return float(chip.slow[max(known, key=len)] if known else chip.vector_cycles)


def _lds(name: str, chip: Chip) -> float:
    """Each address is a turn of the lanes, of 32 a cycle; wide ones are held up by the bandwidth."""
    width = next((size for word in name.split("_") for what, size in _DS_BYTES.items() if word == what), 4)
    addresses = 2 if "2" in name.split("_")[1] or "2st64" in name else 1
    rate = chip.shared_write if "write" in name else chip.shared_read
    return addresses * max(chip.lanes / chip.shared_lanes, chip.lanes * width / rate)


# ---- CUDA


def _cuda(name: str, chip: Chip) -> Cycles:
    kind, issue = kind_of(name, "cuda"), float(chip.issue_cycles)
    if kind == "matrix":
        if match := re.match(r"HGMMA\.64x(\d+)x16\.F32", name):
            # What it reads from shared memory takes half as long and runs beside it.
            return Cycles(matrix=int(match[1]) / 2, issue=issue)
        found = [value for start, value in chip.matrix.items() if name.startswith(start)]
        if not found:
            raise ValueError(f"targets/chips.py has no cycles for {name} on {chip.name}")
        return Cycles(matrix=found[0], issue=issue)
    if kind == "vector":
        return Cycles(vector=_vector(name, chip), issue=issue)
    if kind in ("shared", "global"):
        turns = chip.lanes * _sass_bytes(name) / (chip.shared_read if kind == "shared" else chip.l1_bytes)
        bulk = name.startswith(("UTMA", "UBLKCP"))  # by one thread, past the registers
        return Cycles(issue=issue, **{"shared" if kind == "shared" else "l1": 0.0 if bulk else max(1.0, turns)})
    return Cycles(issue=issue)


def _sass_bytes(name: str) -> int:
    if match := re.match(r"(?:LDSM|STSM).*M\w*88(?:\.(\d))?$", name):
        return 4 * int(match[1] or 1)
    width = re.search(r"\.[US]?(8|16|64|128)(?:\.|$)", name)
    return int(width[1]) // 8 if width else 4
