"""NVRTC through ctypes, from the wheel that brings it: no GPU, driver, toolkit or CuPy is needed to compile."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qla.codegen.spec import Source
from qla.errors import CompilationError, CompilerNotFoundError, install_hint
from qla.runtime.compilers.base import Binary, CompilerIdentity, failed, file_identity, mapped_libraries, wheel_folders
from qla.targets.base import Target

# Newest first; each wheel has its own folder under the shared `nvidia` package.
_WHEEL_LIBRARIES = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
_SYSTEM_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@dataclass(frozen=True)
class _Library:
    handle: ctypes.CDLL
    identity: CompilerIdentity


@cache
def _library() -> _Library:
    """Load NVRTC once per process (a failure is not remembered: the package may be installed meanwhile)."""
    for folder in wheel_folders("nvidia"):
        for relative in _WHEEL_LIBRARIES:
            path = folder / relative
            if path.exists():
                # NVRTC opens its builtins by bare name when it first compiles. The folder of a wheel is not on the
                # loader's path, but a library that is already loaded is found by its name.
                builtins = sorted(path.parent.glob("libnvrtc-builtins.so*"))
                for library in builtins:
                    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                return _described(ctypes.CDLL(str(path)), [path, *builtins])
    for name in _SYSTEM_LIBRARIES:
        try:
            handle = ctypes.CDLL(name)
        except OSError:
            continue
        library_files = mapped_libraries("libnvrtc")
        beside = [p for file in library_files[:1] for p in sorted(file.parent.glob("libnvrtc-builtins.so*"))]
        return _described(handle, sorted({*library_files, *beside}))
    raise CompilerNotFoundError(f"NVRTC is not installed; {install_hint('cuda13', 'cuda12', 'cpu')}")


def _described(handle: ctypes.CDLL, files: list[Path]) -> _Library:
    major, minor = ctypes.c_int(), ctypes.c_int()
    handle.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    handle.nvrtcGetErrorString.restype = ctypes.c_char_p
    build = " ".join(dict.fromkeys(file_identity(file.resolve()) for file in files))
    return _Library(handle, CompilerIdentity("nvrtc", f"{major.value}.{minor.value}", build))


class Nvrtc:
    """CUDA C++ to a cubin.

    Parameters
    ----------
    target : gives the architecture (its name, with the ``a`` that wgmma needs) and the flags.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def identity(self) -> CompilerIdentity:
        return _library().identity

    def options(self) -> list[str]:
        """The compiler's command line; the assembler's verbose lines are what `qla.codegen.resources` reads."""
        own = [f"-arch={self.target.name}", "--ptxas-options=-v"]
        # Where there is a driver, NVRTC 13 takes what it has compiled before from a cache of its own, without a log.
        own += ["--no-cache"] if int(_library().identity.version.split(".")[0]) >= 13 else []
        # A target may name its architecture itself; NVRTC refuses two of them.
        if any(flag.startswith(("-arch", "--gpu-architecture")) for flag in self.target.flags):
            own = own[1:]
        return [*own, *self.target.flags]

    def compile(self, source: Source) -> Binary:
        library = _library()
        began = time.perf_counter()
        program = _Program(library.handle, source)
        try:
            status, log = program.build(self.options())
            if status:
                reason = library.handle.nvrtcGetErrorString(status).decode()
                raise failed(source, library.identity, f"failed ({reason})", log)
            return Binary(program.cubin(), log, time.perf_counter() - began, library.identity)
        finally:
            program.close()


class _Program:
    """One nvrtcProgram; `close` must be called."""

    def __init__(self, handle: ctypes.CDLL, source: Source) -> None:
        self._handle, self._program, self._source = handle, ctypes.c_void_p(), source
        # The name shows in messages and nowhere in the code: no path is in it.
        self._check(
            handle.nvrtcCreateProgram(
                ctypes.byref(self._program),
                source.text.encode(),
                f"{source.entry}.cu".encode(),
                ctypes.c_int(0),
                None,
                None,
            )
        )

    def build(self, options: list[str]) -> tuple[int, str]:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status: int = self._handle.nvrtcCompileProgram(self._program, ctypes.c_int(len(options)), encoded)
        log = self._read("ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
        return status, log

    def cubin(self) -> bytes:
        return self._read("CUBIN")

    def close(self) -> None:
        self._handle.nvrtcDestroyProgram(ctypes.byref(self._program))

    def _read(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._handle, f"nvrtcGet{what}Size")(self._program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._handle, f"nvrtcGet{what}")(self._program, data))
        return data.raw

    def _check(self, status: int) -> None:
        if status:
            message = self._handle.nvrtcGetErrorString(status).decode()
            raise CompilationError(f"NVRTC failed outside compilation ({message})", "", self._source.entry)
