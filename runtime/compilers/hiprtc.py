"""hiprtc through hip-python, on machines with ROCm."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

from qla.codegen.spec import Source
from qla.errors import CompilerNotFoundError, install_hint
from qla.runtime.compilers.base import Binary, CompilerIdentity, failed, file_identity, mapped_libraries
from qla.runtime.hip_libraries import mapped_first
from qla.targets.base import Target

_HINT = f"install ROCm, and {install_hint('rocm')}; to compile without ROCm, {install_hint('cpu')}"
# hiprtc is a front to the code object manager, which holds the compiler itself: both make the build.
_LIBRARIES = ("libhiprtc", "libamd_comgr", "libamdhip64")

_lock = threading.Lock()
_found: tuple[Any, CompilerIdentity] | None = None
_absent = False


def _load(binding: Any) -> tuple[Any, CompilerIdentity] | None:
    """The binding and who it is, or None without ROCm: hip-python imports without it and fails at the first call."""
    try:
        if binding is None:
            binding = importlib.import_module("hip").hiprtc
        with mapped_first():
            status, major, minor = binding.hiprtcVersion()
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None
    if int(status):
        return None
    files = [file for stem in _LIBRARIES for file in mapped_libraries(stem)]
    build = " ".join(dict.fromkeys(file_identity(file.resolve()) for file in files))
    return binding, CompilerIdentity("hiprtc", f"{major}.{minor}", build)


class Hiprtc:
    """HIP C++ to a code object.

    Parameters
    ----------
    target : gives the architecture (its name) and the flags.
    binding : stands in for the `hip.hiprtc` module.
    """

    def __init__(self, target: Target, binding: Any = None) -> None:
        self.target, self._binding = target, binding

    def available(self) -> bool:
        """Whether hiprtc works here; asked of the library once per process."""
        return self._hiprtc() is not None

    def identity(self) -> CompilerIdentity:
        return self._required()[1]

    def options(self) -> list[str]:
        # Without an explicit architecture hiprtc asks the driver for the current device's.
        return [f"--offload-arch={self.target.name}", "-O3", *self.target.flags]

    def compile(self, source: Source) -> Binary:
        hiprtc, identity = self._required()
        began = time.perf_counter()
        status, program = hiprtc.hiprtcCreateProgram(
            source.text.encode(), f"{source.entry}.hip".encode(), 0, None, None
        )
        if int(status):
            raise failed(source, identity, f"could not start ({_name(status)})", "")
        try:
            options = [option.encode() for option in self.options()]
            status = hiprtc.hiprtcCompileProgram(program, len(options), options)[0]
            log = _read(hiprtc, program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            if int(status):
                raise failed(source, identity, f"failed ({_name(status)})", log)
            data = _read(hiprtc, program, "Code")
            if not data:
                raise failed(source, identity, "gave no code", log)
            return Binary(data, log, time.perf_counter() - began, identity)
        finally:
            hiprtc.hiprtcDestroyProgram(program.createRef())

    def _required(self) -> tuple[Any, CompilerIdentity]:
        found = self._hiprtc()
        if found is None:
            raise CompilerNotFoundError(f"hiprtc is not available; {_HINT}")
        return found

    def _hiprtc(self) -> tuple[Any, CompilerIdentity] | None:
        global _found, _absent
        if self._binding is not None:
            return _load(self._binding)
        with _lock:
            # Both answers are kept: asking again costs a search for the library on every call.
            if _found is None and not _absent:
                _found = _load(None)
                _absent = _found is None
            return _found


def _name(status: Any) -> str:
    """Of a `hiprtcResult`, which prints as its number."""
    return str(getattr(status, "name", status))


def _read(hiprtc: Any, program: Any, what: str) -> bytes:
    status, size = getattr(hiprtc, f"hiprtcGet{what}Size")(program)
    if int(status) or not size:
        return b""
    data = bytearray(size)
    status = getattr(hiprtc, f"hiprtcGet{what}")(program, data)[0]
    return b"" if int(status) else bytes(data)
