"""The driver of the CPU, for real."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import source

from qla.codegen.spec import Field
from qla.errors import LaunchError
from qla.runtime.arguments import ArgumentBlock, Packer
from qla.runtime.compilers import compiler_for
from qla.runtime.drivers import host
from qla.targets import TARGETS

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
