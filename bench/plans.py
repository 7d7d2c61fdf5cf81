"""Which kernels our calls of the cases will take: known from shapes alone, so they can be compiled before any call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

from qla.bench.workloads import OPS, Case
from qla.codegen.ops import OPS as FEATURES
from qla.codegen.planner import CallShape, Choice, plan_call
from qla.codegen.render import render
from qla.codegen.spec import Dtype, KernelSpec
from qla.errors import UnsupportedError
from qla.runtime.store import default_store

__all__ = ["call_shape", "compile_all", "kernels"]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def call_shape(case: Case) -> CallShape:
    """What planning looks at in our call of a case, whose tensors are contiguous."""
    op, d = OPS[case.op], case.dims
    name = next(name for name, has in FEATURES.items() if (has.delta, has.gate) == (op.delta, op.gate))
    sizes = (d.dk, d.dv, d.batch, d.tokens, d.heads, d.value_heads)
    packed = len(case.lengths) if case.lengths else 0
    return CallShape(name, cast(Dtype, _DTYPES[case.dtype]), *sizes, sequences=packed, saves=op.saves)


def kernels(
    cases: Iterable[Case],
    target: str,
    processors: int,
    choose: Callable[[CallShape, str, int], Sequence[Choice]] | None = None,
) -> list[KernelSpec]:
    """Of all calls, each once; a case that no kernel fits has none.

    Parameters
    ----------
    cases, target, processors : the calls, and the device.
    choose : gives several ways to run a call; by default the one that the planner takes.
    """
    found: dict[KernelSpec, None] = {}
    for case in cases:
        if case.traits is None:
            continue
        call = (call_shape(case), target, processors)
        with suppress(UnsupportedError):
            for choice in choose(*call) if choose else [plan_call(*call)]:
                found.update(dict.fromkeys(choice.kernels))
    return list(found)


def compile_all(specs: Sequence[KernelSpec]) -> None:
    """Have kernels in the cache, compiled by all cores; what does not compile fails where it is called."""

    def fetch(spec: KernelSpec) -> None:
        default_store().get(render(spec))

    # Threads will do: compilers are other processes, or libraries that let go of the interpreter.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for task in [pool.submit(fetch, spec) for spec in specs]:
            task.exception()
