"""One kernel from spec to binary, without a cache: what it took and what it occupies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from qla.codegen.render import render
from qla.codegen.resources import Resources, report
from qla.codegen.spec import KernelSpec
from qla.errors import CompilationError, CompilerNotFoundError, ScheduleError, TemplateError
from qla.runtime.compilers import Compiler, compiler_for
from qla.targets import TARGETS


@dataclass(frozen=True)
class Build:
    """How building one kernel went.

    Parameters
    ----------
    spec : of the kernel.
    compiler : name and version; empty where it did not get that far.
    seconds : of compilation alone.
    shared_bytes : shared memory (LDS) of one workgroup, requested at launch or built in.
    resources : None where there is no binary.
    problems : why the kernel is unfit to ship, in words; empty where nothing is wrong.
    """

    spec: KernelSpec
    compiler: str
    seconds: float
    shared_bytes: int
    resources: Resources | None
    problems: tuple[str, ...]


def build(spec: KernelSpec, choose: Callable[[str], Compiler] | None = None) -> Build:
    """Render and compile a kernel. What goes wrong is in the result, and nothing is raised for it.

    Parameters
    ----------
    spec : of the kernel.
    choose : gives the compiler of a target; by default the one that launches would use.
    """
    target = TARGETS[spec.target]
    try:
        source = render(spec)
        compiler = choose(spec.target) if choose else compiler_for(target)
        began = time.perf_counter()
        binary = compiler.compile(source)
        seconds = time.perf_counter() - began
    except (CompilationError, CompilerNotFoundError, ScheduleError, TemplateError) as error:
        return Build(spec, "", 0.0, 0, None, (str(error),))
    resources = report(binary.data, binary.log, target)
    # CUDA's is asked for at launch and so not in the binary; AMD's is in both.
    shared = max(source.limits.shared_bytes, resources.shared_bytes)
    name = f"{binary.compiler.name} {binary.compiler.version}"
    return Build(spec, name, seconds, shared, resources, resources.problems)


def build_all(specs: Sequence[KernelSpec], jobs: int = 1) -> Iterator[Build]:
    """Build kernels, several at a time, and give the results in the order of `specs`."""
    # Threads will do: compilers are other processes, or libraries that let go of the interpreter.
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(build, specs)
