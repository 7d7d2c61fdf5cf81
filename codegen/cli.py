"""`qla-codegen`: look at, write, compile and try the kernels.

Exit codes: 0 all is well; 1 a kernel or a result is not as it must be; 2 the request cannot be carried out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from typer.core import TyperGroup

from qla.codegen.cli_report import lock, report
from qla.codegen.console import error_console, progress, wide_console
from qla.codegen.ops import OPS
from qla.codegen.spec import HEAD_DIMS, STAGES, Dtype, KernelSpec, Loads, Stage
from qla.errors import QlaError, UnsupportedError
from qla.targets import TARGETS

if TYPE_CHECKING:
    from qla.codegen.builds import Build
    from qla.codegen.lines import Use


class _Group(TyperGroup):
    """Turns the errors of qla into a message; a traceback would only hide it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (QlaError, OSError) as error:  # OSError: a folder that cannot be written
            error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None)

_Targets = Annotated[
    str, typer.Option("--targets", help=f"Comma-separated, of: {', '.join(TARGETS)}. Default: all.", show_default=False)
]

_SUMMARY = ("kernels", "time", "slowest", "registers", "shared or LDS", "spill", "scratch", "waits added", "unfit")


def main() -> None:
    """Entry point of the command."""
    app()


@app.command()
def emit(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(OPS)}.")],
    dtype: Annotated[str, typer.Option(help="Of q, k, v and o: bf16, fp16; on host fp32 too.")] = "bf16",
    dk: Annotated[int, typer.Option(help=f"Head dim of q and k, one of {HEAD_DIMS}.")] = 128,
    dv: Annotated[int, typer.Option(help=f"Head dim of v, one of {HEAD_DIMS}.")] = 128,
    target: Annotated[str, typer.Option(help=f"One of: {', '.join(TARGETS)}.")] = "sm_90a",
    stage: Annotated[str, typer.Option(help="prepare, carry, combine or scan; all for prepare and scan.")] = "all",
    loads: Annotated[str, typer.Option(help="tile (16-byte aligned rows) or strided (any strides).")] = "tile",
    saves: Annotated[bool, typer.Option("--saves", help="Also write chunk states and the factors w, u and A.")] = False,
    schedule: Annotated[str, typer.Option(help="Of scan; see `list`. Default: the target's first.")] = "",
    output: Annotated[
        str, typer.Option(help="Folder to write to, or - for standard output. Default: one named as the target.")
    ] = "",
) -> None:
    """Write one self-contained source per stage.

    Each builds with the command in its own first lines, run in the folder where it lies. Options that make no
    difference to a stage are not in its name: prepare looks at no value dim unless it saves w, u and A.
    """
    from qla.codegen.emit import build_commands, write
    from qla.codegen.render import render

    if stage not in (*STAGES, "all"):
        raise UnsupportedError("--stage", stage, f"{', '.join(STAGES)}, all")
    stages: tuple[Stage, ...] = ("prepare", "scan") if stage == "all" else (cast(Stage, stage),)
    # A schedule is an order of scan's steps: with both stages it is meant for scan.
    specs = [
        KernelSpec(
            *(op, s, cast(Dtype, dtype), dk, dv, target, cast(Loads, loads), saves),
            schedule if s == "scan" or stage != "all" else "",
        ).canonical()
        for s in stages
    ]
    if output == "-":
        for spec in specs:
            sys.stdout.write(render(spec).text)
        return
    for spec, path in zip(specs, write(specs, Path(output or target)), strict=True):
        typer.echo(f"{path}")
        for command in build_commands(spec):
            typer.echo(f"    {command}")


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show the ops, and for each target its dtypes, chunks, schedules and how many kernels are supported."""
    from qla.codegen.matrix import full

    if as_json:
        typer.echo(json.dumps({"ops": _ops(), "head_dims": HEAD_DIMS, "targets": _target_facts()}, indent=2))
        return
    console = Console()
    table = Table(title="Ops")
    for name in ("op", "delta rule", "gate"):
        table.add_column(name)
    for op, features in OPS.items():
        table.add_row(op, "yes" if features.delta else "no", features.gate)
    console.print(table)
    table = Table(title=f"Targets (head dims {' and '.join(map(str, HEAD_DIMS))})")
    for name in ("target", "language", "dtypes", "chunk", "schedules", "kernels"):
        table.add_column(name)
    for name, facts in TARGETS.items():
        chunks = sorted(set(facts.chunk.values()), reverse=True)
        by_gate = ", ".join(f"{c} ({'/'.join(g for g in facts.chunk if facts.chunk[g] == c)})" for c in chunks)
        schedules = ", ".join(schedule.name for schedule in facts.schedules)
        chunk = by_gate if len(chunks) > 1 else str(chunks[0])
        table.add_row(name, facts.language, ", ".join(facts.dtypes), chunk, schedules, str(len(full(name))))
    console.print(table)


def _ops() -> dict[str, Any]:
    return {name: {"delta": op.delta, "gate": op.gate} for name, op in OPS.items()}


def _target_facts() -> dict[str, Any]:
    from qla.codegen.matrix import full

    return {
        name: {
            "language": target.language,
            "dtypes": target.dtypes,
            "chunk": dict(target.chunk),
            "schedules": [schedule.name for schedule in target.schedules],
            "kernels": len(full(name)),
        }
        for name, target in TARGETS.items()
    }


@app.command()
def explain(
    op: Annotated[str, typer.Option(help=f"One of: {', '.join(OPS)}.")],
    tokens: Annotated[int, typer.Option(help="T, of each row.")],
    heads: Annotated[int, typer.Option(help="Of q and k.")],
    value_heads: Annotated[int, typer.Option(help="Of v, a multiple of heads. Default: as many.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    sequences: Annotated[int, typer.Option(help="Packed into one row of tokens. Default: none are.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of q, k, v and o: bf16, fp16; on host fp32 too.")] = "bf16",
    dk: Annotated[int, typer.Option(help=f"Head dim of q and k, one of {HEAD_DIMS}.")] = 128,
    dv: Annotated[int, typer.Option(help=f"Head dim of v, one of {HEAD_DIMS}.")] = 128,
    target: Annotated[str, typer.Option(help=f"One of: {', '.join(TARGETS)}.")] = "sm_90a",
    loads: Annotated[str, typer.Option(help="tile (16-byte aligned rows) or strided (any strides).")] = "tile",
    saves: Annotated[bool, typer.Option("--saves", help="Also write chunk states and the factors w, u and A.")] = False,
    processors: Annotated[
        int | None, typer.Option(help="Multiprocessors, compute units or cores. Default: the target's usual device.")
    ] = None,
) -> None:
    """Show how a call of these shapes runs: launches, segments, bytes, FLOPs, predicted times, and the reason.

    Predicted times come from measured ones, and only there are any.
    """
    from qla.codegen.explain import Explanation
    from qla.codegen.planner import CallShape, plan_call

    if target not in TARGETS:
        raise UnsupportedError("--target", target, ", ".join(TARGETS))
    sizes = (dk, dv, batch, tokens, heads, value_heads or heads, sequences)
    shape = CallShape(op, cast(Dtype, dtype), *sizes, cast(Loads, loads), saves)
    available = TARGETS[target].processors if processors is None else processors
    explanation = Explanation(plan_call(shape, target, available))
    console = wide_console()
    call, chains, reason = explanation.notes()
    console.print(f"{escape(call)}\n{escape(chains)}", highlight=False, soft_wrap=True)
    (first, *rest), *rows = explanation.table()
    table = Table()
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(escape(reason), highlight=False, soft_wrap=True)


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="Where to run: auto (a GPU if one can be used), host, cuda.")] = "auto",
    tokens: Annotated[int | None, typer.Option(help="Default: 1024 on host, 8192 on a GPU.", min=1)] = None,
    targets: _Targets = "",
) -> None:
    """Compile every op for all targets, run it here on a real shape and compare it with the recurrence in float64.

    The shape is that of a linear attention layer of Qwen3.5-35B. Exits with 1 if a kernel does not compile, spills or
    uses scratch memory, or if a result is further from the recurrence than it may be.
    """
    from qla.codegen import demo as show
    from qla.codegen.builds import build_all

    wanted = _parse_targets(targets)
    place, why_not = show.pick_device(device)
    length = tokens or show.TOKENS[place]
    console = wide_console()
    if why_not:
        console.print(f"runs on the CPU, not on the GPU: {escape(why_not)}", soft_wrap=True, highlight=False)
    builds, outcomes, specs = [], [], show.specs(wanted)
    with progress() as bar:
        task = bar.add_task("compile", total=len(specs))
        # One at a time: the times are shown.
        for build in build_all(specs):
            builds.append(build)
            bar.update(task, advance=1, description=f"compile {build.spec.op} for {build.spec.target}")
    console.print(show.build_table(builds))
    runnable = [op for op in OPS if show.public_function(op)]
    for op in OPS:
        if op not in runnable:
            console.print(f"{op} has no public function qla.chunk_{op}: compiled, not run")
    with progress() as bar:
        for op in runnable:
            task = bar.add_task(f"run {op}, then the float64 recurrence", total=length)
            arguments = show.inputs(op, length, place)

            def advance(n: int, task: Any = task, bar: Progress = bar) -> None:
                bar.advance(task, n)

            outcomes.append(show.run_op(op, arguments, place, advance))
    console.print(show.outcome_table(outcomes, place, length))
    missed = sum(bool(b.problems) for b in builds) + sum(not o.passed for o in outcomes)
    _list_problems(console, builds)
    if missed:
        console.print(f"[bold red]{missed} of {len(builds) + len(outcomes)} checks missed[/]")
        raise typer.Exit(1)
    console.print(f"all {len(builds) + len(outcomes)} checks passed")


@app.command("compile")
def compile_(
    targets: _Targets = "",
    full: Annotated[
        bool, typer.Option("--full/--pairwise", help="Every supported kernel, or a set with every pair of choices.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Kernels at a time. Default: one per core.", min=1)] = None,
) -> None:
    """Compile the kernels of the targets and check them; nothing is kept.

    Exits with 1 if a kernel does not compile, spills registers, uses scratch memory or has serialized wgmma.
    """
    from qla.codegen import matrix
    from qla.codegen.builds import build_all

    choose = matrix.full if full else matrix.pairwise
    specs = {name: choose(name) for name in _parse_targets(targets)}
    at_once = jobs or os.cpu_count() or 1
    table = Table(title=f"{'All supported kernels' if full else 'Pairwise set'}, {at_once} at a time")
    table.add_column("target")
    for column in _SUMMARY:
        table.add_column(column, justify="right")
    everything: list[Build] = []
    began = time.perf_counter()
    with progress() as bar:
        task = bar.add_task("compile", total=sum(map(len, specs.values())))
        for name, kernels in specs.items():
            start, builds = time.perf_counter(), []
            for build in build_all(kernels, at_once):
                builds.append(build)
                bar.update(task, advance=1, description=f"compile for {name}")
            table.add_row(*_summary(name, builds, time.perf_counter() - start))
            everything += builds
    console = wide_console()
    console.print(table)
    _list_problems(console, everything)
    unfit = sum(bool(build.problems) for build in everything)
    seconds = time.perf_counter() - began
    console.print(f"{len(everything)} kernels compiled in {seconds:.0f} s, {unfit} unfit")
    if unfit:
        raise typer.Exit(1)


def _summary(target: str, builds: Sequence[Build], seconds: float) -> list[str]:
    used = [build.resources for build in builds if build.resources]
    numbers = [
        max((u.registers for u in used), default=0),
        max((b.shared_bytes for b in builds), default=0),
        sum(u.spill_bytes > 0 for u in used),
        sum(u.scratch_bytes > 0 for u in used),
        sum(u.injected_waits > 0 for u in used),
    ]
    slowest = max((build.seconds for build in builds), default=0.0)
    counted = ["-"] * len(numbers) if TARGETS[target].language == "c++" else [str(n) for n in numbers]
    unfit = sum(bool(build.problems) for build in builds)
    return [target, str(len(builds)), f"{seconds:.1f} s", f"{slowest:.2f} s", *counted, str(unfit)]


@app.command()
def doctor() -> None:
    """Show which torch, HIP, hiprtc, CuPy, NVRTC and clang are found here, and how to get what is not.

    Exits with 0 whatever is missing: nobody needs all of it.
    """
    from qla.codegen.doctor import examine

    console = wide_console()
    table = Table()
    for column in ("part", "version", "for", "where, or how to get it"):
        table.add_column(column, overflow="fold")
    for part in examine():
        last = "\n".join(filter(None, (part.where, part.advice)))
        table.add_row(part.name, part.version or "[yellow]not found[/]", part.purpose, escape(last))
    console.print(table)


@app.command()
def lines() -> None:
    """Count what the ops share in the kernel templates, and the lines of each target's own files.

    A line counts for the ops for which it renders to some text. Blank lines and comments are left out; a tag over
    several lines counts once.
    """
    from qla.codegen.lines import KERNELS, file_lines, kernel_use

    console = wide_console()
    uses = {kernel: kernel_use(kernel) for kernel in KERNELS}
    console.print(_use_table(uses))
    console.print(_partial_table(uses))
    for folder, title in (("tile", "verbs (templates/tile)"), ("targets", "facts and schedules (targets)")):
        table = Table()
        table.add_column(title)
        table.add_column("lines", justify="right")
        for name, count in file_lines(folder).items():
            table.add_row(name, str(count))
        console.print(table)


def _use_table(uses: dict[str, Use]) -> Table:
    table = Table(title="templates/kernels: lines")
    table.add_column("")
    for kernel in uses:
        table.add_column(kernel, justify="right")
    rows = [
        ("all ops, same text", [u.shared for u in uses.values()]),
        ("all ops, text depends on the op", [u.varied for u in uses.values()]),
        ("some ops only", [sum(u.partial.values()) for u in uses.values()]),
        ("with saves only", [u.saves for u in uses.values()]),
        ("conditions, loops, imports", [u.control for u in uses.values()]),
        ("in all", [u.total for u in uses.values()]),
    ]
    for name, counts in rows:
        table.add_row(name, *map(str, counts))
    table.add_section()
    for op in OPS:
        own = [f"{u.shared + u.varied} + {u.of(op)} ({u.partial.get((op,), 0)} its own)" for u in uses.values()]
        table.add_row(f"{op}: shared + other", *own)
    return table


def _partial_table(uses: dict[str, Use]) -> Table:
    table = Table(title="templates/kernels: lines for some ops only")
    table.add_column("ops")
    for kernel in uses:
        table.add_column(kernel, justify="right")
    for group in sorted({ops for use in uses.values() for ops in use.partial}, key=lambda ops: (-len(ops), ops)):
        table.add_row(", ".join(group), *(str(use.partial.get(group, 0)) for use in uses.values()))
    return table


def _parse_targets(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or list(TARGETS)
    for name in names:
        if name not in TARGETS:
            raise UnsupportedError("--targets", name, ", ".join(TARGETS))
    return list(dict.fromkeys(names))


def _list_problems(console: Console, builds: Sequence[Build]) -> None:
    for build in builds:
        for problem in build.problems:
            console.print(f"[red]{build.spec.name} for {build.spec.target}:[/] {escape(problem)}", soft_wrap=True)


# After the others, so that `--help` lists them last.
app.command()(report)
app.command()(lock)
