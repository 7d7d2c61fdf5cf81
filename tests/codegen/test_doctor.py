"""The doctor: all parts are in its table, and what is missing comes with what to install."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qla.codegen import cli, doctor
from qla.codegen.doctor import Part
from qla.runtime.compilers import hiprtc, nvrtc, zig

PARTS = ["torch", "HIP library", "hip-python", "hiprtc", "CuPy", "NVRTC", "clang (ziglang)"]


def parts() -> dict[str, Part]:
    return {part.name: part for part in doctor.examine()}


def test_the_table_has_every_part() -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in PARTS)
    assert torch.__version__ in result.output


def test_what_is_installed_has_a_version_and_a_place() -> None:
    found = parts()
    for name in ("torch", "NVRTC", "clang (ziglang)"):
        assert found[name].version
        assert found[name].where.startswith("/")
        assert not found[name].advice
    for part in found.values():
        assert part.version or part.advice, part.name


def test_what_is_missing_comes_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise ImportError("no such module")

    def no_library(*_: Any, **__: Any) -> Any:
        raise OSError("no such library")

    def not_installed(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.setattr(doctor.metadata, "version", not_installed)
    for module in (doctor, nvrtc, zig):
        monkeypatch.setattr(module, "wheel_folders", lambda package: [])
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", no_library)
    monkeypatch.setattr(zig.shutil, "which", lambda name: None)
    monkeypatch.setattr(hiprtc, "_found", None)
    monkeypatch.setattr(hiprtc, "_absent", False)
    nvrtc._library.cache_clear()
    zig._zig.cache_clear()
    found = parts()
    extras = {"hip-python": "rocm", "hiprtc": "rocm", "CuPy": "cuda13", "NVRTC": "cuda13", "clang (ziglang)": "cpu"}
    for name, extra in extras.items():
        assert not found[name].version, name
        assert f"pip install '.[{extra}]'" in found[name].advice
    assert "install ROCm" in found["HIP library"].advice
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert result.output.count("not found") >= 6


@pytest.mark.parametrize(("hip", "cuda", "said"), [("7.2", None, "ROCm, HIP 7.2"), (None, "13.0", "CUDA 13.0")])
def test_the_build_of_torch(monkeypatch: pytest.MonkeyPatch, hip: Any, cuda: Any, said: str) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert doctor.torch_build() == said


def test_gpus_are_listed_with_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(device: torch.device) -> str:
        if device.index:
            raise doctor.QlaError("device: got another")
        return "gfx950"

    monkeypatch.setattr(doctor, "device_target", target)
    cuda = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: f"name {index}"
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    found = parts()
    assert (found["GPU 0"].version, found["GPU 0"].where) == ("gfx950", "name 0")
    assert (found["GPU 1"].version, found["GPU 1"].advice) == ("", "device: got another")
