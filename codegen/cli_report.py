"""The commands `report` and `lock`: what kernels are compiled to, and what that means for their time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from qla.codegen.console import number_table, progress, wide_console
from qla.codegen.ops import OPS
from qla.codegen.spec import HEAD_DIMS, Dtype
from qla.errors import UnsupportedError
from qla.targets.chips import CHIPS

if TYPE_CHECKING:
    from qla.codegen.report import Kernel, Report

# The long sequence and the full chip of docs/performance.md.
_SHAPES = ((1, 32768), (16, 8192))


def report(
    target: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(CHIPS)}. Default: all.")] = "",
    op: Annotated[str, typer.Option(help=f"One of: {', '.join(OPS)}.")] = "gated_delta_rule",
    tokens: Annotated[int, typer.Option(help="T, of each row. Default: 1 x 32768 and 16 x 8192.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows, with --tokens.")] = 1,
    heads: Annotated[int, typer.Option(help="Of q and k.")] = 16,
    value_heads: Annotated[int, typer.Option(help="Of v, a multiple of heads.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of q, k, v and o: bf16, fp16.")] = "bf16",
    dk: Annotated[int, typer.Option(help=f"Head dim of q and k, one of {HEAD_DIMS}.")] = 128,
    dv: Annotated[int, typer.Option(help=f"Head dim of v, one of {HEAD_DIMS}.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Count what a chunk takes in the kernels' machine code, and predict times on the targets' chips.

    Per kernel: registers, memory, occupancy, instructions of a chunk by kind, the cycles they take of each part of a
    processor, which of them is the bound; per call: time, beside what its tensors take at the peak bandwidth and its
    operations at the peak of matrix products. Nothing is run: the model is that of codegen/model.py, with the makers'
    figures in targets/chips.py. Where times were measured, they stand beside it.
    """
    from qla.codegen.planner import CallShape
    from qla.codegen.report import reports

    shapes = [
        CallShape(op, cast(Dtype, dtype), dk, dv, rows, length, heads, value_heads)
        for rows, length in (((batch, tokens),) if tokens else _SHAPES)
    ]
    found = {name: reports(shapes, name) for name in _targets(target)}
    if as_json:
        calls = [entry | _shape(x) for entries in found.values() for x in entries for entry in [x.as_json()]]
        typer.echo(json.dumps(calls, indent=2))
        return
    console = wide_console()
    first = [entries[0] for entries in found.values()]
    console.print(f"{op}, {dtype}, K = {dk}, V = {dv}; instructions and cycles of one chunk", highlight=False)
    _print_resources(console, first)
    _print_counts(console, first)
    _print_cycles(console, first)
    _print_calls(console, [x for entries in found.values() for x in entries])
    _print_checks(console, first)


def _shape(found: Report) -> dict[str, Any]:
    s = found.shape
    names = ("op", "dtype", "dk", "dv", "batch", "tokens", "heads", "value_heads")
    return {name: getattr(s, name) for name in names}


