"""CUDA: cubins loaded and launched through CuPy's driver bindings, tensor maps through libcuda itself.

CuPy's bindings take plain integers and copy nothing, which makes a launch a fraction of a microsecond; they do not
cover tensor maps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from qla.codegen.spec import Source
from qla.errors import LaunchError, install_hint
from qla.runtime.arguments import ArgumentBlock

_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE_128B = 3
_PROMOTION_L2_256B = 3
_BOX_COLUMNS = 64  # 128 bytes of 16-bit elements: the widest box that the swizzle allows
_MAP_BYTES = 128
_MAPS_KEPT = 256
_Dims, _Strides, _Box = ctypes.c_uint64 * 4, ctypes.c_uint64 * 3, ctypes.c_uint32 * 4
_ONES = _Box(1, 1, 1, 1)


@dataclass(frozen=True)
class CudaKernel:
    """A loaded kernel: the function's handle and its fixed launch parameters."""

    name: str
    function: int
    module: int
    threads: int
    shared_bytes: int


class CudaDriver:
    """Driver of one CUDA device.

    Parameters
    ----------
    index : torch's index of the device.
    """

    def __init__(self, index: int) -> None:
        try:
            from cupy_backends.cuda.api import driver
        except ImportError as error:
            what = f"CuPy, which launches the CUDA kernels, cannot be imported ({error})"
            raise LaunchError(f"{what}; {install_hint('cuda13', 'cuda12')}") from error
        self.index = index
        self._api: Any = driver
        self._launch: Callable[..., None] = driver.launchKernel
        self._error: type[Exception] = driver.CUDADriverError
        self.stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)

    @cached_property
    def processors(self) -> int:
        """Multiprocessors of the device."""
        return int(torch.cuda.get_device_properties(self.index).multi_processor_count)

    def load(self, binary: bytes, source: Source) -> CudaKernel:
        """Load a cubin into the primary context, which is the one that torch uses."""
        limits = source.limits
        try:
            if not self._api.ctxGetCurrent():
                torch.cuda.set_device(self.index)
            module = self._api.moduleLoadData(binary)
            function = self._api.moduleGetFunction(module, source.entry)
            if limits.shared_bytes:
                self._api.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, limits.shared_bytes)
        except self._error as error:
            raise LaunchError(f"cannot load {source.entry} on cuda:{self.index}: {error}") from error
        return CudaKernel(source.entry, function, module, limits.threads, limits.shared_bytes)

    def launch(self, kernel: CudaKernel, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        """Launch on a raw stream; the driver copies the argument block before it returns."""
        threads, shared, params = kernel.threads, kernel.shared_bytes, arguments.params
        try:
            self._launch(kernel.function, blocks, 1, 1, threads, 1, 1, shared, stream, params, 0)
        except self._error as error:
            self._recover(kernel, blocks, arguments, stream, error)

    def _recover(
        self, kernel: CudaKernel, blocks: int, arguments: ArgumentBlock, stream: int, failure: Exception
    ) -> None:
        if getattr(failure, "status", None) == _INVALID_CONTEXT:
            # A new thread has no current context until some runtime call binds one, and an allocation served from
            # torch's cache makes none.
            torch.cuda.set_device(self.index)
            try:
                threads, shared, params = kernel.threads, kernel.shared_bytes, arguments.params
                self._launch(kernel.function, blocks, 1, 1, threads, 1, 1, shared, stream, params, 0)
                return
            except self._error as again:
                failure = again
        raise LaunchError(f"cannot launch {kernel.name} ({blocks} blocks) on cuda:{self.index}: {failure}") from failure

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        """Encoder of tensor maps over a `[B, T, H, D]` layout, with boxes of one chunk by 64 columns."""
        return TensorMapEncoder(shape, strides, dtype, chunk).__getitem__


class TensorMapEncoder(dict[int, bytes]):
    """The tensor maps of one layout by base address: a dictionary that encodes what it does not hold.

    The map has the dimensions (D, H, T, B), boxes (64, 1, chunk, 1), the 128-byte swizzle, and reads zeros outside.

    Parameters
    ----------
    shape, strides : of the tensor `[B, T, H, D]`, in elements; `tileable` holds for it.
    dtype : 16-bit element type.
    chunk : rows of a box.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int) -> None:
        if dtype not in _MAP_DTYPES:
            raise LaunchError(f"no tensor map for {dtype}")
        super().__init__()
        self._lock = threading.Lock()
        self._type = _MAP_DTYPES[dtype]
        self._dims = _Dims(*reversed(shape))
        self._strides = _Strides(*legal_strides(shape, strides, dtype.itemsize))
        self._box = _Box(_BOX_COLUMNS, 1, chunk, 1)

    def __missing__(self, address: int) -> bytes:
        memory = ctypes.create_string_buffer(2 * _MAP_BYTES)
        skip = -ctypes.addressof(memory) % _MAP_BYTES
        out = ctypes.c_void_p(ctypes.addressof(memory) + skip)
        status = _libcuda().cuTensorMapEncodeTiled(
            *(out, self._type, 4, ctypes.c_void_p(address), self._dims, self._strides, self._box, _ONES),
            *(0, _SWIZZLE_128B, _PROMOTION_L2_256B, 0),
        )
        if status:
            raise LaunchError(
                f"cuTensorMapEncodeTiled: {error_name(status)} for dims {list(self._dims)}, "
                f"byte strides {list(self._strides)}, box {list(self._box)}, address {address:#x}"
            )
        encoded = memory.raw[skip : skip + _MAP_BYTES]
        with self._lock:
            if len(self) >= _MAPS_KEPT:
                del self[next(iter(self))]
            self[address] = encoded
        return encoded


def legal_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int, int]:
    """Byte strides of (H, T, B) for a tensor map.

    A dimension of one element may carry any stride in torch, but the driver checks it: it gets one row's bytes.
    """
    row = -(-shape[3] * itemsize // 16) * 16
    h, t, b = (strides[i] * itemsize if shape[i] > 1 else row for i in (2, 1, 0))
    return h, t, b


@cache
def _libcuda() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"the CUDA driver library cannot be loaded: {error}") from error
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.cuTensorMapEncodeTiled.argtypes = [pointer, u32, u32, *[pointer] * 5, *[u32] * 4]
    library.cuGetErrorName.argtypes = [u32, ctypes.POINTER(ctypes.c_char_p)]
    return library


def error_name(status: int) -> str:
    """Name of a CUresult, such as CUDA_ERROR_INVALID_VALUE."""
    name = ctypes.c_char_p()
    _libcuda().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA error {status}"
