"""What qla would use here to compile and to launch, and how to get what is not there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from qla.errors import QlaError, install_hint
from qla.runtime.compilers import zig
from qla.runtime.compilers.base import mapped_libraries, wheel_folders
from qla.runtime.compilers.hiprtc import Hiprtc
from qla.runtime.compilers.nvrtc import Nvrtc
from qla.runtime.compilers.zig import ZigHost
from qla.runtime.drivers import device_target
from qla.runtime.hip_libraries import check_one_runtime, mapped_first, mapped_runtimes
from qla.targets import TARGETS

_ROCM = "install ROCm, or a torch that brings it"
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True)
class Part:
    """Something that qla can use.

    Parameters
    ----------
    name : of the part.
    purpose : what it is needed for.
    version : empty where it is not found, or cannot be used.
    where : path, and who found it.
    advice : what to install or to change; empty where nothing is.
    """

    name: str
    purpose: str
    version: str = ""
    where: str = ""
    advice: str = ""


def examine() -> Iterator[Part]:
    """All parts. Loads the libraries it reports of, so that one that is there but cannot be loaded shows."""
    mapped = mapped_runtimes()
    yield Part("torch", "everything", f"{torch.__version__} ({torch_build()})", str(Path(torch.__file__).parent))
    yield from _gpus()
    yield _hip_library(mapped)
    yield _package("hip-python", "launching on AMD GPUs", ("hip-python",), "hip", "rocm")
    yield _hiprtc()
    yield _package("CuPy", "launching on NVIDIA GPUs", _CUPY, "cupy", "cuda13", "cuda12")
    yield _nvrtc()
    yield _zig()


def torch_build() -> str:
    """Which GPUs torch was built for."""
    if torch.version.hip:
        return f"ROCm, HIP {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _gpus() -> Iterator[Part]:
    if not torch.cuda.is_available():
        yield Part("GPU", "running on a GPU", advice="torch sees none; calls on the CPU run the host target")
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        try:
            yield Part(f"GPU {index}", "running on a GPU", device_target(torch.device("cuda", index)), name)
        except QlaError as error:
            yield Part(f"GPU {index}", "running on a GPU", "", name, str(error))


def _hip_library(mapped: list[str]) -> Part:
    """The HIP runtime that torch mapped, else the one that hip-python opens."""
    part = ("HIP library", "launching on AMD GPUs")
    try:
        hip: Any = importlib.import_module("hip").hip
        with mapped_first():
            status, number = hip.hipRuntimeGetVersion()
    except (ImportError, AttributeError):
        # torch's own is reported without a version, which only a call would tell.
        paths = "\n".join(mapped)
        return Part(*part, "unknown" if mapped else "", paths, "" if mapped else f"{_ROCM}, and hip-python")
    except (RuntimeError, OSError, ValueError) as error:
        return Part(*part, "", "\n".join(mapped), f"{_ROCM} ({error})")
    files = mapped_runtimes()
    where = "\n".join(f"{path} ({'mapped by torch' if path in mapped else 'found by hip-python'})" for path in files)
    if int(status):
        return Part(*part, "", where, f"hipRuntimeGetVersion: {status.name}")
    version = f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"
    try:
        check_one_runtime(files)
    except QlaError as error:
        return Part(*part, version, where, str(error))
    return Part(*part, version, where)


def _package(name: str, purpose: str, distributions: tuple[str, ...], module: str, *extras: str) -> Part:
    folders = wheel_folders(module)
    for distribution in distributions:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return Part(name, purpose, f"{version} ({distribution})", "\n".join(map(str, folders)))
    return Part(name, purpose, "unknown" if folders else "", "\n".join(map(str, folders)), install_hint(*extras))


def _hiprtc() -> Part:
    part = ("hiprtc", "compiling for AMD GPUs, before clang")
    compiler = Hiprtc(TARGETS["gfx950"])
    try:
        version = compiler.identity().version
    except QlaError as error:
        return Part(*part, advice=str(error))
    return Part(*part, version, "\n".join(map(str, mapped_libraries("libhiprtc.so"))))


def _nvrtc() -> Part:
    part = ("NVRTC", "compiling for NVIDIA GPUs")
    try:
        version = Nvrtc(TARGETS["sm_90a"]).identity().version
    except QlaError as error:
        return Part(*part, advice=str(error))
    return Part(*part, version, "\n".join(map(str, mapped_libraries("libnvrtc.so"))))


def _zig() -> Part:
    part = ("clang (ziglang)", "compiling for CPUs, and for AMD GPUs without hiprtc")
    try:
        version = ZigHost(TARGETS["host"]).identity().version
        return Part(*part, version, str(zig.location()))
    except QlaError as error:
        return Part(*part, advice=str(error))
