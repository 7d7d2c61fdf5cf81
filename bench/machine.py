"""What a row says about where it was measured: device, clocks, driver, compiler, and which code."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import qla
from qla.errors import CompilerNotFoundError
from qla.runtime.compilers import compiler_for
from qla.runtime.drivers import device_target
from qla.targets import TARGETS

__all__ = ["Machine", "clocks", "code_digest", "describe"]

_CODE = ("qla", "qla.codegen", "qla.runtime", "qla.runtime.compilers", "qla.runtime.drivers", "qla.targets")
_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # nvmlClockType_t


@dataclass(frozen=True)
class Machine:
    """Where and with what rows are measured.

    Parameters
    ----------
    kind : ``cuda`` (also for ROCm) or ``cpu``, as torch names it.
    device : name.
    target : of the kernels.
    driver : version, empty where there is none.
    torch : version.
    compiler : name, version and build.
    version : of this package.
    code : digest of everything that shapes a kernel or its launch.
    """

    kind: str
    device: str
    target: str
    driver: str
    torch: str
    compiler: str
    version: str
    code: str


def describe(kind: str) -> Machine:
    """Return the facts of this machine; raises `UnsupportedError` where no target fits its GPU."""
    target = device_target(torch.device(kind))
    try:
        identity = compiler_for(TARGETS[target]).identity()
        compiler = f"{identity.name} {identity.version} ({identity.build})"
    except CompilerNotFoundError:
        compiler = "none"
    device = torch.cuda.get_device_name() if kind == "cuda" else _cpu_name()
    return Machine(
        kind, device, target, _driver(kind), torch.__version__, compiler, str(qla.__version__), code_digest()
    )


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def code_digest() -> str:
    """Twelve hexadecimal digits that change with any source or template that makes or launches kernels."""
    digest = hashlib.sha256()
    found: list[tuple[str, bytes]] = []
    for package in _CODE:
        import_module(package)
        found += [(f"{package}/{f.name}", f.read_bytes()) for f in files(package).iterdir() if _is(f, ".py")]
    for folder in ("kernels", "tile"):
        templates = files("qla.templates") / folder
        found += [(f"{folder}/{f.name}", f.read_bytes()) for f in templates.iterdir() if _is(f, ".j2")]
    tuned = files("qla.targets") / "tuned"
    found += [(f"tuned/{f.name}", f.read_bytes()) for f in (tuned.iterdir() if tuned.is_dir() else ())]
    for name, data in sorted(found):
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()[:12]


def _is(file: Any, suffix: str) -> bool:
    return bool(file.is_file() and file.name.endswith(suffix))


@cache
def _nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library, initialized; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _driver(kind: str) -> str:
    if kind == "cpu":
        return ""
    if torch.version.hip:
        with suppress(OSError):
            return Path("/sys/module/amdgpu/version").read_text().strip()
        return ""
    library, text = _nvml(), ctypes.create_string_buffer(80)
    return text.value.decode() if library and library.nvmlSystemGetDriverVersion(text, 80) == 0 else ""


def clocks(kind: str) -> dict[str, int]:
    """SM and memory clock in MHz at this moment; empty where nothing tells them."""
    library = _nvml() if kind == "cuda" and not torch.version.hip else None
    if library is None:
        return {}
    handle, value = ctypes.c_void_p(), ctypes.c_uint()
    # By UUID: the indices of CUDA and of the management library need not agree.
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return {}
    found = {}
    for name, which in (("sm_mhz", _SM_CLOCK), ("memory_mhz", _MEMORY_CLOCK)):
        if library.nvmlDeviceGetClockInfo(handle, which, ctypes.byref(value)) == 0:
            found[name] = value.value
    return found
