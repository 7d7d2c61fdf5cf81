"""Drivers: real for the CPU, against stand-ins of the vendors' bindings for the others."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from qla.codegen.spec import Field, KernelSpec, Limits, Source
from qla.errors import LaunchError, UnsupportedError
from qla.runtime import drivers
from qla.runtime.arguments import ArgumentBlock, Packer
from qla.runtime.compilers import compiler_for
from qla.runtime.drivers import cuda, device_target, driver_for, hip, host, tileable
from qla.targets import TARGETS


def source(entry: str = "entry", target: str = "host", shared_bytes: int = 0, abi: tuple[Field, ...] = ()) -> Source:
    spec = KernelSpec("delta_rule", "scan", "bf16", 64, 64, target)
    return Source(spec, entry, "c++", "", abi, Limits(128, shared_bytes, 64, 64))


# --- which target, which loads


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


def test_legal_strides() -> None:
    assert cuda.legal_strides((2, 5, 3, 64), (960, 192, 64, 1), 2) == (128, 384, 1920)
    # A dimension of one element may have any stride, even none; the map needs a legal one.
    assert cuda.legal_strides((1, 5, 1, 64), (0, 192, 3, 1), 2) == (128, 384, 128)


# --- importing


def test_import_touches_no_vendor_package() -> None:
    code = (
        "import sys, qla, qla.runtime.plan, qla.runtime.drivers.cuda, qla.runtime.drivers.hip, torch;"
        "assert not {'cupy', 'cupy_backends', 'hip', 'rocm'} & set(sys.modules);"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parent)


# --- the CPU

SUM = """
struct Args { unsigned long long* out; int value; };
extern "C" void entry(const Args* a, int begin, int end) {
    for (int i = begin; i < end; ++i) a->out[i] += a->value + i;
}
"""


def build(text: str) -> bytes:
    """A shared object, by the compiler of the host target."""
    pytest.importorskip("ziglang")
    return compiler_for(TARGETS["host"]).compile(dataclasses.replace(source(), text=text)).data


@pytest.fixture(scope="module")
def sum_binary() -> bytes:
    return build(SUM)


@pytest.mark.parametrize("memory_files", [True, False])
def test_host_loads_and_runs(sum_binary: bytes, monkeypatch: pytest.MonkeyPatch, memory_files: bool) -> None:
    if not memory_files:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    kernel_source = source(abi=(Field("o", "ptr"), Field("batch", "i32")))
    driver = host.HostDriver()
    kernel = driver.load(sum_binary, kernel_source)
    packer = Packer(kernel_source.abi, ("o",))
    block = ArgumentBlock(packer.template({"batch": 5}))
    for blocks in (1, 2, 3, 1000):
        out = torch.zeros(blocks, dtype=torch.int64)
        packer.pack(block, (out.data_ptr(),))
        driver.launch(kernel, blocks, block, driver.stream())
        assert torch.equal(out, torch.arange(blocks) + 5)


def test_host_keeps_kernels_apart(sum_binary: bytes) -> None:
    other = build(SUM.replace("a->value + i", "a->value * i"))
    kernel_source = source(abi=(Field("o", "ptr"), Field("batch", "i32")))
    driver = host.HostDriver()
    packer = Packer(kernel_source.abi, ("o",))
    block = ArgumentBlock(packer.template({"batch": 5}))
    kernels = [driver.load(binary, kernel_source) for binary in (sum_binary, other, sum_binary)]
    got = []
    for kernel in kernels:
        out = torch.zeros(4, dtype=torch.int64)
        packer.pack(block, (out.data_ptr(),))
        driver.launch(kernel, 4, block, 0)
        got.append(out.tolist())
    assert got == [[5, 6, 7, 8], [0, 5, 10, 15], [5, 6, 7, 8]]


def test_host_refuses_what_is_no_library(sum_binary: bytes) -> None:
    with pytest.raises(LaunchError, match="cannot load entry"):
        host.HostDriver().load(b"nothing", source())
    with pytest.raises(LaunchError, match="cannot load other"):
        host.HostDriver().load(sum_binary, source("other"))


def fake_kernel(entry: Callable[[int, int, int], Any]) -> host.HostKernel:
    return host.HostKernel("fake", entry, ctypes.CDLL(None))


@pytest.mark.parametrize("cores", [1, 2, 7])
@pytest.mark.parametrize("blocks", [1, 2, 5, 8, 63, 64, 1001])
def test_host_runs_every_block_once(monkeypatch: pytest.MonkeyPatch, cores: int, blocks: int) -> None:
    monkeypatch.setattr(host, "_cores", lambda: cores)
    monkeypatch.setattr(host, "_pool", None)
    ran: list[int] = []
    kernel = fake_kernel(lambda address, begin, end: ran.extend(range(begin, end)))
    host.HostDriver().launch(kernel, blocks, ArgumentBlock(bytes(8)), 0)
    assert sorted(ran) == list(range(blocks))


def test_host_uses_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cores", lambda: 2)
    monkeypatch.setattr(host, "_pool", None)
    meeting = threading.Barrier(2)  # passed only if two pieces run at once
    met = threading.Event()

    def entry(address: int, begin: int, end: int) -> None:
        if not met.is_set():
            meeting.wait(timeout=30)
            met.set()

    host.HostDriver().launch(fake_kernel(entry), 64, ArgumentBlock(bytes(8)), 0)
    assert met.is_set()


def test_host_calls_from_within_the_pool_cannot_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cores", lambda: 2)
    pool = ThreadPoolExecutor(1)
    monkeypatch.setattr(host, "_pool", pool)
    ran: list[int] = []
    kernel = fake_kernel(lambda address, begin, end: ran.extend(range(begin, end)))
    pool.submit(host.HostDriver().launch, kernel, 64, ArgumentBlock(bytes(8)), 0).result(timeout=30)
    assert sorted(ran) == list(range(64))


def test_host_errors_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cores", lambda: 2)
    monkeypatch.setattr(host, "_pool", None)

    def entry(address: int, begin: int, end: int) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        host.HostDriver().launch(fake_kernel(entry), 64, ArgumentBlock(bytes(8)), 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_host_runs_in_a_forked_child() -> None:
    code = (
        "import os, sys, qla.runtime.drivers.host as h; from qla.runtime.arguments import ArgumentBlock;"
        "h._cores = lambda: 2; ran = [];"
        "k = h.HostKernel('k', lambda a, b, e: ran.extend(range(b, e)), None);"
        "go = lambda: h.HostDriver().launch(k, 64, ArgumentBlock(bytes(8)), 0);"
        "go(); pid = os.fork(); ran.clear(); go(); ok = sorted(ran) == list(range(64));"
        "os._exit(not ok) if pid == 0 else sys.exit(os.waitpid(pid, 0)[1] or not ok)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parent)


# --- CUDA, against a stand-in of CuPy's bindings


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


# --- CUDA, for real

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


# --- HIP, against a stand-in of hip-python


class Status:
    def __init__(self, name: str) -> None:
        self.name = name


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
    hip_api.status = Status("hipErrorInvalidImage")
    with pytest.raises(LaunchError, match="cannot load k on device 0: hipErrorInvalidImage"):
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
