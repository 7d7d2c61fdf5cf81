"""Host time of a warm `qla.chunk_gated_delta_rule` call, in microseconds, and where it goes.

With a CUDA device the call is the real one: nothing waits for the device, and batches are short enough for its queue.
Without one, the same path runs on CPU tensors, with a driver that launches nothing and torch's raw memory left out.

    python bench/host_cost.py [--calls 50] [--batches 200]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import qla
from qla import ops
from qla.codegen.spec import Source
from qla.runtime import plan
from qla.runtime.arguments import ArgumentBlock
from qla.runtime.problem import signature

GPU = torch.cuda.is_available()
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class FakeDriver:
    """Takes launches as the CUDA driver does, and makes none."""

    processors = 132

    def load(self, binary: bytes, source: Source) -> None:
        """Nothing to load."""

    def launch(self, kernel: Any, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        """Nothing to launch."""

    def stream(self) -> int:
        """The default stream."""
        return 0

    def capturing(self) -> bool:
        """Never."""
        return False

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        """A table as the CUDA driver has it."""
        return _Maps().__getitem__


class _Maps(dict[int, bytes]):
    def __missing__(self, address: int) -> bytes:
        self[address] = bytes(128)
        return self[address]


def pretend() -> None:
    """Let the runtime take the CPU for an sm_90a device."""
    driver = FakeDriver()
    vars(plan).update(
        driver_for=lambda target, index: driver,
        device_target=lambda device: "sm_90a",
        fetch_binary=lambda source: b"",
        _empty=lambda device: vars(torch._C._dynamo.guards)["_empty_strided_cpu"],
        _memory=lambda device: (lambda size, stream: 1 << 20, lambda address: None),
    )


def wait() -> None:
    """Let the device finish what is queued."""
    if GPU:
        torch.cuda.synchronize()


def measure(function: Callable[[], object], calls: int, batches: int) -> tuple[float, float]:
    """Smallest and median time of one call over batches, in microseconds.

    Wall time with a GPU; without one, time of this thread on its core, which other processes change little.
    """
    clock = time.perf_counter_ns if GPU else time.thread_time_ns
    times = []
    for _ in range(batches):
        wait()
        start = clock()
        for _ in range(calls):
            function()
        times.append((clock() - start) / calls / 1000)
    wait()
    return min(times), statistics.median(times)


def inputs(tokens: int, heads: int, value_heads: int) -> Inputs:
    """q, k, v, g and beta of one call."""
    device = "cuda" if GPU else "cpu"
    q, k = (torch.randn(1, tokens, heads, 128, device=device).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, value_heads, 128, device=device).bfloat16()
    gates = -torch.rand(1, tokens, value_heads, device=device)
    return q, torch.nn.functional.normalize(k, dim=-1), v, gates, torch.rand_like(gates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=50, help="calls per batch")
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    if not GPU:
        pretend()
    many = [inputs(256, 2, 8) for _ in range(8)]
    q, k, v, g, beta = many[0]

    def public() -> object:
        return qla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

    def public_other() -> None:
        for q, k, v, g, beta in many:
            qla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

    call: Any = ("gated_delta_rule", False, q, k, v, g, beta, None, None, None, None, True)
    public()
    key, addresses = signature(*call)
    (layout,) = plan.layouts.values()
    blocks, stream = layout.free[0], layout.stream()
    kernels, counts = layout.kernels, layout.blocks
    assert layout.final is not None
    final = layout.final
    # Memory of its own for the launches that are measured alone.
    o, state = layout.empty(*layout.o), layout.empty(*final)
    workspace = torch.empty(layout.workspace_bytes, dtype=torch.uint8, device=o.device)
    own = (*addresses, state.data_ptr(), o.data_ptr(), 0, 0, 0, 0, workspace.data_ptr())
    layout.free.clear()
    layout._fill(blocks, own)

    def launches() -> None:
        for kernel, count, block in zip(kernels, counts, blocks.all, strict=True):
            layout.launch(kernel, count, block, stream)

    parts: list[tuple[str, Callable[[], object], int]] = [
        ("public call", public, 1),
        ("public call, other tensors each time", public_other, len(many)),
        ("  without its own frame (ops.forward)", lambda: ops.forward(*call), 1),
        ("    key and addresses (signature)", lambda: signature(*call), 1),
        ("    look-up", lambda: plan.layouts.get(key), 1),
        ("    all else (Layout.run)", lambda: layout.run(addresses), 1),
        ("      o and final_state", lambda: (layout.empty(*layout.o), layout.empty(*final)), 1),
        ("      workspace", lambda: layout.release(layout.allocate(layout.workspace_bytes, stream)), 1),
        ("      filling the argument blocks", lambda: layout._fill(blocks, own), 1),
        (f"      {len(kernels)} launches", launches, 1),
    ]
    name = torch.cuda.get_device_name() if GPU else "no GPU: launches nothing"
    print(f"us per call, {options.batches} batches of {options.calls} calls ({name})\n{'':42s}     min  median")
    for label, function, count in parts:
        low, median = measure(function, max(1, options.calls // count), options.batches)
        print(f"{label:42s} {low / count:7.2f} {median / count:7.2f}")


if __name__ == "__main__":
    main()
