"""Resource reports, from logs as the assembler writes them and from code objects that clang makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from qla.codegen import elf, resources
from qla.codegen.spec import KernelSpec, Limits, Source
from qla.errors import UnsupportedError
from qla.runtime.compilers.nvrtc import Nvrtc
from qla.runtime.compilers.zig import ZigHip, ZigHost
from qla.targets import TARGETS

CUDA = """
extern "C" __global__ void __launch_bounds__(128) kernel(float* o, int n) {
  __shared__ float tile[256];
  float x[64];
  for (int i = 0; i < 64; ++i) x[i] = o[i * n + threadIdx.x];
  tile[threadIdx.x & 255] = x[3];
  __syncthreads();
  for (int j = 0; j < n; ++j) for (int i = 0; i < 64; ++i) x[i] = x[i] * x[(i + 1) & 63] + tile[(i + j) & 255];
  for (int i = 0; i < 64; ++i) o[i * n + threadIdx.x] = x[i];
}
"""
SERIALIZED = """
extern "C" __global__ void __launch_bounds__(128) kernel(float* o, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 2; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;");
    d[0] += o[i];  // an accumulator is touched before the product is awaited
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  o[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
HIP = """
#ifndef __global__
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif
typedef float f32x16 __attribute__((ext_vector_type(16)));
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS))) void kernel(f32x16* o, int n) {
  __shared__ float tile[512];
  f32x16 x[VECTORS];
  const unsigned lane = __builtin_amdgcn_workitem_id_x();
  tile[lane & 511] = (float)n;
  __builtin_amdgcn_s_barrier();
  for (int i = 0; i < VECTORS; ++i) x[i] = o[i * n + lane];
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < VECTORS; ++i) x[i] = x[i] * x[(i + 1) % VECTORS] + tile[(j + n) & 511];
  for (int i = 0; i < VECTORS; ++i) o[i * n + lane] = x[i];
}
"""


def source(target: str, text: str) -> Source:
    return Source(
        KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, target),
        "kernel",
        TARGETS[target].language,
        text,
        (),
        Limits(64, 0, 0, 64),
    )


def of_cuda(text: str) -> resources.Resources:
    target = TARGETS["sm_90a"]
    built = Nvrtc(target).compile(source("sm_90a", text))
    return resources.report(built.data, built.log, target)


def of_hip(vectors: int, threads: int) -> resources.Resources:
    target = replace(TARGETS["gfx950"], flags=(f"-DVECTORS={vectors}", f"-DTHREADS={threads}"))
    built = ZigHip(target).compile(source("gfx950", HIP))
    return resources.report(built.data, built.log, target)


def test_cuda_registers_and_shared_memory() -> None:
    found = of_cuda(CUDA)
    assert found.shared_bytes == 1024
    assert 64 < found.registers <= 255
    assert found.spill_bytes == 0
    assert found.code_bytes % 16 == 0 < found.code_bytes < found.binary_bytes


def test_cuda_spills_are_counted() -> None:
    # 1024 threads leave 64 registers for each.
    found = of_cuda(CUDA.replace("bounds__(128)", "bounds__(1024)"))
    assert found.spill_bytes > 0
    assert found.scratch_bytes > 0
    assert any("spilled" in problem for problem in found.problems)


def test_serialized_wgmma_is_seen() -> None:
    found = of_cuda(SERIALIZED)
    assert found.serialized_wgmma
    assert any("serialized" in problem for problem in found.problems)


def test_injected_waits_are_counted_but_no_problem() -> None:
    log = (
        "ptxas info    : (C7517) warpgroup.wait is injected in around line 41 by compiler to allow use of registers "
        "defined by GMMA in function 'kernel'\n"
        "ptxas info    : Function properties for kernel\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 9 barriers, 2048 bytes smem\n"
    )
    found = resources.report(b"", log, TARGETS["sm_90a"])
    assert (found.injected_waits, found.registers, found.shared_bytes, found.problems) == (1, 168, 2048, ())


def test_a_log_without_register_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="--ptxas-options=-v"):
        resources.report(b"", "", TARGETS["sm_90a"])


