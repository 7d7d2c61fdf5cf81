"""The driver of CUDA devices: against a stand-in of CuPy's bindings, and on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import types
from typing import Any

import pytest
import torch
from sources import source

from qla.codegen.spec import Field, Source
from qla.errors import LaunchError
from qla.runtime.arguments import ArgumentBlock, Packer
from qla.runtime.compilers import compiler_for
from qla.runtime.drivers import cuda, device_target, driver_for, tileable
from qla.targets import TARGETS


def test_legal_strides() -> None:
    assert cuda.legal_strides((2, 5, 3, 64), (960, 192, 64, 1), 2) == (128, 384, 1920)
    # A dimension of one element may have any stride, even none; the map needs a legal one.
    assert cuda.legal_strides((1, 5, 1, 64), (0, 192, 3, 1), 2) == (128, 384, 128)


# --- against a stand-in of CuPy's bindings


class CudaError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR_{status}: text")


class CudaApi(types.ModuleType):
    CUDADriverError = CudaError

    def __init__(self) -> None:
        super().__init__("driver")
        self.calls: list[tuple[Any, ...]] = []
        self.failures: list[int] = []
        self.context = 1

    def _record(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failures:
            raise CudaError(self.failures.pop(0))

    def ctxGetCurrent(self) -> int:  # noqa: N802
        return self.context

    def moduleLoadData(self, image: bytes) -> int:  # noqa: N802
        self._record("load", image)
        return 11

    def moduleGetFunction(self, module: int, name: str) -> int:  # noqa: N802
        self._record("function", module, name)
        return 12

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        self._record("attribute", function, attribute, value)

    def launchKernel(self, *arguments: int) -> None:  # noqa: N802
        self._record("launch", *arguments)


@pytest.fixture
def cuda_api(monkeypatch: pytest.MonkeyPatch) -> CudaApi:
    api = CudaApi()
    package = types.ModuleType("cupy_backends.cuda.api")
    package.driver = api  # type: ignore[attr-defined]
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", package)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api.driver", api)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 900 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: api.calls.append(("set_device", index)))
    return api


def test_cuda_load_and_launch(cuda_api: CudaApi) -> None:
    driver = cuda.CudaDriver(3)
    kernel = driver.load(b"cubin", source("k", "sm_90a", shared_bytes=200_000))
    assert cuda_api.calls == [("load", b"cubin"), ("function", 11, "k"), ("attribute", 12, 8, 200_000)]
    block = ArgumentBlock(bytes(64))
    driver.launch(kernel, 77, block, driver.stream())
    assert cuda_api.calls[-1] == ("launch", 12, 77, 1, 1, 128, 1, 1, 200_000, 903, block.params, 0)


def test_cuda_binds_the_primary_context_where_a_thread_has_none(cuda_api: CudaApi) -> None:
    driver = cuda.CudaDriver(1)
    cuda_api.context = 0
    kernel = driver.load(b"cubin", source("k", "sm_90a"))
    assert cuda_api.calls[0] == ("set_device", 1)
    cuda_api.calls.clear()
    cuda_api.failures = [201]
    driver.launch(kernel, 1, ArgumentBlock(bytes(64)), 0)
    assert [call[0] for call in cuda_api.calls] == ["launch", "set_device", "launch"]


@pytest.mark.parametrize("failures", [[719], [201, 700]])
def test_cuda_launch_errors(cuda_api: CudaApi, failures: list[int]) -> None:
    driver = cuda.CudaDriver(0)
    kernel = driver.load(b"cubin", source("k", "sm_90a"))
    name = f"CUDA_ERROR_{failures[-1]}"
    cuda_api.failures = list(failures)
    with pytest.raises(LaunchError, match=rf"cannot launch k \(5 blocks\) on cuda:0: {name}"):
        driver.launch(kernel, 5, ArgumentBlock(bytes(64)), 0)


def test_cuda_load_errors(cuda_api: CudaApi) -> None:
    cuda_api.failures = [209]
    with pytest.raises(LaunchError, match="cannot load k on cuda:0: CUDA_ERROR_209"):
        cuda.CudaDriver(0).load(b"cubin", source("k", "sm_90a"))


def test_cuda_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    with pytest.raises(LaunchError, match="pip install"):
        cuda.CudaDriver(0)


class Libcuda:
    """Stand-in for the driver library: writes the call's address into the map."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = status

    def cuTensorMapEncodeTiled(self, out: Any, *rest: Any) -> int:  # noqa: N802
        assert out.value % 64 == 0
        kind, rank, address, dims, strides, box, ones, *tail = rest
        self.calls.append((kind, rank, list(dims), list(strides), list(box), list(ones), tail))
        ctypes.memmove(out.value, address.value.to_bytes(8, "little") + b"m" * 120, 128)
        return self.status

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


