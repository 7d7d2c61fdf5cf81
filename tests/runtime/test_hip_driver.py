"""The driver of AMD devices, against a stand-in of hip-python."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import source

from qla.errors import HipError, LaunchError
from qla.runtime.arguments import ArgumentBlock
from qla.runtime.drivers import hip


class Status:
    def __init__(self, name: str, value: int = 0) -> None:
        self.name, self.value = name, value


class HipApi(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("hip")
        self.calls: list[tuple[Any, ...]] = []
        self.success = Status("hipSuccess")
        self.hipError_t = types.SimpleNamespace(hipSuccess=self.success)
        self.status = self.success
        self.missing = False

    def _record(self, *call: Any) -> None:
        if self.missing:
            raise RuntimeError("failed to dlopen 'libamdhip64.so'")
        self.calls.append(call)

    def hipRuntimeGetVersion(self) -> tuple[Any, ...]:  # noqa: N802
        return self.success, 70253211

    def hipModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        self._record("load", image)
        return self.status, "module"

    def hipModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        self._record("function", module, name)
        return self.status, "function"

    def hipModuleLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        self._record("launch", *arguments)
        return (self.status,)


@pytest.fixture
def hip_api(monkeypatch: pytest.MonkeyPatch) -> HipApi:
    api = HipApi()
    package = types.ModuleType("hip")
    package.hip = api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hip", package)
    monkeypatch.setattr(hip, "mapped_runtimes", lambda: ["libamdhip64.so"])
    return api


def test_hip_load_and_launch(hip_api: HipApi) -> None:
    driver = hip.HipDriver(0)
    kernel = driver.load(b"code", source("k", "gfx950", shared_bytes=65536))
    block = ArgumentBlock(bytes(64))
    driver.launch(kernel, 9, block, 44)
    assert hip_api.calls == [
        ("load", b"code"),
        ("function", "module", b"k"),
        ("launch", "function", 9, 1, 1, 128, 1, 1, 0, 44, None, block.extra),
    ]


def test_hip_errors(hip_api: HipApi) -> None:
    driver = hip.HipDriver(0)
    kernel = driver.load(b"code", source("k", "gfx950"))
    with pytest.raises(LaunchError, match="work items"):
        driver.launch(kernel, 1 << 25, ArgumentBlock(bytes(64)), 0)
    hip_api.status = Status("hipErrorInvalidImage", 200)
    with pytest.raises(HipError, match=r"cannot load k on device 0: hipErrorInvalidImage \(200\)"):
        driver.load(b"code", source("k", "gfx950"))
    with pytest.raises(LaunchError, match="hipErrorInvalidImage"):
        driver.launch(kernel, 1, ArgumentBlock(bytes(64)), 0)
    with pytest.raises(LaunchError, match="tensor map"):
        driver.tensor_map((1, 1, 1, 64), (64, 64, 64, 1), torch.bfloat16, 64)


def test_hip_without_rocm(hip_api: HipApi, monkeypatch: pytest.MonkeyPatch) -> None:
    hip_api.missing = True
    with pytest.raises(LaunchError, match="HIP runtime library cannot be used"):
        hip.HipDriver(0).load(b"code", source("k", "gfx950"))
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(LaunchError, match="pip install"):
        hip.HipDriver(0)


def test_hip_as_installed() -> None:
    pytest.importorskip("hip")
    if hip.mapped_runtimes():
        pytest.skip("ROCm is here")
    with pytest.raises(LaunchError, match="cannot load k"):
        hip.HipDriver(0).load(b"code", source("k", "gfx950"))


def test_two_hip_runtimes_are_refused(tmp_path: Path) -> None:
    line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 {} {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format(1, "/a/libamdhip64.so.7") + line.format(1, "/a/libamdhip64.so.7"))
    hip.check_one_runtime(hip.mapped_runtimes(str(maps)))
    maps.write_text(line.format(1, "/a/libamdhip64.so.7") + line.format(2, "/b/lib dir/libamdhip64.so.7"))
    with pytest.raises(LaunchError, match=r"/a/libamdhip64\.so\.7, /b/lib dir/libamdhip64\.so\.7"):
        hip.check_one_runtime(hip.mapped_runtimes(str(maps)))
    assert hip.mapped_runtimes(str(tmp_path / "none")) == []
