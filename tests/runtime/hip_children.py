"""What the tests of HIP do in a process of their own, with hip-python on top of the stubs.

Each function is one process; what it prints goes back to the test.
"""

from __future__ import annotations

import ctypes
import gc
import time
import types
from pathlib import Path
from typing import Any

import hip_stubs
import pytest
import torch
from sources import source

from qla.codegen.spec import Source
from qla.errors import CompilationError, HipError, LaunchError
from qla.runtime import plan
from qla.runtime.arguments import POINTERS, ArgumentBlock, scalars
from qla.runtime.compilers import compiler_for
from qla.runtime.compilers.hiprtc import Hiprtc
from qla.runtime.drivers import device_target
from qla.runtime.drivers.hip import HipDriver, HipKernel
from qla.runtime.hip_libraries import mapped_runtimes
from qla.runtime.problem import Problem
from qla.runtime.store import default_store
from qla.targets import TARGETS

TYPES = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
STREAM = 0x7F00_1234_5678
WORKGROUPS = (1 << 25) - 1


def loaded(name: str = "k") -> tuple[HipDriver, HipKernel, hip_stubs.Stub]:
    """A driver with a kernel, and the stub that it runs on."""
    driver = HipDriver(0)
    kernel = driver.load(b"code", source(name, "gfx950", shared_bytes=65536))
    (path,) = mapped_runtimes()
    return driver, kernel, hip_stubs.Stub(path)


def launch() -> None:
    """Blocks of many sizes and the widest launches arrive as they were given."""
    driver, kernel, stub = loaded("name_of_the_kernel")
    assert stub.image() == b"code"
    for number, size in enumerate((1, 7, 8, 9, 120, 128, 503, 4096)):
        data = bytes((number + 3 * i) % 255 + 1 for i in range(size))
        workgroups = WORKGROUPS if number == 0 else number
        driver.launch(kernel, workgroups, ArgumentBlock(data), STREAM + number)
        got = stub.launches()[-1]
        assert (got.name, got.well_formed) == (b"name_of_the_kernel", 1)
        assert (tuple(got.grid), tuple(got.block)) == ((workgroups, 1, 1), (128, 1, 1))
        # Shared memory is static, and what is in `extra` must not come with a second list.
        assert (got.shared, got.stream, got.params) == (0, STREAM + number, 0)
        assert (got.size, got.data) == (size, data)
    assert len(stub.launches()) == 8


def fail() -> None:
    """Each status is an error that carries the name HIP has for it."""
    driver, kernel, stub = loaded()
    block = ArgumentBlock(bytes(64))
    names = {1: "hipErrorInvalidValue", 98: "hipErrorInvalidDeviceFunction", 719: "hipErrorLaunchFailure"}
    for code, name in names.items():
        stub.number("status_of_next").value = code
        with pytest.raises(HipError) as raised:
            driver.launch(kernel, 1, block, 0)
        assert (raised.value.name, raised.value.code) == (name, code)
        assert str(raised.value) == f"cannot launch k on device 0: {name} ({code})"
    for code, name in {200: "hipErrorInvalidImage", 209: "hipErrorNoBinaryForGpu"}.items():
        stub.number("status_of_next").value = code
        with pytest.raises(HipError) as raised:
            driver.load(b"code", source("k", "gfx950"))
        assert (raised.value.name, str(raised.value)) == (name, f"cannot load k on device 0: {name} ({code})")
    stub.number("status_of_next").value = 9999
    with pytest.raises(LaunchError, match="9999"):
        driver.launch(kernel, 1, block, 0)
    driver.launch(kernel, 1, block, 0)


def cost() -> None:
    """Print the microseconds of a launch: the best of some rounds, as others use the machine too."""
    driver, kernel, _ = loaded()
    block = ArgumentBlock(bytes(512))
    rounds, count = [], 5000
    gc.disable()
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(count):
            driver.launch(kernel, 64, block, STREAM)
        rounds.append((time.perf_counter() - began) / count * 1e6)
    print(min(rounds))


def compile_() -> None:
    """hiprtc is preferred where it is, is told what to build, and its program is destroyed also after a failure."""
    compiler = compiler_for(TARGETS["gfx950"])
    assert isinstance(compiler, Hiprtc)
    assert (compiler.identity().name, compiler.identity().version) == ("hiprtc", "7.2")
    given = source("kernel_name", "gfx950")
    given = Source(given.spec, given.entry, "hip", "// ä\nint x;\n", given.abi, given.limits)
    built = compiler.compile(given)
    assert (built.data, built.log) == (b"code of kernel_name.hip\0", "a line of the log")
    stub = hip_stubs.Stub(mapped_runtimes(stem="libhiprtc")[0])
    (program,) = stub.programs()
    assert program.name == b"kernel_name.hip"
    assert program.options.decode().split() == compiler.options()
    assert program.options.startswith(b"--offload-arch=gfx950 ")
    assert program.digest == hip_stubs.digest(given.text)
    stub.number("compile_status").value = 6
    with pytest.raises(CompilationError, match="HIPRTC_ERROR_COMPILATION") as raised:
        compiler.compile(given)
    assert raised.value.log == "a line of the log"
    assert stub.number("destroyed").value == stub.number("created").value == 2


