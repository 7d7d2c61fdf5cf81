"""clang and lld from the `ziglang` package: AMD code objects without ROCm, and host libraries without a toolchain."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from qla.codegen import elf
from qla.codegen.spec import Source
from qla.errors import CompilationError, CompilerNotFoundError, install_hint
from qla.runtime.compilers.base import Binary, CompilerIdentity, failed, file_identity, wheel_folders
from qla.runtime.compilers.cpu import cpu_features, mcpu
from qla.targets.base import Target

_SECONDS = 600
# Bumped when a command line below, or SUPPORT, changes what comes out: both are part of the compiler's build.
_RECIPE = "2"

# Variables that the child keeps. All others are withheld, because clang lets many of them add options or folders
# (CCC_OVERRIDE_OPTIONS, CPATH, ZIG_LIB_DIR, SOURCE_DATE_EPOCH, …): so none can alter the code, and none is in an id.
_KEPT_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "SYSTEMROOT")

# clang may turn an aggregate copy or initialization into a call of these even in freestanding code; there is no libc to
# link, so they travel along, hidden, in a file of their own. The loops are not recognized as calls to themselves
# because freestanding code has no builtin functions.
SUPPORT = """\
typedef __SIZE_TYPE__ bytes_t;
#define HIDDEN extern "C" __attribute__((visibility("hidden"), used))
HIDDEN void* memcpy(void* __restrict to, const void* __restrict from, bytes_t n) {
  for (bytes_t i = 0; i < n; ++i) ((char*)to)[i] = ((const char*)from)[i];
  return to;
}
HIDDEN void* memmove(void* to, const void* from, bytes_t n) {
  if (to <= from) for (bytes_t i = 0; i < n; ++i) ((char*)to)[i] = ((const char*)from)[i];
  else while (n--) ((char*)to)[n] = ((const char*)from)[n];
  return to;
}
HIDDEN void* memset(void* to, int value, bytes_t n) {
  for (bytes_t i = 0; i < n; ++i) ((char*)to)[i] = (char)value;
  return to;
}
"""


@cache
def _zig() -> tuple[Path, CompilerIdentity]:
    """The binary and who it is, once per process (a failure is not remembered)."""
    for folder in wheel_folders("ziglang"):
        path = folder / ("zig.exe" if os.name == "nt" else "zig")
        if path.exists():
            break
    else:
        found = shutil.which("zig")
        if found is None:
            what = "no clang for this target: the package ziglang is not installed"
            raise CompilerNotFoundError(f"{what}; {install_hint('cpu')}")
        path = Path(found).resolve()
    command = [str(path), "version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerNotFoundError(f"`{' '.join(command)}` does not run: {error}; {install_hint('cpu')}") from error
    build = f"{file_identity(path, 'ziglang')} recipe:{_RECIPE}"
    return path, CompilerIdentity("zig", done.stdout.strip(), build)


def location() -> Path:
    """The compiler's binary; raises `CompilerNotFoundError` where there is none."""
    return _zig()[0]