def test_sass_of_a_cubin() -> None:
    built = Nvrtc(TARGETS["sm_90a"]).compile(source("sm_90a", SERIALIZED))
    counts = resources.count_instructions(resources.disassemble(built.data, TARGETS["sm_90a"]))
    assert counts["HGMMA"] == 2
    assert counts["EXIT"] >= 1


def test_amd_registers_and_lds() -> None:
    found = of_hip(4, 256)
    assert found.shared_bytes == 2048
    assert found.registers >= 64
    assert found.scalars > 0
    assert (found.spill_bytes, found.scratch_bytes, found.problems) == (0, 0, ())


def test_amd_spills_are_counted() -> None:
    # 1024 threads leave 128 registers for each.
    found = of_hip(16, 1024)
    assert found.registers <= 128
    assert found.spill_bytes > 0
    assert found.scratch_bytes > 0
    assert any("spilled" in problem for problem in found.problems)


def test_amd_assembly_is_counted() -> None:
    target = replace(TARGETS["gfx950"], flags=("-DVECTORS=2", "-DTHREADS=64"))
    counts = resources.count_instructions(ZigHip(target).assembly(source("gfx950", HIP)))
    assert counts["s_endpgm"] == 1
    assert counts["ds_write_b32"] == 1


def test_amd_binary_without_metadata_is_refused() -> None:
    with pytest.raises(ValueError, match="metadata note"):
        resources.report(b"\x7fELF", "", TARGETS["gfx942"])


def test_host_has_only_sizes() -> None:
    text = 'extern "C" __attribute__((visibility("default"))) int kernel(int x) { return x + 1; }'
    built = ZigHost(TARGETS["host"]).compile(source("host", text))
    found = resources.report(built.data, built.log, TARGETS["host"])
    assert found.binary_bytes == len(built.data) > found.code_bytes > 0
    assert (found.registers, found.shared_bytes, found.problems) == (0, 0, ())


@pytest.mark.parametrize("name", ["gfx942", "host"])
def test_disassembly_of_other_targets_says_what_to_use(name: str) -> None:
    with pytest.raises(UnsupportedError, match="assembly"):
        resources.disassemble(b"", TARGETS[name])


def test_instruction_counts_ignore_predicates_and_comments() -> None:
    text = "        /*0010*/              @!P0 HGMMA.64x8x16.F32 R24, gdesc[UR8], RZ ;\n"
    text += "; v_add in a comment\n\tv_add_f32 v0, v1, v2\n"
    assert resources.count_instructions(text) == Counter({"HGMMA": 1, "v_add_f32": 1})


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (b"\x05", 5),
        (b"\xff", -1),
        (b"\xc0", None),
        (b"\xc3", True),
        (b"\xcd\x01\x02", 258),
        (b"\xd1\xff\xfe", -2),
        (b"\xca\x3f\x80\x00\x00", 1.0),
        (b"\xa2hi", "hi"),
        (b"\xd9\x02hi", "hi"),
        (b"\xc4\x01\x07", b"\x07"),
        (b"\x93\x01\xa1a\x90", [1, "a", []]),
        (b"\xdc\x00\x01\x02", [2]),
        (b"\x82\xa1a\x01\xa1b\x81\xa1c\xc2", {"a": 1, "b": {"c": False}}),
        (b"\xde\x00\x01\xa1a\x01", {"a": 1}),
    ],
)
def test_msgpack(encoded: bytes, value: object) -> None:
    assert elf.unpack_msgpack(encoded) == value


def test_msgpack_extensions_are_refused() -> None:
    with pytest.raises(ValueError, match="0xc7"):
        elf.unpack_msgpack(b"\xc7\x00\x00")
