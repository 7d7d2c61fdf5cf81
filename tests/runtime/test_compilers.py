"""The compilers, with real ones where a wheel brings them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qla.codegen import elf
from qla.codegen.spec import KernelSpec, Limits, Source
from qla.errors import CompilationError, CompilerNotFoundError
from qla.runtime.compilers import base, compiler_for, cpu, nvrtc, zig
from qla.runtime.compilers.hiprtc import Hiprtc
from qla.runtime.compilers.nvrtc import Nvrtc
from qla.runtime.compilers.zig import ZigHip, ZigHost
from qla.targets import TARGETS

CUDA = """
extern "C" __global__ void __launch_bounds__(128) kernel(float* o, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  o[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
HIP = """
#ifndef __global__
#define __global__ __attribute__((global))
#endif
typedef short bf16x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
struct Arguments { const bf16x4* a; f32x16* o; };
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64))) void kernel(const Arguments arguments) {
  const unsigned lane = __builtin_amdgcn_workitem_id_x();
  const bf16x4 a = arguments.a[lane + 64 * __builtin_amdgcn_workgroup_id_x()];
  arguments.o[lane] = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, a, f32x16{}, 0, 0, 0);
}
"""
# The copies are of a size that clang turns into calls of memset and memcpy.
HOST = """
extern "C" __attribute__((visibility("default"))) void kernel(float* to, const float* from, long n, long more) {
  float sums[1024] = {};
  for (long i = 0; i < n; ++i) sums[i & 1023] += from[i];
  __builtin_memcpy(to, sums, more);
}
"""


@pytest.fixture(autouse=True)
def _private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def source(target: str, text: str) -> Source:
    return Source(
        KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, target),
        "kernel",
        TARGETS[target].language,
        text,
        (),
        Limits(64, 0, 0, 64),
    )


def test_nvrtc_gives_a_cubin_and_the_assembler_log() -> None:
    compiler = Nvrtc(TARGETS["sm_90a"])
    built = compiler.compile(source("sm_90a", CUDA))
    assert elf.is_elf(built.data)
    assert "Compiling entry function 'kernel' for 'sm_90a'" in built.log
    assert built.compiler == compiler.identity()
    assert "gnu:" in built.compiler.build or "sha256:" in built.compiler.build
    assert built.seconds > 0


def test_nvrtc_failure_keeps_log_and_source() -> None:
    broken = source("sm_90a", CUDA.replace("float* o", "floaty* o"))
    with pytest.raises(CompilationError) as raised:
        Nvrtc(TARGETS["sm_90a"]).compile(broken)
    assert "floaty" in raised.value.log
    assert Path(raised.value.source_path).read_text() == broken.text
    assert Path(raised.value.source_path).suffix == ".cu"


def test_builds_leave_nothing_behind(tmp_path: Path) -> None:
    ZigHip(TARGETS["gfx942"]).compile(source("gfx942", HIP))
    ZigHost(TARGETS["host"]).compile(source("host", HOST))
    assert list(tmp_path.iterdir()) == []


def test_nvrtc_passes_the_target_flags_and_one_architecture() -> None:
    target = replace(TARGETS["sm_90a"], flags=("-DOUT=int", "-arch=sm_90a"))
    text = 'extern "C" __global__ void kernel(OUT* o) { *o = 1; }'
    assert Nvrtc(target).options().count("-arch=sm_90a") == 1
    assert Nvrtc(target).compile(source("sm_90a", text)).data


def test_missing_nvrtc_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise OSError("no such library")

    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc, "wheel_folders", lambda package: [])
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", absent)
    with pytest.raises(CompilerNotFoundError, match=r"the extra cuda13.*pip install '\.\[cuda13\]'"):
        Nvrtc(TARGETS["sm_90a"]).identity()


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_zig_gives_a_code_object_for_the_target(name: str) -> None:
    compiler = ZigHip(TARGETS[name])
    built = compiler.compile(source(name, HIP))
    assert name.encode() in next(n.payload for n in elf.notes(built.data) if n.owner == "AMDGPU")
    text = compiler.assembly(source(name, HIP))
    assert f"amdgcn-amd-amdhsa--{name}" in text
    assert "v_mfma_f32_32x32x8" in text


def test_zig_refuses_instructions_of_another_target() -> None:
    text = HIP.replace("ext_vector_type(4)", "ext_vector_type(8)").replace("short bf16x4", "__bf16 bf16x4")
    text = text.replace("32x32x8bf16_1k", "32x32x16_bf16")
    assert ZigHip(TARGETS["gfx950"]).compile(source("gfx950", text)).data
    with pytest.raises(CompilationError) as raised:
        ZigHip(TARGETS["gfx942"]).compile(source("gfx942", text))
    assert "gfx950-insts" in raised.value.log


