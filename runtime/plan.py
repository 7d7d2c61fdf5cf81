"""Launch plans: from a `Problem` to its launches, with everything that can be known beforehand known beforehand.

A `Plan` holds what the choice of kernels determines: the loaded kernels of an op on a device. A `Layout` adds what
shapes, strides and flags determine: block counts, workspace offsets and argument blocks with all scalars in place. A
warm call looks its layout up, allocates outputs and workspace, writes addresses and launches. Nothing is read from the
device and nothing waits for it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from qla.codegen.abi import segment_workspace
from qla.codegen.ops import OPS
from qla.codegen.planner import CallShape, Choice, plan_call
from qla.codegen.spec import Dtype, KernelSpec, Loads, Source
from qla.errors import CaptureError, LaunchError, UnsupportedError
from qla.runtime.arguments import MAPS, POINTERS, WORKSPACE_PREFIX, ArgumentBlock, Packer, contiguous_strides, scalars
from qla.runtime.drivers import Driver, device_target, driver_for, loads_of
from qla.runtime.problem import Problem, Result

__all__ = ["Layout", "Plan", "PlanKey", "layouts", "run"]

DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_STATE_STEP = 64  # tokens between the chunk states that `Problem.saves` asks for
_ALIGNMENT = 1024  # of workspace buffers
_MAX_BLOCKS = (1 << 31) - 1
_LAYOUTS_KEPT = 1024

#: By the signature of a call; none for a call with nothing to launch. Read by the public functions, which spare a warm
#: call even `run`; written by `run` alone.
layouts: dict[Any, Layout] = {}
_plans: dict[PlanKey, Plan] = {}
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A child that was forked while another thread built a plan would wait for that thread, which it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def run(problem: Problem) -> Result:
    """Launch a call on torch's current stream of the device of its tensors."""
    key, addresses = problem.signature()
    layout = layouts.get(key)
    if layout is None:
        layout = _new_layout(problem)
        if layout is None:
            return _nothing_to_launch(problem)
        with _lock:
            if len(layouts) >= _LAYOUTS_KEPT:
                del layouts[next(iter(layouts))]
            layouts[key] = layout
    return layout.run(addresses)


@dataclass(frozen=True)
class PlanKey:
    """What determines the kernels of a call."""

    op: str
    dtype: Dtype
    dk: int
    dv: int
    target: str
    device: int
    loads: Loads
    saves: bool
    segments: bool = False
    schedule: str = ""

    def specs(self) -> tuple[KernelSpec, ...]:
        """The specs of the kernels, in the order of their launches."""
        which = (self.dtype, self.dk, self.dv, self.target, self.loads, self.saves, self.schedule)
        scan = KernelSpec(self.op, "scan", *which)
        return scan.kernels(self.segments)


class Plan:
    """Loaded kernels and their compiled argument blocks.

    Parameters
    ----------
    key : what the plan is for.
    driver : of the device.
    sources : rendered kernels in the order of their launches, `scan` the last.
    """

    def __init__(self, key: PlanKey, driver: Driver, sources: Sequence[Source]) -> None:
        first, scan = sources[0], sources[-1]
        if first.limits.chunk != scan.limits.chunk:
            raise LaunchError(f"prepare has chunks of {first.limits.chunk} tokens, scan of {scan.limits.chunk}")
        sizes = dict(first.workspace)
        if any(sizes.get(name) != size for name, size in scan.workspace):
            raise LaunchError(f"workspace of scan {dict(scan.workspace)} is not part of that of prepare {sizes}")
        states = segment_workspace(scan.spec)
        self.key, self.driver = key, driver
        self.chunk = scan.limits.chunk
        self.workspace = first.workspace
        self.state_workspace = states if key.segments else tuple((name, 0) for name, _ in states)
        buffers = (*self.workspace, *self.state_workspace)
        self.supply = (*POINTERS, *MAPS, *(WORKSPACE_PREFIX + name for name, _ in buffers))
        self.packers = tuple(Packer(source.abi, self.supply) for source in sources)
        self.maps = {name for packer in self.packers for name in packer.names if name in MAPS}
        self.limits = tuple(source.limits for source in sources)
        self.kernels = tuple(driver.load(fetch_binary(source), source) for source in sources)


