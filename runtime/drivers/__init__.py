"""Drivers: what loads a binary and launches it, one small class per kind of device.

Nothing here imports a vendor's package before the first kernel of that vendor is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from qla.codegen.spec import Loads, Source
from qla.errors import UnsupportedError
from qla.runtime.arguments import ArgumentBlock
from qla.targets import TARGETS

__all__ = ["Driver", "device_target", "driver_for", "loads_of", "tileable"]


class Driver(Protocol):
    """What a launch plan needs of a device. One instance serves one device."""

    @property
    def processors(self) -> int:
        """How many workgroups the device runs at the same time, one on each multiprocessor, compute unit or core."""

    def load(self, binary: bytes, source: Source) -> Any:
        """Load a compiled kernel; the returned handle keeps it loaded."""

    def launch(self, kernel: Any, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        """Launch `blocks` workgroups. The argument block may be reused as soon as this returns."""

    def stream(self) -> int:
        """Raw handle of torch's current stream on this device."""

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        """Encoder of tensor maps for one layout: base address to the 128 bytes of the map."""


def tileable(tensor: torch.Tensor) -> bool:
    """Whether bulk tile loads can address `[B, T, H, D]` as it lies: contiguous and 16-byte aligned rows.

    A broadcast dimension (stride 0 over more than one element) is left to the strided loads: a tensor map has no
    legal stride for it. So are tokens 64 MB apart: offsets within a chunk are 32 bits wide.
    """
    size = tensor.element_size()
    if tensor.data_ptr() % 16 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        return False
    steps = (
        stride * size for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if extent > 1
    )
    near = tensor.shape[1] <= 1 or tensor.stride(1) * size < 1 << 26
    return near and all(step and step % 16 == 0 and step < 1 << 40 for step in steps)


def loads_of(target: str, tensors: Iterable[torch.Tensor]) -> Loads:
    """How a target's kernels load q, k and v that lie like this: a CPU reads any strides with its one kernel."""
    return "tile" if "strided" not in TARGETS[target].loads or all(map(tileable, tensors)) else "strided"


@cache
def _target(kind: str, index: int) -> str:
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError("device", kind, f"cpu, or cuda: {_devices('cuda', 'hip')}")
    if kind == "cpu":
        language, device, name = "c++", "cpu", "the CPU"
    else:
        properties = torch.cuda.get_device_properties(index)
        name = properties.name
        if torch.version.hip:
            # ROCm appends features, as in gfx950:sramecc+:xnack-.
            language, device = "hip", str(properties.gcnArchName).split(":")[0]
        else:
            language, device = "cuda", f"sm_{properties.major}{properties.minor}"
    for target in TARGETS.values():
        if target.language == language and target.device == device:
            return target.name
    hint = "Tensors on the CPU run the host target."
    raise UnsupportedError("device", f"{name} ({device})", _devices(language), hint)


def _devices(*languages: str) -> str:
    return ", ".join(f"{t.device} ({t.hardware})" for t in TARGETS.values() if t.language in languages)


def device_target(device: torch.device) -> str:
    """Name of the target whose kernels run on a torch device."""
    index = -1
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return _target(device.type, index)


@cache
def driver_for(target: str, index: int) -> Driver:
    """The driver of a target on the torch device of that index (-1 for the CPU)."""
    language = TARGETS[target].language
    if language == "c++":
        from qla.runtime.drivers.host import HostDriver

        return HostDriver()
    if language == "hip":
        from qla.runtime.drivers.hip import HipDriver

        return HipDriver(index)
    from qla.runtime.drivers.cuda import CudaDriver

    return CudaDriver(index)
