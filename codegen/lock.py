"""The lock file of kernels: what each is compiled to, one line each, so that a change shows as a diff of numbers.

    # gfx942: zig-hip 0.17.1
    gfx942 gla_scan_bf16_k64_v64 registers=212 … matrix=24 vector=900 …

Counts are those of one wave: of a pass of the main loop (with so many `chunks`) of `scan` and `carry`, of all of the
others. Another compiler gives other numbers, so lines are compared only with those of the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qla.codegen.measure import Measured
from qla.targets.chips import CHIPS

#: Where it lies in the repository.
PATH = Path("tests/codegen/resources.lock")
#: What brings it up to date, from the repository's root.
UPDATE = "qla-codegen lock"
_HEAD = (
    f"# What a set of kernels with every pair of choices is compiled to: see codegen/lock.py. Written by `{UPDATE}`.\n"
)

Numbers = dict[str, int]


@dataclass
class Lock:
    """What a lock file says.

    Parameters
    ----------
    compilers : by target.
    kernels : by target and name.
    """

    compilers: dict[str, str] = field(default_factory=dict)
    kernels: dict[tuple[str, str], Numbers] = field(default_factory=dict)

    def add(self, measured: Measured) -> None:
        """Take up a kernel."""
        self.compilers[measured.spec.target] = measured.compiler
        self.kernels[measured.spec.target, measured.spec.name] = numbers(measured)

    def of(self, targets: Iterable[str]) -> Lock:
        """The part of some targets."""
        wanted = set(targets)
        return Lock(
            {target: name for target, name in self.compilers.items() if target in wanted},
            {key: value for key, value in self.kernels.items() if key[0] in wanted},
        )

    def text(self) -> str:
        """Of the file."""
        heads = [f"# {target}: {self.compilers[target]}\n" for target in sorted(self.compilers)]
        lines = (
            f"{target} {name} {' '.join(f'{key}={value}' for key, value in found.items())}\n"
            for (target, name), found in sorted(self.kernels.items())
        )
        return "".join([_HEAD, *heads, *lines])


def numbers(measured: Measured) -> Numbers:
    """What is kept of a kernel."""
    used = measured.resources
    amd = {"agpr": used.accumulators, "sgpr": used.scalars} if measured.source.language == "hip" else {}
    return {
        "registers": used.registers,
        **amd,
        "shared_bytes": measured.shared_bytes,
        "scratch": used.scratch_bytes,
        "spill": used.spill_bytes,
        "waves": measured.occupancy.waves,
        "workgroups": measured.occupancy.workgroups,
        "chunks": measured.chunks,
        **{str(kind): count for kind, count in measured.kinds.items()},
        "open_loops": measured.count.open_loops,
    }


def read(text: str) -> Lock:
    """Of a lock file's text."""
    lock = Lock()
    for line in text.splitlines():
        head, _, rest = line.removeprefix("# ").partition(": ")
        if line.startswith("#"):
            if head in CHIPS:
                lock.compilers[head] = rest
        elif line.strip():
            target, name, *pairs = line.split()
            lock.kernels[target, name] = {key: int(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    return lock


def other_compilers(kept: Lock, found: Lock) -> list[str]:
    """Of targets whose lines are another compiler's: what that means, in words."""
    return [
        f"{target}: not compared; the lock file is of {kept.compilers[target]}, and this is {name}"
        for target, name in sorted(found.compilers.items())
        if kept.compilers.get(target, name) != name
    ]


def differences(kept: Lock, found: Lock) -> list[str]:
    """What changed, a line per kernel; nothing of targets that another compiler was used for."""
    same = [target for target, name in found.compilers.items() if kept.compilers.get(target, name) == name]
    before, after = kept.of(same).kernels, found.of(same).kernels
    changes = []
    for key in sorted({*before, *after}):
        label = " ".join(key)
        if key not in after:
            changes.append(f"{label}: no longer one of them")
        elif key not in before:
            changes.append(f"{label}: new")
        elif before[key] != after[key]:
            changes.append(f"{label}: {_changed(before[key], after[key])}")
    return changes


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    words = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if old != new:
            words.append(f"{key} {'-' if old is None else old} → {'-' if new is None else new}")
    return ", ".join(words)
