"""Builds the machine, and emitted HIP sources for it: the text as it is, with the package ziglang's clang."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path

from qla.codegen.spec import Source
from qla.runtime.compilers.zig import _zig

HERE = Path(__file__).parent
SECONDS = 300

COMMON = (
    *("--target=x86_64-linux-gnu", "-march=x86-64-v3", "-x", "c++", "-std=c++17", "-ffreestanding", "-nostdlib"),
    *("-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-fPIC", "-fvisibility=default", "-g0"),
)
# Calls for every load and store (also in places where the compiler could prove that a plain device needs no check), and
# for array indices out of bounds. Stacks are lanes' registers: they stay as they are.
INSTRUMENTED = (
    *("-fsanitize=address,array-bounds,alignment", "-fno-sanitize-recover=all"),
    "-fconvergent-functions",  # as for a device: a call that waits for other lanes is in one place for all of them
    *("-mllvm", "-asan-instrumentation-with-call-threshold=0", "-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0"),
    *("-mllvm", "-asan-opt-globals=0", "-mllvm", "-asan-opt-same-temp=0"),
)
WARNINGS = ("-Wall", "-Werror", "-Wno-unknown-attributes", "-Wno-unused-function", "-Wno-unused-variable")


class BuildError(Exception):
    """The compiler does not take a text."""


def _run(folder: Path, *arguments: str) -> None:
    environment = {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
    }
    done = subprocess.run(
        [str(_zig()[0]), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise BuildError(f"zig {' '.join(arguments)}\n{done.stderr}")


@cache
def machine() -> ctypes.CDLL:
    """The machine, built once per process; emitted kernels find it among the process's symbols."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise BuildError(
            f"lanes switch stacks as Linux on x86_64 does; this is {platform.system()} {platform.machine()}"
        )
    with tempfile.TemporaryDirectory(prefix="qla-executor-") as name:
        folder = Path(name)
        _run(
            folder, "clang", *COMMON, "-O3", "-Wall", "-Werror", "-Wno-format-security", "-c", "-o", "machine.o",
            str(HERE / "machine.cpp"),
        )  # fmt: skip
        _run(folder, "ld.lld", "-shared", "machine.o", "-o", "machine.so")
        return ctypes.CDLL(str(folder / "machine.so"), mode=ctypes.RTLD_GLOBAL)


@lru_cache(maxsize=256)
def build(source: Source) -> bytes:
    """A shared library of an emitted kernel, in which `executor_entry(arguments)` runs one lane.

    Raises
    ------
    BuildError
        The text does not compile, or uses what `device.h` does not have.
    """
    target = source.spec.target
    with tempfile.TemporaryDirectory(prefix="qla-executor-") as name:
        folder = Path(name)
        (folder / "kernel.hip").write_text(source.text, encoding="utf-8")
        (folder / "main.cpp").write_text(
            '#include "device.h"\n#include "kernel.hip"\n'
            'extern "C" __attribute__((no_sanitize("address"))) void executor_entry(const void* arguments) {\n'
            f"  {source.entry}(*(const Args*)arguments);\n"
            "}\n"
            'extern "C" __attribute__((weak)) char __start_lds[], __stop_lds[];\n'
            'extern "C" char* executor_lds() { return __start_lds; }\n'
            'extern "C" unsigned long executor_lds_size() { return __stop_lds - __start_lds; }\n',
            encoding="utf-8",
        )
        _run(
            folder, "clang", *COMMON, *INSTRUMENTED, *WARNINGS, "-O2", f"-D__{target}__", f"-I{HERE}", "-c", "main.cpp",
            "-o", "kernel.o",
        )  # fmt: skip
        _run(folder, "ld.lld", "-shared", "kernel.o", "-o", "kernel.so")
        return (folder / "kernel.so").read_bytes()
