"""Compilation of every kernel in a pairwise set per target (all supported kernels with ``-m full``).

What must hold of each binary: nothing spilled, no scratch, no serialized `wgmma`, shared memory within the target's
limit. And of the pairwise set that its registers, memory and instructions are those of the lock file, so that a change
of them is seen and meant. Nothing is run here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qla.codegen import elf, resources
from qla.codegen.lock import UPDATE, Lock, differences, other_compilers, read
from qla.codegen.matrix import full, pairwise
from qla.codegen.measure import measure
from qla.codegen.ops import OPS
from qla.codegen.render import render
from qla.codegen.spec import KernelSpec
from qla.errors import CompilationError
from qla.runtime.compilers import compiler_for
from qla.targets import TARGETS
from qla.targets.chips import CHIPS

# Compilers are child processes or run outside the interpreter's lock.
WORKERS = 2
LOCK = Path(__file__).with_name("resources.lock")


def problems(spec: KernelSpec, lock: Lock | None = None) -> list[str]:
    """What is wrong with a kernel, in words; what it is compiled to goes to `lock`."""
    target, source = TARGETS[spec.target], render(spec)
    compiler = compiler_for(target)
    try:
        measured = measure(spec) if lock is not None else None
        # Where there is ROCm, launches take its compiler; the lock file is of another one.
        same = measured is not None and measured.binary.compiler == compiler.identity()
        binary = measured.binary if measured and same else compiler.compile(source)
    except CompilationError as error:
        return [str(error)]
    if measured and lock is not None:
        lock.add(measured)
    report = resources.report(binary.data, binary.log, target)
    found = list(report.problems)
    shared = max(report.shared_bytes, source.limits.shared_bytes)
    if target.shared_limit and shared > target.shared_limit:
        found.append(f"{shared} bytes of shared memory, limit {target.shared_limit}")
    if target.language == "cuda" and report.shared_bytes:
        found.append(f"{report.shared_bytes} bytes of shared memory are not part of the launch's {shared}")
    if target.language == "hip" and report.shared_bytes > source.limits.shared_bytes:
        found.append(f"{report.shared_bytes} bytes of LDS, planned {source.limits.shared_bytes}")
    if not report.code_bytes or source.entry.encode() not in binary.data:
        found.append("the binary does not hold the kernel")
    if target.language == "c++" and elf.undefined_symbols(binary.data):
        found.append("undefined symbols")
    return found


def compile_all(name: str, specs: Sequence[KernelSpec], lock: Lock | None = None) -> None:
    began = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        found = dict(zip(specs, pool.map(lambda spec: problems(spec, lock), specs), strict=True))
    bad = {f"{spec.name} for {spec.target}": why for spec, why in found.items() if why}
    print(f"{name}: {len(specs)} kernels compiled in {time.perf_counter() - began:.1f} s, {len(bad)} with problems")
    assert not bad, "\n".join(f"{kernel}: {'; '.join(why)}" for kernel, why in bad.items())


@pytest.mark.parametrize("target", TARGETS)
def test_pairwise_set_compiles_clean_and_to_what_is_locked(
    target: str, record_property: Callable[[str, object], None]
) -> None:
    lock = Lock() if target in CHIPS else None
    compile_all(f"{target}, pairwise", pairwise(target), lock)
    if lock is None:
        return
    kept = read(LOCK.read_text(encoding="utf-8")).of([target])
    for line in other_compilers(kept, lock):
        record_property("summary", line)
    changed = differences(kept, lock)
    assert not changed, "\n".join(
        (f"{LOCK.name} is not up to date; if this is meant, run `{UPDATE}` and commit the file:", *changed)
    )


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_everything_supported_compiles_clean(target: str) -> None:
    compile_all(f"{target}, full", full(target))


@pytest.mark.parametrize("target", TARGETS)
def test_pairwise_set_has_every_choice(target: str) -> None:
    """Counted here by other means than the set is made by."""
    facts, specs = TARGETS[target], pairwise(target)
    assert len(specs) == len(set(specs))
    assert set(specs) <= set(full(target))
    for op in OPS:
        for stage in ("prepare", "scan"):
            mine = [s for s in specs if (s.op, s.stage) == (op, stage)]
            assert {s.dtype for s in mine} == set(facts.dtypes)
            assert {s.dk for s in mine} == {64, 128}
            if facts.language != "c++":
                assert {s.loads for s in mine} == {"tile", "strided"}
        scans = [s for s in specs if (s.op, s.stage) == (op, "scan")]
        assert {(s.dk, s.dv) for s in scans} == {(64, 64), (64, 128), (128, 64), (128, 128)}
        others = [s.name for s in facts.schedules[1:] if OPS[op].gate in s.gates]
        assert {s.schedule for s in scans} == {"", *others}
    assert any(s.saves for s in specs)
