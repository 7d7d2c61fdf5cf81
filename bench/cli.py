"""`qla-bench`: measure the published workloads and report what came out.

Exit codes: 0 all is well; 1 a case failed or its result is wrong; 2 the request cannot be carried out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qla.bench.workloads import Case, load, select

if TYPE_CHECKING:
    from qla.bench.machine import Machine
    from qla.bench.runner import Row, Runner

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None)

_Op = Annotated[str, typer.Option("--op", help="Ops, comma-separated; wildcards allowed, e.g. GDNFwd,KDA*.")]
_Seed = Annotated[str, typer.Option("--seed", help="Lists: 000 and 001 (published), h200 (peers measured there).")]
_Name = Annotated[str, typer.Option("--name", help="Parts of workload names, or patterns such as tp8-*.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16.")]


def main() -> None:
    """Entry point of the command."""
    app()


def _fail(message: str) -> typer.Exit:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    return typer.Exit(2)


def _selected(op: str, seed: str, name: str, dtype: str) -> list[Case]:
    cases = select(load(), op=op, seed=seed, name=name, dtype=dtype)
    if not cases:
        raise _fail("no workload fits these filters; `qla-bench list` shows all")
    return cases


@app.command("list")
def list_(op: _Op = "", seed: _Seed = "", name: _Name = "", dtype: _Dtype = "") -> None:
    """Show workloads: list, op, name, dtype, shapes of q and v, sequences, and the best time of others."""
    for case in _selected(op, seed, name, dtype):
        q, v = (list(case.shapes[x]) for x in ("q", "v"))
        packed = f"{len(case.lengths)} packed" if case.lengths else ""
        peer = f"{case.best_peer[1]:.4g} ms {case.best_peer[0]}" if case.best_peer else ""
        state = "" if case.traits else "not supported yet"
        typer.echo("\t".join((case.name.replace(" ", "\t", 2), f"q {q} v {v}", packed, peer, state)))


@app.command()
def run(
    op: _Op = "",
    seed: _Seed = "",
    name: _Name = "",
    dtype: _Dtype = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Rows are appended to it.")] = Path("bench.jsonl"),
    budget: Annotated[
        float, typer.Option(help="Seconds after which no further case begins; run again to go on.", show_default=False)
    ] = math.inf,
    reps: Annotated[int, typer.Option(help="Repetitions of each case.", min=1)] = 10,
    device: Annotated[str, typer.Option(help="cuda or cpu. Default: cuda where there is a GPU.")] = "",
    retry: Annotated[bool, typer.Option("--retry", help="Measure cases again whose row is an error.")] = False,
) -> None:
    """Measure workloads, and append a row per case to a JSONL file.

    Cases that have a row there already, of this device and this code, are skipped. On a CPU the host target runs on
    reduced shapes: at most 256 tokens, 4 value heads (but one group), 2 rows and 8 packed sequences.
    """
    began = time.monotonic()
    # Imported here: torch takes its time, and help needs none of it.
    import torch

    from qla.bench.machine import describe
    from qla.bench.runner import Runner, pending, read_rows
    from qla.bench.timing import TimerError, timer_for
    from qla.errors import QlaError

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise _fail(f"device {device!r}: cuda (where torch sees a GPU) or cpu")
    cases = _selected(op, seed, name, dtype)
    try:
        machine = describe(device)
        timer = timer_for(device, reps)
    except (QlaError, TimerError) as error:
        raise _fail(str(error)) from None
    todo = pending(cases, machine, read_rows(output), retry)
    runner = Runner(machine, timer, output)
    bad, finished = _follow(runner, todo, machine, budget - (time.monotonic() - began))
    done = f"{finished} cases done, {len(cases) - len(todo)} were there already"
    typer.echo(f"{done}, {len(todo) - finished} left, {bad} failed or wrong: {output}")
    if runner.lost:
        raise _fail("the device does not answer any more; run again to go on with the next case")
    raise typer.Exit(1 if bad else 0)


def _follow(runner: Runner, todo: Sequence[Case], machine: Machine, budget: float) -> tuple[int, int]:
    """Run with a progress bar; returns how many failed, and how many were done."""
    bad = 0
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    console.print(f"{machine.device} ({machine.target}), {runner.timer.description}", highlight=False)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=len(todo))

        def done(case: Case, row: Row) -> None:
            nonlocal bad
            progress.update(task, advance=1, description=f"{case.op} {case.workload}"[:48].ljust(48))
            wrong = row.get("accurate") is False
            if row["status"] == "error" or wrong:
                bad += 1
                why = row["reason"] if row["status"] == "error" else f"relative error above {row['error_bar']}"
                progress.console.print(f"[red]{escape(case.name)}[/]: {escape(why)}", soft_wrap=True)

        finished = runner.run(todo, budget, done)
    return bad, finished


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="JSONL file that `run` wrote.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Markdown file. Default: standard output.")] = "",
) -> None:
    """Write the report: a table per op with the published columns, and geometric means."""
    from qla.bench.report import markdown
    from qla.bench.runner import read_rows

    if not results.is_file():
        raise _fail(f"no such file: {results}")
    text = markdown(read_rows(results))
    if output:
        Path(output).write_text(text + "\n", encoding="utf-8")
    else:
        typer.echo(text)
