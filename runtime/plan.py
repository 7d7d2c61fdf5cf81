"""Launch plans: from a `Problem` to two launches, with everything that can be known beforehand known beforehand.

A `Plan` holds what the choice of kernels determines: the two loaded kernels of an op on a device. A `Layout` adds what
shapes, strides and flags determine: block counts, workspace offsets and argument blocks with all scalars in place. A
warm call looks its layout up, allocates outputs and workspace, writes addresses and launches. Nothing is read from the
device and nothing waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from qla.codegen.ops import OPS
from qla.codegen.spec import Dtype, KernelSpec, Source, Stage
from qla.errors import CaptureError, LaunchError, UnsupportedError
from qla.runtime.arguments import MAPS, POINTERS, WORKSPACE_PREFIX, ArgumentBlock, Packer, contiguous_strides, scalars
from qla.runtime.drivers import Driver, device_target, driver_for, tileable
from qla.runtime.problem import Problem, Result

__all__ = ["Layout", "Plan", "PlanKey", "run"]

DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_STATE_STEP = 64  # tokens between the chunk states that `Problem.saves` asks for
_ALIGNMENT = 1024  # of workspace buffers
_MAX_BLOCKS = (1 << 31) - 1
_LAYOUTS_KEPT = 1024

Loads = Literal["tile", "strided"]
_Call = Callable[[Problem, int, int, int], Result]
_layouts: dict[Any, _Call] = {}
_plans: dict[PlanKey, Plan] = {}
_lock = threading.RLock()


def run(problem: Problem) -> Result:
    """Launch a call on torch's current stream of the device of its tensors."""
    q, k, v = problem.q, problem.k, problem.v
    g, beta, A_log, dt_bias = problem.g, problem.beta, problem.A_log, problem.dt_bias
    cu_seqlens, initial = problem.cu_seqlens, problem.initial_state
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    # Everything but the addresses that a launch depends on.
    key = (
        *(problem.op, q.dtype, q.get_device(), (q_at | k_at | v_at) % 16 == 0),
        *(q.shape, q.stride(), k.stride(), v.shape, v.stride()),
        *(None if g is None else (g.dtype, g.stride()), None if beta is None else (beta.dtype, beta.stride())),
        *(A_log is None or A_log.dtype, dt_bias is None or dt_bias.dtype),
        *(cu_seqlens is None or (cu_seqlens.dtype, cu_seqlens.shape), initial is None or initial.stride()),
        *(problem.scale, problem.lower_bound, problem.output_final_state, problem.state_v_first, problem.qk_l2norm),
        *(problem.beta_sigmoid, problem.beta_double, problem.gate_in_kernel, problem.saves),
    )
    call = _layouts.get(key)
    if call is None:
        call = _new_layout(problem)
        with _lock:
            if len(_layouts) >= _LAYOUTS_KEPT:
                del _layouts[next(iter(_layouts))]
            _layouts[key] = call
    return call(problem, q_at, k_at, v_at)


@dataclass(frozen=True)
class PlanKey:
    """What determines the two kernels of a call."""

    op: str
    dtype: Dtype
    dk: int
    dv: int
    target: str
    device: int
    loads: Loads
    saves: bool

    def spec(self, stage: Stage) -> KernelSpec:
        """The spec of one of the two kernels."""
        return KernelSpec(self.op, stage, self.dtype, self.dk, self.dv, self.target, self.loads, self.saves)


class Plan:
    """Two loaded kernels and their compiled argument blocks.

    Parameters
    ----------
    key : what the plan is for.
    driver : of the device.
    prepare, scan : rendered sources of the stages.
    """

    def __init__(self, key: PlanKey, driver: Driver, prepare: Source, scan: Source) -> None:
        if prepare.limits.chunk != scan.limits.chunk:
            raise LaunchError(f"prepare has chunks of {prepare.limits.chunk} tokens, scan of {scan.limits.chunk}")
        sizes = dict(prepare.workspace)
        if any(sizes.get(name) != size for name, size in scan.workspace):
            raise LaunchError(f"workspace of scan {dict(scan.workspace)} is not part of that of prepare {sizes}")
        self.key, self.driver = key, driver
        self.chunk = scan.limits.chunk
        self.workspace = prepare.workspace
        self.prepare_per_value_head = OPS[key.op].gate == "channel"
        self.splits = key.dv // scan.limits.value_columns if scan.limits.value_columns else 1
        self.supply = (*POINTERS, *MAPS, *(WORKSPACE_PREFIX + name for name, _ in self.workspace))
        self.packers = (Packer(prepare.abi, self.supply), Packer(scan.abi, self.supply))
        self.maps = {name for packer in self.packers for name in packer.names if name in MAPS}
        self.kernels = tuple(driver.load(fetch_binary(source), source) for source in (prepare, scan))


