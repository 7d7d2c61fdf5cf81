"""The whole path on a shape of a real model: compile for every target, run here, compare with the recurrence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import logsigmoid

import qla
from qla.codegen.builds import Build
from qla.codegen.ops import OPS
from qla.codegen.spec import KernelSpec
from qla.errors import QlaError, UnsupportedError
from qla.runtime.compilers import compiler_for
from qla.runtime.drivers import device_target, driver_for
from qla.targets import TARGETS

# A linear attention layer of Qwen3.5-35B. The other ops run on the same shape.
HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
TOKENS = {"cpu": 1024, "cuda": 8192}
_REPEATS = {"cpu": 5, "cuda": 20}

# Largest relative error of output and state in bf16. With no gate, errors add up over a thousand tokens and more.
BAR, BAR_UNGATED, _MANY_TOKENS = 0.005, 0.008, 1000

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Outcome:
    """How one op went on this device.

    Parameters
    ----------
    op : name.
    first_seconds, seconds : of the first call (which finds or compiles the kernels), and of later ones (the median).
    output_error, state_error : relative to the recurrence in float64, ``|x - ref| / |ref|``.
    bar : largest error that passes.
    """

    op: str
    first_seconds: float
    seconds: float
    output_error: float
    state_error: float
    bar: float

    @property
    def passed(self) -> bool:
        # NaN fails: it compares false with everything.
        return max(self.output_error, self.state_error) <= self.bar and not math.isnan(self.state_error)


def pick_device(wanted: str) -> tuple[str, str]:
    """``"cuda"`` or ``"cpu"``, from ``auto``, ``host`` or ``cuda``; and why a GPU that is here is not taken, if so.

    Raises
    ------
    QlaError
        ``cuda`` was asked for, and there is no GPU or it cannot be used.
    """
    if wanted not in ("auto", "host", "cuda"):
        raise UnsupportedError("--device", wanted, "auto, host, cuda")
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise UnsupportedError("--device", wanted, "a GPU that torch sees", "There is none here; use --device host.")
    if wanted == "host" or not present:
        return "cpu", ""
    try:
        _check_gpu()
    except QlaError as error:
        if wanted == "cuda":
            raise
        return "cpu", str(error).splitlines()[0]
    return "cuda", ""


def _check_gpu() -> None:
    """Raise where torch's current GPU has no target, or what launches or compiles its kernels is not installed."""
    index = torch.cuda.current_device()
    target = device_target(torch.device("cuda", index))
    driver_for(target, index)
    compiler_for(TARGETS[target]).identity()


def public_function(op: str) -> Callable[..., Any] | None:
    """The function that users call for an op; None where it has none (yet)."""
    return getattr(qla, f"chunk_{op}", None)


def device_name(device: str) -> str:
    """For people."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"host ({torch.get_num_threads()} threads)"


def specs(targets: Sequence[str]) -> list[KernelSpec]:
    """Both kernels of every op, for each target, at the demo's shape."""
    return [
        KernelSpec(op, stage, "bf16", HEAD_DIM, HEAD_DIM, target).canonical()
        for op in OPS
        for stage in ("prepare", "scan")
        for target in targets
    ]