def as_rocm() -> HipDriver:
    """Make torch look like a build for ROCm on an MI355X; tensors stay where they are."""
    facts = types.SimpleNamespace(name="a GPU", gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256)
    changed: Any = torch
    changed.version.hip = "7.2"
    changed.cuda.get_device_properties = lambda index: facts
    changed._C._cuda_getCurrentRawStream = lambda index: STREAM + index
    changed.cuda.is_current_stream_capturing = lambda: False
    driver = HipDriver(0)
    patched: Any = plan
    patched.device_target = lambda device: device_target(torch.device("cuda", 0))
    patched.driver_for = lambda target, index: driver
    return driver


def call() -> None:
    """A whole call: rendered, compiled, cached, loaded and launched. Prints how many kernels were compiled."""
    as_rocm()
    q, k = (torch.ones(2, 300, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    problem = Problem(
        op="gated_delta_rule", saves=False, q=q, k=k, v=torch.ones(2, 300, 4, 128, dtype=torch.bfloat16),
        g=torch.zeros(2, 300, 4), beta=torch.ones(2, 300, 4, dtype=torch.bfloat16), scale=0.5,
        initial_state=torch.ones(2, 4, 128, 128), output_final_state=True, state_v_first=False, qk_l2norm=True,
        beta_sigmoid=False, beta_double=False, gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None,
        cu_seqlens=None, cu_seqlens_cpu=None,
    )  # fmt: skip
    plan.run(problem)
    (layout,) = plan.layouts.values()
    workspace: list[int] = []
    allocate = layout.allocate

    def note(size: int, stream: int) -> int:
        workspace.append(allocate(size, stream))
        return workspace[-1]

    layout.allocate = note
    result = plan.run(problem)
    (runtime,) = mapped_runtimes()
    sources = [plan.render_source(spec) for spec in layout.plan.key.specs()]
    launches = hip_stubs.Stub(runtime).launches()
    assert len(launches) == 2 * len(sources)
    base = -(-workspace[0] // 1024) * 1024
    buffers = [f"ws_{name}" for name, _ in (*layout.plan.workspace, *layout.plan.state_workspace)]
    choice = plan.choose(problem, 2)
    values: dict[str, Any] = scalars(problem, choice.deal, 2, choice.segment_chunks)
    values |= {name: 0 if (t := getattr(problem, name, None)) is None else t.data_ptr() for name in POINTERS[:9]}
    values |= dict.fromkeys(POINTERS[9:], 0)
    assert result.final_state is not None
    values |= {"o": result.o.data_ptr(), "final_state": result.final_state.data_ptr()}
    values |= {name: base + offset for name, offset in zip(buffers, layout.offsets, strict=True)}
    for each, got, workgroups in zip(sources, launches[len(sources) :], choice.workgroups, strict=True):
        # The layout of the struct is ctypes' own, and its padding is zero.
        members = [(field.name, TYPES[field.kind]) for field in each.abi]
        expected = type("Expected", (ctypes.Structure,), {"_fields_": members})()
        for field in each.abi:
            setattr(expected, field.name, values[field.name])
        assert got.name.decode() == each.entry
        assert got.data == bytes(expected), each.entry
        assert (tuple(got.grid), tuple(got.block)) == ((workgroups, 1, 1), (each.limits.threads, 1, 1))
        assert (got.shared, got.stream, got.params) == (0, STREAM, 0)
        kept = default_store().get(each)
        assert kept.compiler.name == "hiprtc"
        assert kept.data.startswith(b"code of " + each.entry.encode())
    compiled = hip_stubs.Stub(mapped_runtimes(stem="libhiprtc")[0]).programs()
    assert not compiled or [p.digest for p in compiled] == [hip_stubs.digest(each.text) for each in sources]
    print(len(compiled), len(sources))


def use_of_torch(path: str) -> None:
    """With a runtime mapped as torch would map it, that one is taken, whatever ROCM_PATH says."""
    torch_runtime = hip_stubs.Stub(path)
    compiler_for(TARGETS["gfx950"]).identity()
    driver, kernel, _ = loaded()
    driver.launch(kernel, 5, ArgumentBlock(bytes(64)), 0)
    assert mapped_runtimes() == [path]
    assert mapped_runtimes(stem="libhiprtc") == [str(next(Path(path).parent.glob("libhiprtc.so*")))]
    assert [tuple(each.grid) for each in torch_runtime.launches()] == [(5, 1, 1)]


def refuse_two(path: str) -> None:
    """Where hip-python has opened another one already, nothing is loaded."""
    from hip import hip

    hip.hipRuntimeGetVersion()
    (first,) = mapped_runtimes()
    torch_runtime, other = hip_stubs.Stub(path), hip_stubs.Stub(first)
    with pytest.raises(LaunchError) as raised:
        HipDriver(0).load(b"code", source("k", "gfx950"))
    print(raised.value)
    assert torch_runtime.number("loads").value == other.number("loads").value == 0


def diagnose(path: str = "", twice: str = "") -> None:
    """Print what the doctor says of each part, a line for each, with a runtime mapped as torch would map it."""
    from qla.codegen.doctor import examine

    if twice:
        from hip import hip

        hip.hipRuntimeGetVersion()
    if path:
        hip_stubs.Stub(path)
    for part in examine():
        print("|".join((part.name, part.version, part.where, part.advice)).replace("\n", ", "))