def test_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Libcuda()
    monkeypatch.setattr(cuda, "_libcuda", lambda: library)
    maps = cuda.TensorMapEncoder((2, 70, 4, 128), (35840, 512, 128, 1), torch.bfloat16, 64)
    encoded = maps[4096]
    assert encoded == (4096).to_bytes(8, "little") + b"m" * 120
    assert library.calls == [(9, 4, [128, 4, 70, 2], [256, 1024, 71680], [64, 1, 64, 1], [1] * 4, [0, 3, 3, 0])]
    assert maps[4096] is encoded
    maps[8192]
    assert len(library.calls) == 2


def test_tensor_maps_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_libcuda", Libcuda)
    maps = cuda.TensorMapEncoder((1, 70, 4, 64), (1, 256, 64, 1), torch.float16, 64)
    for i in range(1, 1000):
        maps[16 * i]
    assert len(maps) == cuda._MAPS_KEPT


def test_tensor_map_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_libcuda", lambda: Libcuda(status=1))
    maps = cuda.TensorMapEncoder((1, 70, 4, 64), (1, 256, 64, 1), torch.float16, 64)
    with pytest.raises(LaunchError, match=r"CUDA_ERROR_INVALID_VALUE for dims \[64, 4, 70, 1\]"):
        maps[4096]
    with pytest.raises(LaunchError, match="int8"):
        cuda.TensorMapEncoder((1, 70, 4, 64), (1, 256, 64, 1), torch.int8, 64)


# --- on a GPU

BOX = r"""
struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
struct Args { CUtensorMap q_map; unsigned short* o; long long o_stride_t; int tokens; int heads; };
extern "C" __global__ void __launch_bounds__(128) entry(const __grid_constant__ Args a) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned base = ((unsigned)__cvta_generic_to_shared(raw) + 1023) / 1024 * 1024;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
    int chunks = (a.tokens + 63) / 64, t = blockIdx.x % chunks * 64;
    int h = blockIdx.x / chunks % a.heads, b = blockIdx.x / chunks / a.heads;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;" :: "r"(bar) : "memory");
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3, %4, %5}], [%6];"
                     :: "r"(base), "l"(&a.q_map), "r"(64), "r"(h), "r"(t), "r"(b), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }"
                 :: "r"(bar) : "memory");
    for (int i = threadIdx.x; i < 64 * 64; i += 128) {
        int row = i / 64, column = i % 64;
        unsigned at = base + row * 128 + ((column * 2) ^ (row % 8 * 16));
        unsigned short value;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(at));
        a.o[(long long)blockIdx.x * 64 * a.o_stride_t + row * a.o_stride_t + column] = value;
    }
}
"""
BOX_ABI = (
    Field("q_map", "tensormap"),
    Field("o", "ptr"),
    Field("o_stride_t", "i64"),
    Field("tokens", "i32"),
    Field("heads", "i32"),
)


def box_binary() -> tuple[Source, bytes]:
    box = dataclasses.replace(source(target="sm_90a", shared_bytes=100_000, abi=BOX_ABI), text=BOX, language="cuda")
    return box, compiler_for(TARGETS["sm_90a"]).compile(box).data


def test_the_real_kernel_compiles() -> None:
    """Without a GPU this much can be checked of the kernel below."""
    pytest.importorskip("nvidia")
    assert box_binary()[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="no CUDA device")
@pytest.mark.parametrize("transposed", [False, True])
def test_cuda_for_real(transposed: bool) -> None:
    """A box read through a tensor map, from several threads, and captured into a graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    driver = driver_for(device_target(device), device.index)
    box, binary = box_binary()
    kernel = driver.load(binary, box)
    batch, tokens, heads, chunks = 2, 70, 3, 2
    shape = (batch, heads, tokens, 128) if transposed else (batch, tokens, heads, 128)
    q = torch.randn(shape, device=device).bfloat16()
    q = q.transpose(1, 2) if transposed else q
    assert tileable(q)
    padded = torch.zeros(batch, chunks * 64, heads, 64, device=device, dtype=torch.bfloat16)
    padded[:, :tokens] = q[..., 64:]
    expected = padded.view(batch, chunks, 64, heads, 64).permute(0, 3, 1, 2, 4).reshape(-1, 64, 64)
    encode = driver.tensor_map(q.shape, q.stride(), q.dtype, 64)
    packer = Packer(BOX_ABI, ("q_map", "o"))
    template = packer.template({"o_stride_t": 64, "tokens": tokens, "heads": heads})

    def launch(o: torch.Tensor) -> None:
        block = ArgumentBlock(template)
        packer.pack(block, (encode(q.data_ptr()), o.data_ptr()))
        driver.launch(kernel, len(expected), block, driver.stream())
        block.view[:] = bytes(len(block.view))  # the launch must have copied it

    outputs = [torch.full_like(expected, float("nan")) for _ in range(6)]
    launch(outputs[0])
    threads = [threading.Thread(target=launch, args=(o,)) for o in outputs[1:5]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not driver.capturing()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert driver.capturing()
        launch(outputs[5])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, expected) for o in outputs)