def render_source(spec: KernelSpec) -> Source:
    """Render a kernel; the generator is imported only where a plan is built."""
    from qla.codegen.render import render

    return render(spec)


def fetch_binary(source: Source) -> bytes:
    """The binary of a rendered kernel, from the store (which compiles what it does not have)."""
    from qla.runtime.store import default_store

    return default_store().get(source).data


def plan_for(problem: Problem) -> Plan:
    """The plan of a call, built, compiled and loaded where this is the first of its kind."""
    q, v = problem.q, problem.v
    if q.dtype not in DTYPES:
        raise UnsupportedError("q", q.dtype, ", ".join(str(d) for d in DTYPES))
    target = device_target(q.device)
    # The host reads any strides, so it has no second kernel for them.
    tiles = target == "host" or all(tileable(t) for t in (q, problem.k, v))
    loads: Loads = "tile" if tiles else "strided"
    key = PlanKey(problem.op, DTYPES[q.dtype], q.shape[-1], v.shape[-1], target, q.get_device(), loads, problem.saves)
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
            f"the kernels of {key.op} ({key.dtype}, K = {key.dk}, V = {key.dv}) are not loaded, and nothing may be "
            f"compiled or loaded inside a graph capture: run this call once before capturing"
        )
    return Plan(key, driver, render_source(key.spec("prepare")), render_source(key.spec("scan")))


def _on_device(index: int) -> Any:
    """Context in which a device is current; None where it is already (or is the CPU)."""
    if index < 0 or torch._C._cuda_getDevice() == index:
        return None
    return torch.cuda.device(index)


def _new_layout(problem: Problem) -> _Call:
    batch, tokens = problem.q.shape[:2]
    sequences = batch if problem.cu_seqlens is None else problem.cu_seqlens.numel() - 1
    if not (batch and tokens and sequences and problem.v.shape[2]):
        return _nothing_to_launch
    guard = _on_device(problem.q.get_device())
    if guard is None:
        return Layout(plan_for(problem), problem, sequences)
    with guard:
        return Layout(plan_for(problem), problem, sequences)


def _state_shape(problem: Problem, sequences: int) -> tuple[int, ...]:
    dk, (value_heads, dv) = problem.q.shape[-1], problem.v.shape[2:]
    return (sequences, value_heads, *((dv, dk) if problem.state_v_first else (dk, dv)))


