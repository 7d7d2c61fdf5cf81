"""The instruction sets of this CPU, under the names that `zig -mcpu` takes.

They are read from the operating system and not from a compiler, so that a kernel id can be formed where none is
installed; and only those that change the code of our kernels are listed, so that two CPUs that run the same code also
share it.
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path

# Name in /proc/cpuinfo -> name of the LLVM feature as zig spells it.
X86_64 = {
    "pni": "sse3", "ssse3": "ssse3", "cx16": "cx16", "sse4_1": "sse4_1", "sse4_2": "sse4_2", "popcnt": "popcnt",
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi1": "bmi", "bmi2": "bmi2", "abm": "lzcnt",
    "movbe": "movbe", "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512vbmi": "avx512vbmi", "avx512_vbmi2": "avx512vbmi2", "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16",
}  # fmt: skip
AARCH64 = {
    "asimd": "neon", "asimdhp": "fullfp16", "asimddp": "dotprod", "bf16": "bf16", "i8mm": "i8mm", "atomics": "lse",
    "sve": "sve", "sve2": "sve2",
}  # fmt: skip


@cache
def cpu_features() -> tuple[str, ...]:
    """Triple and features of this machine, e.g. ``("x86_64-linux-none", "avx", "avx2", …)``; found once per process."""
    machine = platform.machine().lower()
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if sys.platform == "darwin":
        # Every Mac that runs arm64 has at least these; there is no /proc to ask for more.
        return (f"{arch}-macos-none", *(("dotprod", "fullfp16", "neon") if arch == "aarch64" else ()))
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return (f"{arch}-linux-none", *parse_cpuinfo(arch, text))


def parse_cpuinfo(arch: str, text: str) -> tuple[str, ...]:
    """Features, sorted, that *all* CPUs listed in the text of /proc/cpuinfo have."""
    table, label = {"x86_64": (X86_64, "flags"), "aarch64": (AARCH64, "Features")}.get(arch, ({}, ""))
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    each = [set(value.split()) for name, value in lines if name.strip() == label]
    common = set.intersection(*each) if each else set()
    return tuple(sorted(feature for flag, feature in table.items() if flag in common))


def mcpu(features: tuple[str, ...]) -> str:
    """The value for `-mcpu=`: the architecture's plain CPU and the listed features."""
    base = "x86_64" if features[0].startswith("x86_64") else "generic"
    return "+".join((base, *features[1:]))