def test_hip_code_may_not_leave_a_function_undefined() -> None:
    device = "__attribute__((device))"
    text = HIP.replace("struct Arguments", f'extern "C" {device} float elsewhere(float);\nstruct Arguments')
    text = text.replace("f32x16{}", "f32x16{elsewhere(1.0f)}")
    with pytest.raises(CompilationError, match=r"undefined \w*\s?symbol: elsewhere"):
        ZigHip(TARGETS["gfx950"]).compile(source("gfx950", text))


def test_host_library_runs_and_needs_nothing(tmp_path: Path) -> None:
    built = ZigHost(TARGETS["host"]).compile(source("host", HOST))
    assert elf.undefined_symbols(built.data) == []
    path = tmp_path / "kernel.so"
    path.write_bytes(built.data)
    out, given = (ctypes.c_float * 1024)(), (ctypes.c_float * 3000)(*range(3000))
    ctypes.CDLL(str(path)).kernel(out, given, ctypes.c_long(3000), ctypes.c_long(4 * 1000))
    expected = [float(sum(range(i, 3000, 1024))) for i in range(1000)] + [0.0] * 24
    assert list(out) == expected


def test_support_functions_are_what_libc_has(tmp_path: Path) -> None:
    text = """
    #define SHOWN extern "C" __attribute__((visibility("default")))
    SHOWN void copy(char* to, const char* from, long n) { __builtin_memcpy(to, from, n); }
    SHOWN void move(char* to, const char* from, long n) { __builtin_memmove(to, from, n); }
    SHOWN void set(char* to, int value, long n) { __builtin_memset(to, value, n); }
    """
    path = tmp_path / "kernel.so"
    path.write_bytes(ZigHost(TARGETS["host"]).compile(source("host", text)).data)
    library = ctypes.CDLL(str(path))
    data = bytes(range(1, 101))
    for shift in (-7, 0, 5):
        buffer = ctypes.create_string_buffer(data, 100)
        at = ctypes.addressof(buffer) + 20
        library.move(ctypes.c_void_p(at + shift), ctypes.c_void_p(at), ctypes.c_long(60))
        expected = bytearray(data)
        expected[20 + shift : 80 + shift] = data[20:80]
        assert buffer.raw == bytes(expected)
    buffer = ctypes.create_string_buffer(100)
    library.copy(buffer, data, ctypes.c_long(99))
    library.set(buffer, 0x1FF, ctypes.c_long(50))
    assert buffer.raw == b"\xff" * 50 + data[50:99] + b"\0"


def test_host_code_may_not_leave_a_function_undefined() -> None:
    text = HOST.replace("+= from[i]", "+= __builtin_expf(from[i])")
    with pytest.raises(CompilationError, match="undefined symbols: expf"):
        ZigHost(TARGETS["host"]).compile(source("host", text))


def test_host_build_is_reproducible_and_follows_the_features() -> None:
    target, kernel = TARGETS["host"], source("host", HOST)
    assert ZigHost(target).compile(kernel).data == ZigHost(target).compile(kernel).data
    plain = ZigHost(target, ("x86_64-linux-none",)).compile(kernel).data
    wide = ZigHost(target, ("x86_64-linux-none", "avx", "avx2")).compile(kernel).data
    assert plain != wide


@pytest.mark.parametrize(("triple", "table"), [("x86_64-linux-none", cpu.X86_64), ("aarch64-linux-none", cpu.AARCH64)])
def test_every_feature_name_is_known_to_the_compiler(triple: str, table: dict[str, str]) -> None:
    text = 'extern "C" __attribute__((visibility("default"))) float kernel(float x) { return x * x; }'
    assert ZigHost(TARGETS["host"], (triple, *table.values())).compile(source("host", text)).data


def test_features_are_those_that_all_cpus_have() -> None:
    text = "processor: 0\nflags\t: fpu avx avx2 pni\nprocessor: 1\nflags\t: fpu avx pni\nbugs : avx2\n"
    assert cpu.parse_cpuinfo("x86_64", text) == ("avx", "sse3")
    assert cpu.parse_cpuinfo("aarch64", "Features : fp asimd asimdhp\n") == ("fullfp16", "neon")
    assert cpu.parse_cpuinfo("riscv64", text) == ()
    assert "native" not in cpu.mcpu(cpu.cpu_features())


def test_environment_cannot_alter_what_zig_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = source("host", "#ifdef WANTED\n#error it got in\n#endif\n" + HOST)
    monkeypatch.setenv("CCC_OVERRIDE_OPTIONS", "# +-DWANTED")
    monkeypatch.setenv("ZIG_LIB_DIR", "/nonexistent")
    assert ZigHost(TARGETS["host"]).compile(kernel).data


