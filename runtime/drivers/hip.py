"""HIP: code objects loaded and launched through hip-python.

hip-python imports without ROCm and fails with a RuntimeError at the first call, so that is where absence is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from qla.codegen.spec import Source
from qla.errors import HipError, LaunchError, install_hint
from qla.runtime.arguments import ArgumentBlock
from qla.runtime.hip_libraries import check_one_runtime, mapped_first, mapped_runtimes

_MAX_WORK_ITEMS = 1 << 32


@dataclass(frozen=True)
class HipKernel:
    """A loaded kernel. The module's handle is kept so that the code object stays loaded."""

    name: str
    function: Any
    module: Any
    threads: int


class HipDriver:
    """Driver of one AMD device.

    Parameters
    ----------
    index : torch's index of the device.
    """

    def __init__(self, index: int) -> None:
        try:
            from hip import hip
        except ImportError as error:
            what = f"hip-python, which launches the HIP kernels, cannot be imported ({error})"
            raise LaunchError(f"{what}; {install_hint('rocm')}") from error
        self.index = index
        self._api: Any = hip
        self._launch: Callable[..., Any] = hip.hipModuleLaunchKernel
        self._success: Any = hip.hipError_t.hipSuccess
        self._connected = False

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            status, *results = function(*arguments)
        except RuntimeError as error:
            raise LaunchError(f"{what}: the HIP runtime library cannot be used: {error}") from error
        except ValueError as error:  # a status of a newer ROCm, which this hip-python has no name for
            raise LaunchError(f"{what} on device {self.index}: {error}") from error
        if status != self._success:
            raise HipError(f"{what} on device {self.index}", status.name, status.value)
        return results[0] if results else None

    def _connect(self, what: str) -> None:
        """Open the HIP library, before anything is asked of it that would start a second one."""
        with mapped_first():
            self._call(what, self._api.hipRuntimeGetVersion)
        check_one_runtime(mapped_runtimes())
        self._connected = True

    @cached_property
    def processors(self) -> int:
        """Compute units of the device."""
        return int(torch.cuda.get_device_properties(self.index).multi_processor_count)

    def load(self, binary: bytes, source: Source) -> HipKernel:
        """Load a code object on the current device."""
        what = f"cannot load {source.entry}"
        if not self._connected:
            self._connect(what)
        module = self._call(what, self._api.hipModuleLoadData, binary)
        function = self._call(what, self._api.hipModuleGetFunction, module, source.entry.encode())
        return HipKernel(source.entry, function, module, source.limits.threads)

    def launch(self, kernel: HipKernel, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        """Launch on a raw stream. LDS is static, so no dynamic shared memory is asked for."""
        if blocks * kernel.threads >= _MAX_WORK_ITEMS:
            raise LaunchError(f"{kernel.name}: {blocks} blocks of {kernel.threads} threads are 2^32 work items or more")
        # An integer address for `extra`: a tuple of ctypes values costs 40 us more.
        self._call(
            f"cannot launch {kernel.name}",
            self._launch,
            *(kernel.function, blocks, 1, 1, kernel.threads, 1, 1, 0, stream, None, arguments.extra),
        )

    def stream(self) -> int:
        """Raw handle of torch's current stream on this device."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        """AMD devices have no tensor maps."""
        raise LaunchError("a HIP kernel asks for a tensor map, which AMD devices do not have")
