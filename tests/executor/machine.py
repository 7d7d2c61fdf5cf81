"""Runs calls of the public functions on emitted AMD kernels without the hardware, and without a word of them changed.

`Executor.call` is a call of a public function for a target: planned, packed and launched by the runtime as it would be
on a device, with `Device` for a driver. Whatever a device would let pass in silence (memory out of bounds or not
written, races, barriers that not all reach) raises `ExecutionError`.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from executor import build, layouts

import qla
from qla.codegen.render import render
from qla.codegen.spec import KernelSpec, Source
from qla.runtime import plan
from qla.runtime.arguments import WORKSPACE_PREFIX, ArgumentBlock, Packer
from qla.targets import TARGETS

NAMES = ("gfx942", "gfx950")
GRANULE = np.dtype([("written", "<u4"), ("read", "<u4"), ("writer", "<u2"), ("reader", "<u2")])
TYPES = {"fp32": 0, "bf16": 1, "fp16": 2}
LOAD_SIZES = {"gfx942": (1, 2, 4), "gfx950": (1, 2, 4, 12, 16)}  # bytes of a lane in one global_load_lds


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("granules", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("lds", ctypes.c_void_p),
        ("lds_size", ctypes.c_uint64),
        ("lds_granules", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("load_sizes", ctypes.c_uint32),
        ("first_phase", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
        ("accesses", ctypes.c_uint64),
        ("products", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("message", ctypes.c_char * 1024),
    )


class _Layout(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_uint32),
        ("accumulators", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("a_place", ctypes.c_void_p),
        ("b_place", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        ("column", ctypes.c_void_p),
    )


class ExecutionError(Exception):
    """A kernel did what a device would not have told, or would have hung at."""


_tables: dict[int, layouts.Table] = {}  # keeps what the machine points to


def set_layout(product: layouts.Product, table: layouts.Table) -> None:
    """Tell the machine where a product keeps its numbers."""
    _tables[product.number] = table
    arrays = (table.a_place, table.b_place, table.group, table.column)
    layout = _Layout(
        product.size, product.accumulators, product.k, TYPES[product.dtype], *(x.ctypes.data for x in arrays)
    )
    build.machine().set_layout(product.number, ctypes.byref(layout))


def set_layouts() -> None:
    """Tell the machine all layouts as documented."""
    for product in layouts.PRODUCTS:
        operand = product.operand()
        set_layout(product, layouts.table(product, operand, operand, product.accumulator()))


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: its library, and the members of its argument block."""

    source: Source
    library: ctypes.CDLL
    packer: Packer


@lru_cache(maxsize=256)
def load(binary: bytes, source: Source) -> Kernel:
    """Load what `build.build` gave."""
    if not _tables:
        set_layouts()
    with tempfile.TemporaryDirectory(prefix="qla-executor-") as folder:
        path = Path(folder) / f"{source.entry}.so"
        path.write_bytes(binary)
        library = ctypes.CDLL(str(path))
    library.executor_lds.restype = ctypes.c_void_p
    library.executor_lds_size.restype = ctypes.c_uint64
    return Kernel(source, library, Packer(source.abi, [f.name for f in source.abi if f.kind == "ptr"]))


@dataclass
class Memory:
    """A region that a kernel may touch; `granules` of one that it may write."""

    name: str
    base: int
    size: int
    granules: npt.NDArray[Any] | None = None