def _targets(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or list(CHIPS)
    for name in names:
        if name not in CHIPS:
            raise UnsupportedError("target", name, ", ".join(CHIPS))
    return list(dict.fromkeys(names))


def _rows(found: list[Report]) -> list[tuple[str, Kernel]]:
    return [(f"{x.chip.target} {kernel.stage}", kernel) for x in found for kernel in x.kernels]


def _print_resources(console: Console, found: list[Report]) -> None:
    columns = ("registers", "of these AGPR", "SGPR", "shared or LDS", "scratch", "spill", "waves/SIMD", "workgroups/CU")
    table = number_table("Resources", "kernel", columns)
    for name, kernel in _rows(found):
        m, used = kernel.measured, kernel.measured.resources
        amd = (used.accumulators, used.scalars) if m.source.language == "hip" else ("-", "-")
        fits = (m.occupancy.waves, m.occupancy.workgroups)
        cells = (used.registers, *amd, m.shared_bytes, used.scratch_bytes, used.spill_bytes, *fits)
        table.add_row(name, *map(str, cells))
    console.print(table)


def _print_counts(console: Console, found: list[Report]) -> None:
    from qla.codegen.instruction_costs import KINDS

    table = number_table("Instructions of one wave", "kernel", ("unit", *KINDS, "in all", "loops of unknown length"))
    for name, kernel in _rows(found):
        m = kernel.measured
        counts = [m.kinds[kind] / m.chunks for kind in KINDS]
        cells = [f"{count:.0f}" for count in (*counts, sum(counts))]
        table.add_row(name, kernel.unit, *cells, str(m.count.open_loops))
    console.print(table)


def _print_cycles(console: Console, found: list[Report]) -> None:
    parts = ("matrix", "vector", "issue", "LDS", "L1", "memory")
    table = number_table(
        "Cycles of a processor for one workgroup",
        "kernel",
        (*parts, "floor", "sum", "µs", "bound", "workgroups together"),
    )
    for name, kernel in _rows(found):
        time = kernel.time
        given = {**time.parts, "LDS": time.parts.get("LDS", time.parts.get("shared", 0.0))}
        cells = [f"{value:.0f}" for value in (*(given[part] for part in parts), time.floor, time.sum)]
        table.add_row(name, *cells, f"{time.us:.2f}", time.bound, str(kernel.together))
    console.print(table)


def _print_calls(console: Console, found: list[Report]) -> None:
    columns = (
        "rows x tokens",
        "heads",
        "prepare µs",
        "scan µs",
        "call µs",
        "bandwidth floor µs",
        "matrix floor µs",
        "call / floor",
    )
    table = number_table("Predicted times of calls", "chip", columns)
    for x in found:
        s, floor = x.shape, max(x.bandwidth_floor, x.matrix_floor)
        times = [kernel.us for kernel in x.kernels] + [x.us, x.bandwidth_floor, x.matrix_floor]
        call = (f"{s.batch} x {s.tokens}", f"{s.heads}/{s.value_heads}")
        table.add_row(f"{x.chip.name}, {x.chip.processors}", *call, *(f"{t:.0f}" for t in times), f"{x.us / floor:.1f}")
    console.print(table)


def _print_checks(console: Console, found: list[Report]) -> None:
    checks = [(x.chip.name, check) for x in found for check in x.checks()]
    if not checks:
        return
    table = number_table(
        "The model against measured times, per chunk", "what", ("predicted µs", "measured µs", "error")
    )
    for chip, check in checks:
        table.add_row(f"{chip}: {check.what}", f"{check.predicted:.2f}", f"{check.measured:.2f}", f"{check.error:+.0%}")
    console.print(table)


def lock(
    path: Annotated[Path | None, typer.Argument(help="Of the lock file. Default: that of the repository.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; show what differs and exit with 1.")] = False,
    target: Annotated[str, typer.Option(help="Comma-separated; lines of others stay as they are. Default: all.")] = "",
) -> None:
    """Write down what kernels are compiled to, one line each: registers, memory, occupancy, instructions of a chunk.

    The kernels are the set with every pair of choices. Run it from the repository's root, and commit the file. Numbers
    of another compiler are written, with its version, but never compared.
    """
    from qla.codegen import lock as locks
    from qla.codegen.matrix import pairwise
    from qla.codegen.measure import measure

    where = path or locks.PATH
    if not where.exists() and (check or path is None):
        raise UnsupportedError("lock file", str(where), "one that exists; run this in the root of the repository")
    kept = locks.read(where.read_text(encoding="utf-8")) if where.exists() else locks.Lock()
    names = _targets(target)
    specs = [spec for name in names for spec in pairwise(name)]
    found, unfit = locks.Lock(), []
    with progress() as bar, ThreadPoolExecutor(2) as pool:
        task = bar.add_task("compile", total=len(specs))
        for measured in pool.map(measure, specs):
            found.add(measured)
            unfit += [f"{measured.spec.target} {measured.spec.name}: {why}" for why in measured.resources.problems]
            bar.update(task, advance=1)
    console = wide_console()
    for line in (*locks.other_compilers(kept, found), *locks.differences(kept, found)):
        console.print(escape(line), soft_wrap=True, highlight=False)
    for line in unfit:
        console.print(f"[red]{escape(line)}[/]", soft_wrap=True, highlight=False)
    if not check:
        others = kept.of(set(kept.compilers) - set(names))
        merged = locks.Lock(others.compilers | found.compilers, others.kernels | found.kernels)
        where.write_text(merged.text(), encoding="utf-8")
        console.print(f"{len(found.kernels)} kernels written to {escape(str(where))}", soft_wrap=True, highlight=False)
    stale = locks.differences(kept, found) if check else []
    if check and not stale:
        console.print(f"{escape(str(where))} is up to date", soft_wrap=True, highlight=False)
    if stale or unfit:
        raise typer.Exit(1)
