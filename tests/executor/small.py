"""Kernels of a few lines, for tests of the machine itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from executor import build
from executor.machine import Device, Memory, writable

from qla.codegen.spec import Field, KernelSpec, Limits, Source
from qla.runtime.arguments import ArgumentBlock, Packer

PRELUDE = """\
#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
typedef unsigned short u16;
typedef unsigned int u32;
typedef short short4_ __attribute__((ext_vector_type(4)));
typedef _Float16 half4_ __attribute__((ext_vector_type(4)));
typedef _Float16 half8_ __attribute__((ext_vector_type(8)));
typedef __bf16 bfloat8_ __attribute__((ext_vector_type(8)));
typedef float f4_ __attribute__((ext_vector_type(4)));
typedef float f16_ __attribute__((ext_vector_type(16)));
__device__ inline int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
__device__ inline int block_id() { return __builtin_amdgcn_workgroup_id_x(); }
__device__ inline void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""

Array = npt.NDArray[Any]


@lru_cache(maxsize=256)
def source(body: str, names: tuple[str, ...], target: str, threads: int, shared_bytes: int) -> Source:
    """A kernel with that body; its arguments are addresses of these names."""
    members = "".join(f"  void* {name};\n" for name in names)
    text = f'{PRELUDE}struct Args {{\n{members}}};\nextern "C" __global__ void small(const Args args) {{\n{body}\n}}\n'
    spec = KernelSpec("gla", "scan", "bf16", 64, 64, target)
    limits = Limits(threads, shared_bytes, 0, 64)
    return Source(spec, "small", "hip", text, tuple(Field(name, "ptr") for name in names), limits)


def launch(
    body: str,
    *,
    target: str = "gfx950",
    threads: int = 64,
    blocks: int = 1,
    seed: int = 0,
    shared_bytes: int = 4096,
    inputs: dict[str, Array] | None = None,
    outputs: dict[str, Array] | None = None,
) -> Device:
    """Run a body; `inputs` may be read only, `outputs` are written in place."""
    memory = {name: Memory(name, x.ctypes.data, x.nbytes) for name, x in (inputs or {}).items()}
    memory |= {name: writable(name, x.ctypes.data, x.nbytes) for name, x in (outputs or {}).items()}
    text = source(body, tuple(memory), target, threads, shared_bytes)
    device = Device(target, seed, list(memory.values()))
    packer = Packer(text.abi, list(memory))
    block = ArgumentBlock(packer.template({}))
    packer.pack(block, [m.base for m in memory.values()])
    device.launch(device.load(build.build(text), text), blocks, block, 0)
    return device


def lanes_of(function: str, x: Array) -> Array:
    """A function of one float, applied to up to 64 numbers by as many lanes."""
    given, found = np.zeros(64, np.float32), np.zeros(64, np.float32)
    given[: len(x)] = x
    body = f"((float*)args.out)[thread_id()] = {function}(((const float*)args.x)[thread_id()]);"
    launch(body, inputs={"x": given}, outputs={"out": found})
    return found[: len(x)]