def writable(name: str, base: int, size: int) -> Memory:
    """Memory that nothing has been written to."""
    return Memory(name, base, size, np.zeros(-(-size // 2), GRANULE))


def extent(name: str, tensor: torch.Tensor) -> Memory:
    """The bytes from a tensor's first element to its last."""
    steps = (max(0, extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (sum(steps) + 1) * tensor.element_size() if tensor.numel() else 0
    return Memory(name, tensor.data_ptr(), size)


@dataclass
class Device:
    """What the runtime takes for a driver of an AMD GPU.

    Parameters
    ----------
    target : whose limits hold.
    seed : of the order in which workgroups and waves run.
    """

    target: str
    seed: int
    memory: list[Memory] = field(default_factory=list)
    phase: int = 0
    processors: int = 1
    accesses: int = 0
    products: int = 0
    barriers: int = 0

    def load(self, binary: bytes, source: Source) -> Kernel:
        """A kernel, refused if its LDS is more than the launch was told or than the target has."""
        kernel = load(binary, source)
        size, limits = kernel.library.executor_lds_size(), source.limits
        most = min(limits.shared_bytes, TARGETS[self.target].shared_limit)
        if size > most:
            raise ExecutionError(f"{source.entry} for {self.target}: {size} bytes of LDS, of which it has {most}")
        return kernel

    def launch(self, kernel: Kernel, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        """Run all workgroups."""
        source = kernel.source
        addresses = kernel.packer.unpack(arguments.view)
        self._divide_workspace(source, blocks, addresses)
        regions = (_Region * len(self.memory))()
        for region, memory in zip(regions, self.memory, strict=True):
            granules = None if memory.granules is None else memory.granules.ctypes.data
            region.base, region.size, region.name = memory.base, memory.size, memory.name.encode()
            region.granules = granules
        order = np.random.default_rng(self.seed).permutation(blocks).astype(np.uint32)
        lds_size = kernel.library.executor_lds_size()
        lds = np.zeros(-(-lds_size // 2), GRANULE)
        launch = _Launch(
            entry=ctypes.cast(kernel.library.executor_entry, ctypes.c_void_p),
            arguments=arguments.address,
            order=order.ctypes.data,
            blocks=blocks,
            threads=source.limits.threads,
            lds=kernel.library.executor_lds(),
            lds_size=lds_size,
            lds_granules=lds.ctypes.data,
            regions=ctypes.addressof(regions),
            region_count=len(self.memory),
            seed=self.seed,
            load_sizes=sum(1 << size for size in LOAD_SIZES[self.target]),
            phase=self.phase,
        )
        failed = build.machine().execute(ctypes.byref(launch))
        self.phase = launch.phase
        self.accesses += launch.accesses
        self.products += launch.products
        self.barriers += launch.barriers
        if failed:
            raise ExecutionError(f"{source.entry} for {self.target}, seed {self.seed}: {launch.message.decode()}")

    def _divide_workspace(self, source: Source, blocks: int, arguments: dict[str, Any]) -> None:
        """Put the workspace's buffers in place of the whole; `prepare` runs a workgroup per chunk and value head."""
        if source.spec.stage != "prepare":
            return
        for name, size in source.workspace:
            pointer = WORKSPACE_PREFIX + name
            self.memory.append(writable(pointer, arguments[pointer], blocks * size))

    def stream(self) -> int:
        """There is one."""
        return 0

    def capturing(self) -> bool:
        """No graphs."""
        return False

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        """AMD GPUs have none."""
        raise ExecutionError("a kernel asks for a tensor map")


@dataclass
class Executor:
    """Calls of public functions on a target.

    Parameters
    ----------
    target : "gfx942" or "gfx950".
    seed : of the order in which workgroups and waves run.
    sources : renders a kernel.
    """

    target: str
    seed: int = 0
    sources: Callable[[KernelSpec], Source] = render

    def call(self, function: Callable[..., Any], **arguments: Any) -> tuple[Any, Device]:
        """What a public function returns, and the device with its counts."""
        device = Device(self.target, self.seed)
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor):
                device.memory.append(extent(name, tensor))
        live: dict[int, npt.NDArray[np.uint8]] = {}

        def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty_strided(shape, strides, dtype=dtype).fill_(torch.nan)
            place = extent("an output", tensor)
            device.memory.append(writable(f"output {list(shape)}", place.base, place.size))
            return tensor

        def allocate(size: int, stream: int) -> int:
            memory = np.full(size, 0xFF, np.uint8)
            live[memory.ctypes.data] = memory
            return int(memory.ctypes.data)

        with mock.patch.multiple(
            plan,
            device_target=lambda device: self.target,
            driver_for=lambda target, index: device,
            render_source=self.sources,
            fetch_binary=build.build,
            _empty=lambda device: empty,
            _memory=lambda device: (allocate, live.pop),
            _plans={},
            layouts={},
        ):
            return function(**arguments), device


def run(executor: Executor, name: str, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor, Device]:
    """``(o, final_state, device)`` of a public function by name."""
    (o, final), device = executor.call(getattr(qla, name), **arguments)
    return o, final, device