class _Session:
    """A private folder in which one source is compiled, step by step; a context manager."""

    def __init__(self, source: Source, identity: CompilerIdentity, path: Path) -> None:
        self._source, self._identity, self._path = source, identity, path
        self._log: list[str] = []

    def __enter__(self) -> _Session:
        self._folder = tempfile.TemporaryDirectory(prefix="qla-build-")
        self.folder = Path(self._folder.name)
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.cleanup()

    @property
    def log(self) -> str:
        return "".join(self._log)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def run(self, *arguments: str) -> None:
        """Run zig here; names of files are relative, so that no path gets into the output."""
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        # Its caches would otherwise go to the home folder, which may be missing, read-only or shared.
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(self.folder / "global")
        environment["ZIG_LOCAL_CACHE_DIR"] = str(self.folder / "local")
        try:
            done = subprocess.run(
                [str(self._path), *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self.failure(f"did not finish in {_SECONDS} s: zig {' '.join(arguments)}") from None
        self._log.append(done.stdout)
        if done.returncode:
            raise self.failure(f"failed: zig {' '.join(arguments)}")

    def linked(self, name: str) -> bytes:
        """The finished file; refused if it needs a function from elsewhere, which nothing would provide."""
        data = self.read(name)
        if missing := elf.undefined_symbols(data):
            raise self.failure(f"left undefined symbols: {', '.join(missing)}")
        return data

    def failure(self, why: str) -> CompilationError:
        return failed(self._source, self._identity, why, self.log)


class _Zig:
    name = "zig"

    def __init__(self, target: Target) -> None:
        self.target = target

    def identity(self) -> CompilerIdentity:
        identity = _zig()[1]
        return CompilerIdentity(self.name, identity.version, identity.build)

    def _session(self, source: Source) -> _Session:
        return _Session(source, self.identity(), _zig()[0])

    def _build(self, source: Source, link: Callable[[_Session, Source], bytes]) -> Binary:
        identity = self.identity()
        began = time.perf_counter()
        with self._session(source) as session:
            data = link(session, source)
            return Binary(data, session.log, time.perf_counter() - began, identity)


class ZigHip(_Zig):
    """HIP C++ to an AMD code object.

    clang's own HIP driver would bundle the object with a host program, and needs tools that the package does not have;
    so the device half runs alone to LLVM IR, and the two later steps are spelled out.

    Parameters
    ----------
    target : gives the architecture (its name) and the flags.
    """

    name = "zig-hip"

    def compile(self, source: Source) -> Binary:
        return self._build(source, self._link)

    def assembly(self, source: Source) -> str:
        """The assembly text of exactly the code that `compile` gives."""
        with self._session(source) as session:
            self._to_ir(session, source)
            return self._text(session)

    def compile_with_assembly(self, source: Source) -> tuple[Binary, str]:
        """Both, for less than each alone."""
        texts: list[str] = []

        def link(session: _Session, source: Source) -> bytes:
            data = self._link(session, source)
            texts.append(self._text(session))
            return data

        return self._build(source, link), texts[0]

    def _link(self, session: _Session, source: Source) -> bytes:
        self._to_ir(session, source)
        self._from_ir(session, "-c", "kernel.o")
        session.run("ld.lld", "-shared", "kernel.o", "-o", "kernel.co")
        return session.linked("kernel.co")

    def _text(self, session: _Session) -> str:
        self._from_ir(session, "-S", "kernel.s")
        return session.read("kernel.s").decode()

    def _flags(self) -> list[str]:
        return [*self.target.flags, "-Wno-unused-command-line-argument"]

    def _to_ir(self, session: _Session, source: Source) -> None:
        session.write("kernel.hip", source.text)
        session.run(
            "clang", "-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", f"--offload-arch={self.target.name}",
            # Every ROCm that we support loads version 5; the default moves with clang.
            "-mcode-object-version=5", "-O3", *self._flags(), "-S", "-emit-llvm", "kernel.hip", "-o", "kernel.ll",
        )  # fmt: skip

    def _from_ir(self, session: _Session, form: str, output: str) -> None:
        session.run(
            "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={self.target.name}", "-nogpulib", "-O3", *self._flags(),
            # The IR is optimized already; a second round of the pipeline would unroll and inline again.
            "-Xclang", "-disable-llvm-passes", form, "-x", "ir", "kernel.ll", "-o", output,
        )  # fmt: skip


class ZigHost(_Zig):
    """Freestanding C++ to a shared library for a CPU.

    Parameters
    ----------
    target : gives the flags.
    features : of the CPU to build for, as `cpu_features` gives them; this machine's by default.
    """

    name = "zig-host"

    def __init__(self, target: Target, features: Sequence[str] = ()) -> None:
        super().__init__(target)
        self.features = tuple(features) or cpu_features()

    def compile(self, source: Source) -> Binary:
        return self._build(source, self._link)

    def _link(self, session: _Session, source: Source) -> bytes:
        session.write("kernel.cpp", source.text)
        session.write("support.cpp", SUPPORT)
        session.run(
            "c++", "-target", self.features[0], f"-mcpu={mcpu(self.features)}", "-x", "c++", "-std=c++20", "-O3",
            *self.target.flags,
            # No libc to link and nobody to unwind; no debug sections, which would hold the folder's path.
            "-ffreestanding", "-nostdlib", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-g0",
            "-fPIC", "-shared", "-Wl,-s", "kernel.cpp", "support.cpp", "-o", "kernel.so",
        )  # fmt: skip
        return session.linked("kernel.so")