def render_source(spec: KernelSpec) -> Source:
    """Render a kernel; the generator is imported only where a plan is built."""
    from qla.codegen.render import render

    return render(spec)


def fetch_binary(source: Source) -> bytes:
    """The binary of a rendered kernel, from the store (which compiles what it does not have)."""
    from qla.runtime.store import default_store

    return default_store().get(source).data


def choose(problem: Problem, sequences: int) -> Choice:
    """How a call is run; that follows from what `signature` looks at, so once for a `Layout` is enough."""
    q, v = problem.q, problem.v
    if q.dtype not in DTYPES:
        raise UnsupportedError("q", q.dtype, ", ".join(str(d) for d in DTYPES))
    target = device_target(q.device)
    loads = loads_of(target, (q, problem.k, v))
    packed = 0 if problem.cu_seqlens is None else sequences
    (batch, tokens, heads, dk), (value_heads, dv) = q.shape, v.shape[2:]
    call = (problem.op, DTYPES[q.dtype], dk, dv, batch, tokens, heads, value_heads)
    shape = CallShape(*call, packed, loads, problem.saves)
    return plan_call(shape, target, driver_for(target, q.get_device()).processors)


def plan_for(choice: Choice, index: int) -> Plan:
    """The kernels of a choice on a device, built, compiled and loaded where this is the first call to take them."""
    call = choice.shape
    which = (call.op, call.dtype, call.dk, call.dv, choice.target, index, call.loads, call.saves)
    key = PlanKey(*which, segments=bool(choice.segment_chunks), schedule=choice.schedule)
    plan = _plans.get(key)
    if plan is None:
        with _lock:
            plan = _plans.get(key)
            if plan is None:
                plan = _plans[key] = _new_plan(key)
    return plan


def _new_plan(key: PlanKey) -> Plan:
    driver = driver_for(key.target, key.device)
    if driver.capturing():
        raise CaptureError(
            f"the kernels of {key.op} ({key.dtype}, K = {key.dk}, V = {key.dv}, sequences "
            f"{'split into segments' if key.segments else 'not split'}, which follows from shapes) are not loaded, and "
            "nothing may be compiled or loaded inside a graph capture: run this call once before capturing"
        )
    return Plan(key, driver, [render_source(spec) for spec in key.specs()])


def _on_device(index: int) -> Any:
    """Context in which a device is current; None where it is already (or is the CPU)."""
    if index < 0 or torch._C._cuda_getDevice() == index:
        return None
    return torch.cuda.device(index)


def _new_layout(problem: Problem) -> Layout | None:
    batch, tokens = problem.q.shape[:2]
    sequences = batch if problem.cu_seqlens is None else problem.cu_seqlens.numel() - 1
    if not (batch and tokens and sequences and problem.v.shape[2]):
        return None
    index = problem.q.get_device()
    with _on_device(index) or nullcontext():
        choice = choose(problem, sequences)
        return Layout(plan_for(choice, index), problem, choice)