class Layout:
    """All of a call but its addresses; calling it launches.

    Parameters
    ----------
    plan : the kernels.
    problem : a call of this layout; its tensors are not kept.
    sequences : number of sequences.
    """

    def __init__(self, plan: Plan, problem: Problem, sequences: int) -> None:
        batch, tokens, heads = problem.q.shape[:3]
        value_heads = problem.v.shape[2]
        chunk, driver = plan.chunk, plan.driver
        ragged = problem.cu_seqlens is not None
        # With cu_seqlens, sequence n starts at slot cu_seqlens[n] // chunk + n, which needs no lengths on the host.
        slots = tokens // chunk + sequences if ragged else batch * -(-tokens // chunk)
        prepare_heads = value_heads if plan.prepare_per_value_head else heads
        self.blocks = (slots * prepare_heads, sequences * value_heads * plan.splits)
        if max(self.blocks) > _MAX_BLOCKS:
            raise UnsupportedError("q", tuple(problem.q.shape), f"at most {_MAX_BLOCKS} workgroups per launch")
        self.plan, self.launch, self.stream = plan, driver.launch, driver.stream
        self.kernels, self.packers = plan.kernels, plan.packers
        self.index, self.device, self.dtype = problem.q.get_device(), problem.q.device, problem.v.dtype
        self.o_shape = tuple(problem.v.shape)
        self.final_shape = _state_shape(problem, sequences) if problem.output_final_state else None
        self.save_shapes = _save_shapes(problem) if problem.saves else None
        self.offsets, position = [], 0
        for _, size in plan.workspace:
            self.offsets.append(position)
            position += -(-slots * value_heads * size // _ALIGNMENT) * _ALIGNMENT
        # torch aligns to less than what the buffers need.
        self.workspace_bytes = position + _ALIGNMENT if position else 0
        shared = scalars(problem, slots, sequences)
        self.templates = tuple(packer.template(shared) for packer in plan.packers)
        # Blocks not in use by a call. Threads take and return them; the count settles at that of concurrent calls.
        self.free: deque[tuple[ArgumentBlock, ArgumentBlock]] = deque()
        self.maps = self._encoders(problem)

    def _encoders(self, problem: Problem) -> tuple[Callable[[int], bytes], ...] | None:
        wanted = self.plan.maps
        if not wanted:
            return None
        o_strides = contiguous_strides(self.o_shape)
        layouts = [(t.shape, t.stride()) for t in (problem.q, problem.k, problem.v)] + [(self.o_shape, o_strides)]
        return tuple(
            self.plan.driver.tensor_map(shape, strides, self.dtype, self.plan.chunk) if name in wanted else _no_map
            for name, (shape, strides) in zip(MAPS, layouts, strict=True)
        )

    def __call__(self, problem: Problem, q_at: int, k_at: int, v_at: int) -> Result:
        """Allocate, fill the argument blocks and launch both stages."""
        index = self.index
        if index >= 0 and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self._run(problem, q_at, k_at, v_at)
        return self._run(problem, q_at, k_at, v_at)

    def _run(self, problem: Problem, q_at: int, k_at: int, v_at: int) -> Result:
        g, beta, A_log, dt_bias = problem.g, problem.beta, problem.A_log, problem.dt_bias
        cu_seqlens, initial = problem.cu_seqlens, problem.initial_state
        # Kernels index these without strides. They are small, and contiguous but for unusual callers.
        if A_log is not None and not A_log.is_contiguous():
            A_log = A_log.contiguous()
        if dt_bias is not None and not dt_bias.is_contiguous():
            dt_bias = dt_bias.contiguous()
        if cu_seqlens is not None and not cu_seqlens.is_contiguous():
            cu_seqlens = cu_seqlens.contiguous()

        device, empty = self.device, torch.empty
        o = empty(self.o_shape, dtype=self.dtype, device=device)
        o_at = o.data_ptr()
        final, final_at, base = None, 0, 0
        if self.final_shape is not None:
            final = empty(self.final_shape, dtype=torch.float32, device=device)
            final_at = final.data_ptr()
        if self.workspace_bytes:
            # Held until both launches are queued; the allocator reuses it only behind them on this stream.
            workspace = empty(self.workspace_bytes, dtype=torch.uint8, device=device)
            base = workspace.data_ptr()
            base += -base % _ALIGNMENT
        result = Result(o, final)
        saved = (0, 0, 0, 0) if self.save_shapes is None else self._allocate_saves(result)
        maps = self.maps
        values = (
            *(q_at, k_at, v_at, 0 if g is None else g.data_ptr(), 0 if beta is None else beta.data_ptr()),
            *(0 if A_log is None else A_log.data_ptr(), 0 if dt_bias is None else dt_bias.data_ptr()),
            *(0 if cu_seqlens is None else cu_seqlens.data_ptr(), 0 if initial is None else initial.data_ptr()),
            *(final_at, o_at, *saved),
            *(_NO_MAPS if maps is None else (maps[0](q_at), maps[1](k_at), maps[2](v_at), maps[3](o_at))),
            *[base + offset for offset in self.offsets],
        )
        try:
            blocks = self.free.pop()
        except IndexError:
            blocks = (ArgumentBlock(self.templates[0]), ArgumentBlock(self.templates[1]))
        (first, second), (prepare, scan) = blocks, self.packers
        stream, launch = self.stream(), self.launch
        prepare.pack(first, values)
        launch(self.kernels[0], self.blocks[0], first, stream)
        scan.pack(second, values)
        launch(self.kernels[1], self.blocks[1], second, stream)
        self.free.append(blocks)
        return result

    def _allocate_saves(self, result: Result) -> tuple[int, int, int, int]:
        assert self.save_shapes is not None
        states, *factors = self.save_shapes
        result.states = torch.empty(states, dtype=torch.float32, device=self.device)
        if not factors:
            return result.states.data_ptr(), 0, 0, 0
        A, w, u = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in factors)
        result.A, result.w, result.u = A, w, u
        return result.states.data_ptr(), A.data_ptr(), w.data_ptr(), u.data_ptr()


_NO_MAPS = (b"",) * len(MAPS)


def _no_map(address: int) -> bytes:
    return b""


def _save_shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    batch, tokens, _, dk = problem.q.shape
    value_heads, dv = problem.v.shape[2:]
    rows = (batch, tokens, value_heads)
    states = (batch, -(-tokens // _STATE_STEP) + 1, value_heads, dk, dv)
    return (states, (*rows, _STATE_STEP), (*rows, dk), (*rows, dv)) if OPS[problem.op].delta else (states,)


def _nothing_to_launch(problem: Problem, q_at: int, k_at: int, v_at: int) -> Result:
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
