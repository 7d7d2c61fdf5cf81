"""Drivers: which one serves a device, and which tensors bulk loads can address."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qla.errors import UnsupportedError
from qla.runtime import drivers
from qla.runtime.drivers import device_target, driver_for, loads_of, tileable
from qla.runtime.drivers.cuda import CudaDriver
from qla.runtime.drivers.hip import HipDriver


def test_cpu_is_the_host_target() -> None:
    assert device_target(torch.device("cpu")) == "host"
    assert driver_for("host", -1) is driver_for("host", -1)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        device_target(torch.device("meta"))


@pytest.mark.parametrize(
    ("hip_version", "properties", "expected"),
    [
        (None, {"major": 9, "minor": 0}, "sm_90a"),
        (None, {"major": 10, "minor": 0}, UnsupportedError),
        (None, {"major": 8, "minor": 9}, UnsupportedError),
        ("7.0", {"gcnArchName": "gfx950:sramecc+:xnack-"}, "gfx950"),
        ("7.0", {"gcnArchName": "gfx942"}, "gfx942"),
        ("7.0", {"gcnArchName": "gfx90a:sramecc+:xnack-"}, UnsupportedError),
    ],
)
def test_gpu_targets(monkeypatch: pytest.MonkeyPatch, hip_version: Any, properties: Any, expected: Any) -> None:
    monkeypatch.setattr(torch.version, "hip", hip_version)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(name="a GPU", **properties)
    )
    drivers._target.cache_clear()
    try:
        if isinstance(expected, str):
            assert device_target(torch.device("cuda", 0)) == expected
        else:
            with pytest.raises(expected, match="a GPU"):
                device_target(torch.device("cuda", 0))
    finally:
        drivers._target.cache_clear()


def test_processors_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not change, and a layout is built far more often than a driver."""
    asked: list[int] = []

    def properties(index: int) -> Any:
        asked.append(index)
        return types.SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for kind in (CudaDriver, HipDriver):
        driver = kind.__new__(kind)  # without the vendor's package
        driver.index = 3
        assert (driver.processors, driver.processors) == (132, 132)
    assert asked == [3, 3]
    assert 1 <= driver_for("host", -1).processors <= (os.cpu_count() or 1)


def test_only_strides_that_a_target_cannot_load_need_another_kernel() -> None:
    plain, odd = bf16(2, 5, 3, 64), bf16(2, 5, 3, 128)[..., ::2]
    assert loads_of("sm_90a", (plain, plain)) == loads_of("sm_90a", ()) == "tile"
    assert loads_of("sm_90a", (plain, odd)) == "strided"
    assert loads_of("host", (odd,)) == "tile"


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: bf16(2, 5, 3, 64), True),
        (lambda: bf16(2, 3, 5, 64).transpose(1, 2), True),
        (lambda: bf16(2, 5, 3, 3, 64)[:, :, :, 1], True),
        (lambda: bf16(2, 5, 3, 72)[..., :64], True),
        (lambda: bf16(2, 5, 3, 72)[..., 8:], True),
        (lambda: bf16(2, 5, 3, 72)[..., 4:68], False),
        (lambda: bf16(2, 5, 3, 68)[..., :64], False),
        (lambda: bf16(2, 5, 3, 128)[..., ::2], False),
        (lambda: bf16(2, 5, 64, 3).transpose(2, 3), False),
        (lambda: bf16(1, 5, 1, 64).as_strided((1, 5, 1, 64), (7, 64, 3, 1)), True),
        (lambda: bf16(2, 5, 1, 64).expand(2, 5, 3, 64), False),
        (lambda: bf16(1, 5, 3, 64).expand(2, 5, 3, 64), False),
    ],
)
def test_tileable(make: Callable[[], torch.Tensor], expected: bool) -> None:
    assert tileable(make()) is expected


def test_strides_beyond_a_tensor_map_are_not_tileable() -> None:
    far = torch.empty(2, 1, 1, 64, dtype=torch.bfloat16, device="meta").as_strided((2, 1, 1, 64), (1 << 39, 64, 64, 1))
    assert not tileable(far)


@pytest.mark.parametrize(
    ("tokens", "stride", "expected"), [(2, (1 << 25) - 64, True), (2, 1 << 25, False), (1, 1 << 25, True)]
)
def test_tokens_so_far_apart_that_offsets_would_be_long_are_not_tileable(
    tokens: int, stride: int, expected: bool
) -> None:
    far = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided((1, tokens, 1, 64), (64, stride, 64, 1))
    assert tileable(far) is expected


def test_import_touches_no_vendor_package() -> None:
    code = (
        "import sys, qla, qla.runtime.plan, qla.runtime.drivers.cuda, qla.runtime.drivers.hip, torch;"
        "assert not {'cupy', 'cupy_backends', 'hip', 'rocm'} & set(sys.modules);"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parent)