def _empty(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """``empty(shape, strides, dtype)`` on a device, which is current where it is a GPU.

    There it is the function that code generated by Inductor allocates with: torch.empty without its argument parser and
    its dispatcher, which cost more than the allocation.
    """
    fast = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
    if device.type == "cuda" and fast is not None:
        return fast  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _TensorMemory:
    """Raw memory as tensors, where torch's allocator has no raw interface."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live: dict[int, torch.Tensor] = {}

    def allocate(self, size: int, stream: int) -> int:
        """Memory for use on torch's current stream."""
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        address = memory.data_ptr()
        self.live[address] = memory
        return address

    def release(self, address: int) -> None:
        """Return it to the allocator, which reuses it behind what is queued on that stream by now."""
        del self.live[address]


def _memory(device: torch.device) -> tuple[Callable[[int, int], int], Callable[[int], None]]:
    """``allocate(size, stream)`` and ``release(address)``: torch's own, which spare the tensor, where it has them."""
    allocate = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
    release = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
    if device.type == "cuda" and allocate is not None and release is not None:
        return allocate, release
    memory = _TensorMemory(device)
    return memory.allocate, memory.release


def _state_shape(problem: Problem, sequences: int) -> tuple[int, ...]:
    dk, (value_heads, dv) = problem.q.shape[-1], problem.v.shape[2:]
    return (sequences, value_heads, *((dv, dk) if problem.state_v_first else (dk, dv)))


class Layout:
    """All of a call but its addresses.

    Parameters
    ----------
    plan : the kernels.
    problem : a call of this layout; its tensors are not kept.
    choice : how it is run.
    """

    def __init__(self, plan: Plan, problem: Problem, choice: Choice) -> None:
        driver, sequences, value_heads = plan.driver, choice.shape.chains, choice.shape.value_heads
        self.ragged = problem.cu_seqlens is not None
        self.blocks = choice.workgroups
        if max(self.blocks) > _MAX_BLOCKS:
            raise UnsupportedError("q", tuple(problem.q.shape), f"at most {_MAX_BLOCKS} workgroups per launch")
        self.plan, self.launch, self.stream = plan, driver.launch, driver.stream
        prepare, *others = plan.kernels
        deal, self.packers = choice.deal, plan.packers
        if plan.limits[0].matrix_bytes:
            prepare = replace(prepare, shared_bytes=plan.limits[0].shared_for(deal.heads, deal.apart))
        self.kernels = (prepare, *others)
        self.index, self.dtype = problem.q.get_device(), problem.v.dtype
        device = problem.q.device
        self.empty = _empty(device)
        self.allocate, self.release = _memory(device)
        self.o = _contiguous(problem.v.shape, self.dtype)
        self.final = self.saves = None
        if problem.output_final_state:
            self.final = _contiguous(_state_shape(problem, sequences), torch.float32)
        if problem.saves:
            states, *factors = _save_shapes(problem)
            dtype = self.dtype
            self.saves = (_contiguous(states, torch.float32), *(_contiguous(shape, dtype) for shape in factors))
        offsets, position = [], 0
        for slots, buffers in ((choice.slots, plan.workspace), (choice.segment_slots, plan.state_workspace)):
            for _, size in buffers:
                offsets.append(position)
                position += -(-slots * value_heads * size // _ALIGNMENT) * _ALIGNMENT
        self.offsets = tuple(offsets)
        # torch aligns to less than what the buffers need.
        self.workspace_bytes = position + _ALIGNMENT if position else 0
        shared = scalars(problem, deal, sequences, choice.segment_chunks)
        self.templates = tuple(packer.template(shared) for packer in plan.packers)
        # Blocks not in use by a call. Threads take and return them; the count settles at that of concurrent calls.
        self.free: deque[_Blocks] = deque()
        self.maps = self._encoders(problem)

    def _encoders(self, problem: Problem) -> tuple[Callable[[int], bytes], ...] | None:
        wanted = self.plan.maps
        if not wanted:
            return None
        layouts = [(t.shape, t.stride()) for t in (problem.q, problem.k, problem.v)] + [self.o[:2]]
        return tuple(
            self.plan.driver.tensor_map(shape, strides, self.dtype, self.plan.chunk) if name in wanted else _no_map
            for name, (shape, strides) in zip(MAPS, layouts, strict=True)
        )

    def run(self, addresses: tuple[int, ...]) -> Result:
        """Allocate, fill the argument blocks and launch all stages.

        Everything here happens once per call, and nothing that `__init__` could have done.

        Parameters
        ----------
        addresses : of the inputs, as `signature` returns them: the first of `POINTERS`.
        """
        index = self.index
        if index >= 0 and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(addresses)
        stream, launch = self.stream(), self.launch
        o = self.empty(*self.o)
        result = Result(o, None)
        final_at, saved = 0, _NOT_SAVED
        if self.final is not None:
            result.final_state = final = self.empty(*self.final)
            final_at = final.data_ptr()
        if self.saves is not None:
            saved = self._allocate_saves(result)
        workspace_at = self.allocate(self.workspace_bytes, stream) if self.workspace_bytes else 0
        try:
            try:
                blocks = self.free.pop()
            except IndexError:
                blocks = _Blocks(self.templates)
            addresses = (*addresses, final_at, o.data_ptr(), *saved, workspace_at)
            if blocks.addresses != addresses:  # the same again where a loop runs on the same tensors
                self._fill(blocks, addresses)
            for kernel, count, block in zip(self.kernels, self.blocks, blocks.all, strict=True):
                launch(kernel, count, block, stream)
            self.free.append(blocks)
        finally:
            # All launches are queued: the allocator hands it out again only to what follows them on this stream.
            if workspace_at:
                self.release(workspace_at)
        return result

    def _fill(self, blocks: _Blocks, addresses: tuple[int, ...]) -> None:
        base = addresses[-1]
        base += -base % _ALIGNMENT
        encoded = _NO_MAPS
        if self.maps is not None:
            q, k, v, o = self.maps
            encoded = q(addresses[0]), k(addresses[1]), v(addresses[2]), o(addresses[_O])
        values = (*addresses[:-1], *encoded, *map(base.__add__, self.offsets))
        for packer, block in zip(self.packers, blocks.all, strict=True):
            packer.pack(block, values)
        blocks.addresses = addresses

    def _allocate_saves(self, result: Result) -> tuple[int, int, int, int]:
        assert self.saves is not None
        states, *factors = [self.empty(*each) for each in self.saves]
        result.states = states
        if not factors:
            return states.data_ptr(), 0, 0, 0
        result.A, result.w, result.u = A, w, u = factors
        return states.data_ptr(), A.data_ptr(), w.data_ptr(), u.data_ptr()


class _Blocks:
    """The argument blocks of a call, and the addresses they were filled with."""

    __slots__ = ("addresses", "all")

    def __init__(self, templates: Sequence[bytes]) -> None:
        self.all = tuple(ArgumentBlock(template) for template in templates)
        self.addresses: tuple[int, ...] = ()


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What `_empty` takes; plain tuples, as it asks for."""
    return tuple(shape), contiguous_strides(shape), dtype


_NO_MAPS = (b"",) * len(MAPS)
_NOT_SAVED = (0, 0, 0, 0)
_O = POINTERS.index("o")


def _no_map(address: int) -> bytes:
    return b""


def _save_shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    batch, tokens, _, dk = problem.q.shape
    value_heads, dv = problem.v.shape[2:]
    rows = (batch, tokens, value_heads)
    states = (batch, -(-tokens // _STATE_STEP) + 1, value_heads, dk, dv)
    return (states, (*rows, _STATE_STEP), (*rows, dk), (*rows, dv)) if OPS[problem.op].delta else (states,)


def _nothing_to_launch(problem: Problem) -> Result:
    """Result of a call without tokens, sequences or heads: the states as they came, zeros for what has no source."""
    device, initial = problem.q.device, problem.initial_state
    result = Result(torch.zeros(problem.v.shape, dtype=problem.v.dtype, device=device), None)
    if problem.output_final_state:
        sequences = problem.q.shape[0] if problem.cu_seqlens is None else problem.cu_seqlens.numel() - 1
        result.final_state = torch.zeros(_state_shape(problem, sequences), dtype=torch.float32, device=device)
        if initial is not None:
            result.final_state.copy_(initial)
    if problem.saves:
        states, *factors = _save_shapes(problem)
        result.states = torch.zeros(states, dtype=torch.float32, device=device)
        if initial is not None and problem.cu_seqlens is None:
            result.states[:] = (initial.transpose(-1, -2) if problem.state_v_first else initial)[:, None]
        if factors:
            zeros = (torch.zeros(shape, dtype=problem.v.dtype, device=device) for shape in factors)
            result.A, result.w, result.u = zeros
    return result