def build_table(builds: Sequence[Build]) -> Table:
    """Compile time and resources, one kernel a line."""
    table = Table(title=f"Compiled: bf16, K = V = {HEAD_DIM}")
    for name in ("op", "stage", "target", "compiler"):
        table.add_column(name, no_wrap=True)
    for name in ("compile", "registers", "shared or LDS", "spilled", "scratch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    before = None
    for build in builds:
        if before and build.spec.op != before.op:
            table.add_section()
        table.add_row(*_build_row(build, before))
        before = build.spec
    return table


def _build_row(build: Build, before: KernelSpec | None) -> list[str]:
    spec, used = build.spec, build.resources
    same_op = before is not None and spec.op == before.op
    same_stage = before is not None and same_op and spec.stage == before.stage
    row = ["" if same_op else spec.op, "" if same_stage else spec.stage, spec.target, build.compiler]
    row += [f"{build.seconds:.2f} s" if used else "-"]
    if used is None or not used.registers:
        row += ["-"] * 4  # a CPU's compiler counts none of these
    else:
        row += [str(used.registers), f"{build.shared_bytes} B", f"{used.spill_bytes} B", f"{used.scratch_bytes} B"]
    return [*row, f"[red]{_brief(build.problems)}[/]" if build.problems else "[green]ok[/]"]


def _brief(problems: Sequence[str]) -> str:
    return "; ".join(problem.splitlines()[0][:80].replace("[", "\\[") for problem in problems)


def inputs(op: str, tokens: int, device: str, heads: int = HEADS, value_heads: int = VALUE_HEADS) -> dict[str, Any]:
    """Arguments of a call as a trained model would make it: normal q, k and v, decays near 1, steps between 0 and 1."""
    features = OPS[op]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    arguments: dict[str, Any] = {
        "q": normal(1, tokens, heads, HEAD_DIM).bfloat16(),
        "k": normal(1, tokens, heads, HEAD_DIM).bfloat16(),
        "v": normal(1, tokens, value_heads, HEAD_DIM).bfloat16(),
    }
    if features.gate != "none":
        channels = (HEAD_DIM,) if features.gate == "channel" else ()
        arguments["g"] = logsigmoid(normal(1, tokens, value_heads, *channels) + 2.0)
    if features.delta:
        arguments["beta"] = torch.sigmoid(normal(1, tokens, value_heads))
        arguments["use_qk_l2norm_in_kernel"] = True
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    return {**arguments, "output_final_state": True}


def recurrence(op: str, arguments: dict[str, Any], advance: Advance) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state of the op's definition, token by token in float64, all heads at once."""
    features = OPS[op]
    v = arguments["v"][0].double()
    q, k = (arguments[name][0].double() for name in ("q", "k"))
    if arguments.get("use_qk_l2norm_in_kernel"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    tokens, value_heads, dv = v.shape
    q, k = (x.repeat_interleave(value_heads // x.shape[1], dim=1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = None
    if features.gate != "none":
        decay = arguments["g"][0].double().exp().reshape(tokens, value_heads, -1, 1)
    state = v.new_zeros(value_heads, k.shape[-1], dv)
    output = torch.empty_like(v)
    for t in range(tokens):
        if decay is not None:
            state *= decay[t]
        value = v[t, :, None]
        if features.delta:
            value = arguments["beta"][0, t].double()[:, None, None] * (value - k[t, :, None] @ state)
        state.baddbmm_(k[t, :, :, None], value)
        output[t] = (q[t, :, None] @ state)[:, 0]
        advance(1)
    return output[None], state[None]


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """``|x - ref| / |ref|``; NaN where either has one."""
    return float((x.double() - reference).norm() / reference.norm())


def run_op(op: str, arguments: dict[str, Any], device: str, advance: Advance) -> Outcome:
    """Call an op's public function, time it and compare it with the recurrence."""
    function = public_function(op)
    if function is None:
        raise UnsupportedError("op", op, f"an op with a function qla.chunk_{op}")
    began = time.perf_counter()
    output, state = function(**arguments)
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    seconds = _median_seconds(lambda: function(**arguments), device)
    expected, expected_state = recurrence(op, arguments, advance)
    ungated = OPS[op].gate == "none" and output.shape[1] > _MANY_TOKENS
    return Outcome(
        op,
        first,
        seconds,
        relative_error(output, expected),
        relative_error(state, expected_state),
        BAR_UNGATED if ungated else BAR,
    )


def _median_seconds(call: Callable[[], object], device: str) -> float:
    """Of a warm call: on a GPU the time on the device, else that on the clock."""
    call()
    times: list[float] = []
    event: Any = torch.cuda.Event  # untyped
    for _ in range(_REPEATS[device]):
        if device == "cuda":
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def outcome_table(outcomes: Sequence[Outcome], device: str, tokens: int) -> Table:
    """Errors and times, one op a line."""
    shape = f"1 x {tokens} tokens, {HEADS} heads, {VALUE_HEADS} value heads, K = V = {HEAD_DIM}, bf16"
    table = Table(title=f"Run on {device_name(device)}: {shape}")
    table.add_column("op", no_wrap=True)
    for name in ("error of o", "error of state", "allowed", "first call", "call (median)"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for o in outcomes:
        verdict = "[green]ok[/]" if o.passed else "[red]miss[/]"
        numbers = (f"{o.output_error:.5f}", f"{o.state_error:.5f}", f"{o.bar:g}")
        table.add_row(o.op, *numbers, f"{o.first_seconds:.2f} s", f"{o.seconds * 1e3:.3f} ms", verdict)
    return table