def test_missing_zig_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    zig._zig.cache_clear()
    monkeypatch.setattr(zig, "wheel_folders", lambda package: [])
    monkeypatch.setattr(zig.shutil, "which", lambda name: None)
    for compiler in (ZigHip(TARGETS["gfx942"]), ZigHost(TARGETS["host"])):
        with pytest.raises(CompilerNotFoundError, match=r"the extra cpu.*pip install '\.\[cpu\]'"):
            compiler.compile(source(compiler.target.name, HOST))


def test_a_hanging_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    zig._zig()

    def hang(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(zig.subprocess, "run", hang)
    with pytest.raises(CompilationError, match="did not finish in 600 s"):
        ZigHost(TARGETS["host"]).compile(source("host", HOST))


class FakeHiprtc:
    """As the hip-python module behaves: tuples, an error number first, buffers filled in place."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.options, self.destroyed = status, [], 0

    def hiprtcVersion(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, 7, 2

    def hiprtcCreateProgram(self, text: bytes, name: bytes, *_: Any) -> tuple[int, Any]:  # noqa: N802
        return 0, SimpleNamespace(createRef=lambda: self)

    def hiprtcCompileProgram(self, program: Any, count: int, options: list[bytes]) -> tuple[int]:  # noqa: N802
        assert count == len(options)
        self.options = options
        return (self.status,)

    def hiprtcGetProgramLogSize(self, program: Any) -> tuple[int, int]:  # noqa: N802
        return 0, 6

    def hiprtcGetProgramLog(self, program: Any, buffer: bytearray) -> tuple[int]:  # noqa: N802
        buffer[:] = b"words\0"
        return (0,)

    def hiprtcGetCodeSize(self, program: Any) -> tuple[int, int]:  # noqa: N802
        return 0, 4

    def hiprtcGetCode(self, program: Any, buffer: bytearray) -> tuple[int]:  # noqa: N802
        buffer[:] = b"code"
        return (0,)

    def hiprtcDestroyProgram(self, reference: Any) -> tuple[int]:  # noqa: N802
        self.destroyed += 1
        return (0,)


def test_hiprtc_always_names_the_architecture() -> None:
    fake = FakeHiprtc()
    built = Hiprtc(replace(TARGETS["gfx950"], flags=("-ffast-math",)), fake).compile(source("gfx950", HIP))
    assert fake.options[0] == b"--offload-arch=gfx950"
    assert b"-ffast-math" in fake.options
    assert (built.data, built.log, built.compiler.name, built.compiler.version) == (b"code", "words", "hiprtc", "7.2")
    assert fake.destroyed == 1


def test_hiprtc_failure_carries_the_log_and_frees_the_program() -> None:
    fake = FakeHiprtc(status=6)
    with pytest.raises(CompilationError) as raised:
        Hiprtc(TARGETS["gfx942"], fake).compile(source("gfx942", HIP))
    assert raised.value.log == "words"
    assert fake.destroyed == 1


def test_hiprtc_without_rocm_is_unavailable_and_says_what_to_install() -> None:
    def absent() -> None:
        raise RuntimeError("failed to dlopen libhiprtc.so")

    compiler = Hiprtc(TARGETS["gfx942"], SimpleNamespace(hiprtcVersion=absent))
    assert not compiler.available()
    with pytest.raises(CompilerNotFoundError, match=r"the extra rocm.*pip install '\.\[rocm\]'"):
        compiler.compile(source("gfx942", HIP))


def test_choice_of_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(compiler_for(TARGETS["sm_90a"]), Nvrtc)
    assert isinstance(compiler_for(TARGETS["host"]), ZigHost)
    monkeypatch.setattr(Hiprtc, "available", lambda self: False)
    assert isinstance(compiler_for(TARGETS["gfx942"]), ZigHip)
    monkeypatch.setattr(Hiprtc, "available", lambda self: True)
    assert isinstance(compiler_for(TARGETS["gfx942"]), Hiprtc)


def test_file_identity_changes_with_the_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for path, data in zip(paths, (b"1", b"2", b""), strict=True):
        path.write_bytes(data)
    assert len({base.file_identity(path, "not-installed") for path in paths}) == 3


def test_naming_a_compiler_loads_none() -> None:
    program = (
        "import sys\nfrom qla.runtime import compilers, ids, store\nfrom qla.targets import TARGETS\n"
        "compilers.compiler_for(TARGETS['sm_90a']), compilers.compiler_for(TARGETS['host'])\n"
        "maps = open('/proc/self/maps').read()\n"
        "sys.exit('nvrtc' in maps or 'hip' in sys.modules or 'ziglang' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_a_zig_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "zig"
    broken.write_text("no program")
    broken.chmod(0o755)
    monkeypatch.setattr(zig, "wheel_folders", lambda name: [])
    monkeypatch.setattr(zig.shutil, "which", lambda name: str(broken))
    zig._zig.cache_clear()
    try:
        with pytest.raises(CompilerNotFoundError, match="does not run"):
            zig._zig()
    finally:
        zig._zig.cache_clear()
