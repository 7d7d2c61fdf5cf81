"""`qla-bench`: measure the published workloads, beside other libraries and between versions, and report what came out.

Exit codes: 0 all is well; 1 a case of ours failed, its result is wrong, or a version is slower; 2 the request cannot be
carried out.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qla.bench.workloads import Case, load, select

if TYPE_CHECKING:
    from qla.bench.compare import Comparer, Line

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None)

_Op = Annotated[str, typer.Option("--op", help="Ops, comma-separated; wildcards allowed, e.g. GDNFwd,KDA*.")]
_Seed = Annotated[str, typer.Option("--seed", help="Lists: 000 and 001 (published), h200 (peers measured there).")]
_Name = Annotated[str, typer.Option("--name", help="Parts of workload names, or patterns such as tp8-*.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16.")]
_Device = Annotated[str, typer.Option("--device", help="cuda or cpu. Default: cuda where there is a GPU.")]
_Budget = Annotated[
    float, typer.Option(help="Seconds after which nothing new begins; run again to go on.", show_default=False)
]
_Patience = Annotated[float, typer.Option(help="Seconds after which a case that gives no answer is given up.")]


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


def _spread(cases: list[Case], count: int) -> list[Case]:
    """So many of the cases, at even distances; all where there are no more, or count is 0."""
    if not 0 < count < len(cases):
        return cases
    return [cases[len(cases) * n // count] for n in range(count)]


def _device(device: str) -> str:
    # Imported here, as everything that needs torch: it takes its time, and help needs none of it.
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu") or (device == "cuda" and not torch.cuda.is_available()):
        raise _fail(f"device {device!r}: cuda (where torch sees a GPU) or cpu")
    return device


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _write(text: str, output: str) -> None:
    if output:
        Path(output).write_text(text + "\n", encoding="utf-8")
    else:
        typer.echo(text)


@app.command("list")
def list_(op: _Op = "", seed: _Seed = "", name: _Name = "", dtype: _Dtype = "") -> None:
    """Show workloads: list, op, name, dtype, shapes of q and v, sequences, and the best time of others."""
    for case in _selected(op, seed, name, dtype):
        q, v = (list(case.shapes[x]) for x in ("q", "v"))
        packed = f"{len(case.lengths)} packed" if case.lengths else ""
        peer = f"{case.best_peer[1]:.4g} ms {case.best_peer[0]}" if case.best_peer else ""
        state = "" if case.traits else "not supported yet"
        typer.echo("\t".join((case.name.replace(" ", "\t", 2), f"q {q} v {v}", packed, peer, state)))


# run ------------------------------------------------------------------------------------------------------------------


def _folders(given: Sequence[str]) -> dict[str, list[str]]:
    """What each peer is imported from: options ``NAME=FOLDER[:FOLDER...]`` and variables QLA_PEER_PATH_NAME."""
    from qla.bench.peers import PEERS

    found = {}
    for name in PEERS:
        value = os.environ.get(f"QLA_PEER_PATH_{name.upper().replace('.', '_')}")
        if value:
            found[name] = value.split(os.pathsep)
    for option in given:
        name, equals, value = option.partition("=")
        if name not in PEERS or not equals:
            raise _fail(f"--peer-path {option!r}: NAME=FOLDER with a name of {', '.join(PEERS)}")
        found.setdefault(name, []).extend(value.split(os.pathsep))
    missing = [folder for folders in found.values() for folder in folders if not Path(folder).is_dir()]
    if missing:
        raise _fail(f"no such folder: {', '.join(missing)}")
    return {name: [part for folder in folders for part in _parts(Path(folder))] for name, folders in found.items()}


_SITE = """
import site, sys
old = set(sys.path)
site.addsitedir(sys.argv[1])
print(*(each for each in sys.path if each not in old), sep="\\n")
"""


def _parts(folder: Path) -> list[str]:
    """A folder and what its .pth files add to the path, as if the wheels that are unpacked there were installed.

    Lines of these files may be code, which is run in a process of its own.
    """
    own = str(folder.resolve())
    if not any(folder.glob("*.pth")):
        return [own]
    variables = {**os.environ, "PYTHONPATH": own}
    done = subprocess.run([sys.executable, "-c", _SITE, own], env=variables, capture_output=True, text=True, timeout=60)
    return [own, *(line for line in done.stdout.splitlines() if line and line != own)]


@app.command()
def run(
    op: _Op = "",
    seed: _Seed = "",
    name: _Name = "",
    dtype: _Dtype = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Rows are appended to it.")] = Path("bench.jsonl"),
    peers: Annotated[
        str,
        typer.Option(help="Comma-separated: qla, fla, flashinfer, flashqla, flashkda, torch, torch.compile; or all."),
    ] = "qla",
    peer_path: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER[:FOLDER...] that a peer is imported from; or QLA_PEER_PATH_NAME. Repeatable."),
    ] = None,
    budget: _Budget = math.inf,
    reps: Annotated[int, typer.Option(help="Repetitions of each case.", min=1)] = 10,
    patience: _Patience = 300.0,
    device: _Device = "",
    retry: Annotated[bool, typer.Option("--retry", help="Measure cases again whose row is an error.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes of a peer that compile before it is measured.", min=1)] = 1,
) -> None:
    """Measure workloads, and append a row per case and peer to a JSONL file.

    Each peer runs in a process of its own. Rows that are there already (of this device, and this code or version of a
    peer) are not measured again. On a CPU the host target runs on reduced shapes: at most 256 tokens, 4 value heads
    (but one group), 2 rows and 8 packed sequences. Peers are not asked for the ops that qla cannot run. Our kernels are
    compiled by all cores first; `--jobs` has a peer compile before, too, as far as it keeps what it compiles on disk.
    """
    from qla.bench.peers import OURS, PEERS
    from qla.bench.runner import Runner

    names = list(PEERS) if peers == "all" else [peer.strip() for peer in peers.split(",") if peer.strip()]
    unknown = [peer for peer in names if peer not in PEERS]
    if unknown or not names:
        raise _fail(f"--peers {peers!r}: {', '.join(PEERS)}, or all")
    cases = _selected(op, seed, name, dtype)
    runner = Runner(output, _device(device), reps, budget, patience, _folders(peer_path or []), retry, jobs)
    bad = ours = finished = left = 0
    with _bar() as progress:
        for peer in names:
            counts = _measure(runner, peer, cases, progress)
            bad, finished, left = bad + counts[0], finished + counts[1], left + counts[2]
            ours += counts[0] if peer == OURS else 0
    typer.echo(f"{finished} cases done, {left} left, {bad} failed or wrong: {output}")
    raise typer.Exit(1 if ours else 0)


def _measure(runner: Any, peer: str, cases: Sequence[Case], progress: Progress) -> tuple[int, int, int]:
    """Run one peer below a progress bar: how many failed, were done, and are left."""
    bad = finished = 0
    task = progress.add_task(peer, total=None)

    def begin(hello: Mapping[str, Any], todo: int) -> None:
        if hello["status"] != "ok":
            progress.console.print(f"{peer}: not available: {escape(hello['reason'])}", soft_wrap=True, highlight=False)
        else:
            machine = hello["machine"]
            what = f"{peer} {hello['version']} on {machine['device']} ({machine['target']}), {hello['timer']}"
            progress.console.print(what, soft_wrap=True, highlight=False)
        progress.update(task, total=todo)

    def done(case: Case, row: Mapping[str, Any]) -> None:
        nonlocal bad, finished
        finished += 1
        progress.update(task, advance=1, description=f"{peer} {case.op} {case.workload}"[:48].ljust(48))
        if row["status"] == "error" or row.get("accurate") is False:
            bad += 1
            why = row["reason"] if row["status"] == "error" else f"relative error above {row['error_bar']}"
            progress.console.print(f"[red]{peer}: {escape(case.name)}[/]: {escape(why)}", soft_wrap=True)

    left = runner.run(peer, cases, begin, done)
    return bad, finished, left


# report ---------------------------------------------------------------------------------------------------------------


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="JSONL files that `run` wrote.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Markdown file. Default: standard output.")] = "",
    html: Annotated[str, typer.Option(help="Also write one self-contained HTML page, with plots.")] = "",
) -> None:
    """Write the report: tables with the published columns, geometric means per op, and plots in the HTML page."""
    from qla.bench import report as tables
    from qla.bench.runner import read_rows

    missing = [str(path) for path in results if not path.is_file()]
    if missing:
        raise _fail(f"no such file: {', '.join(missing)}")
    rows = [row for path in results for row in read_rows(path)]
    if html:
        try:
            from qla.bench.page import html as page
        except ModuleNotFoundError as error:
            raise _fail(f"the plots need {error.name}: in a clone, pip install '.[bench]'") from None
        Path(html).write_text(page(rows), encoding="utf-8")
    if output or not html:
        _write(tables.results(rows), output)


# sweep ----------------------------------------------------------------------------------------------------------------


@app.command()
def sweep(
    op: _Op = "",
    seed: _Seed = "",
    name: _Name = "",
    dtype: _Dtype = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File, continued if there: sweep.jsonl, or sweep.json.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="The 12 workloads that costs are not fitted to.")
    ] = False,
    update: Annotated[bool, typer.Option("--update", help="Fit the planner's costs, and go by them.")] = False,
    tunings: Annotated[bool, typer.Option("--tunings", help="The target's tunings, not splits of sequences.")] = False,
    costs: Annotated[str, typer.Option(help="File that --update writes. Default: the target's own.")] = "",
    budget: _Budget = math.inf,
    reps: Annotated[int, typer.Option(help="Repetitions of each choice.", min=1)] = 10,
    patience: _Patience = 120.0,
    device: _Device = "",
) -> None:
    """Measure the ways to split sequences into segments, against the one that the runtime takes by itself.

    Without a choice of workloads, 12 that span the regimes. --update fits the costs that the planner goes by to the
    times of all stages, and writes them to targets/tuned. With --tunings, every legal tuning of the target's kernels is
    measured instead, each in a process of its own with an empty cache.
    """
    from qla.bench.isolate import WorkerError
    from qla.bench.split_sweep import SplitSweep, listed

    if tunings:
        if update or held_out:
            raise _fail("--update and --held-out are for splits, not for --tunings")
        cases = [case for case in _selected(op, seed, name, dtype) if case.traits]
        _sweep_tunings(cases, output or Path("sweep.json"), _device(device), reps, patience, budget)
        return
    if op or seed or name or dtype:
        cases = [case for case in _selected(op, seed, name, dtype) if case.traits]
    else:
        cases = listed("held-out" if held_out else "swept")
    if not cases:
        raise _fail("none of these workloads can be run yet")
    path = output or Path("sweep.jsonl")
    try:
        with SplitSweep(path, _device(device), reps, patience, budget) as job, _bar() as progress:
            todo = job.todo(cases)
            task = progress.add_task("workloads", total=len(todo))
            left = job.run(todo, lambda case: progress.update(task, advance=1))
            if update:
                chosen = {case.name for case in cases}
                _tune([row for row in job.rows if row["call"] in chosen], costs)
            rows, ratios = job.table(cases)
    except WorkerError as error:
        raise _fail(str(error)) from None
    typer.echo("\t".join(("workload", "choices", "auto (ms)", "auto", "best (ms)", "best", "auto over best")))
    for row in rows:
        typer.echo("\t".join(row))
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        typer.echo(f"auto over best: {max(ratios):.3f} at most, geometric mean {mean:.3f}, {len(ratios)} workloads")
    typer.echo(f"{len(todo) - left} measured, {left} left: {path}")


def _tune(
    rows: Sequence[Mapping[str, Any]], path: str, others: Sequence[Mapping[str, Any]] = (), plain: bool = False
) -> None:
    """Fit costs to rows, write them and have this process go by them; says what they do for other rows, too."""
    from dataclasses import replace

    from qla.bench.fit import regrets
    from qla.bench.split_sweep import samples_of, tune, tuned_path, write_tuned
    from qla.targets import TARGETS

    try:
        target, costs, regret = tune(rows, plain)
    except ValueError as error:
        raise _fail(str(error)) from None
    where = Path(path) if path else tuned_path(target)
    write_tuned(where, costs, rows)
    TARGETS[target] = replace(TARGETS[target], costs=costs)
    for what, lost in ((str(where), regret), ("others", regrets(samples_of(others)) if others else {})):
        if lost:
            worst = max(lost, key=lambda call: lost[call])
            typer.echo(f"{what}: choices up to {100 * lost[worst]:.1f} % from the best measured ({worst})")


@app.command()
def tune(
    results: Annotated[list[Path], typer.Argument(help="JSONL files that `sweep` wrote, of one device.")],
    costs: Annotated[str, typer.Option(help="File to write. Default: the target's own.")] = "",
    check: Annotated[list[Path] | None, typer.Option(help="More of them, not fitted to. Repeatable.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Only predict well, whatever choices follow.")] = False,
) -> None:
    """Fit the planner's costs to what `sweep` measured before, here or elsewhere.

    Says how far the choices that follow are from the best ones that were measured, also for the workloads in --check.
    """
    from qla.bench.runner import read_rows

    missing = [str(path) for path in (*results, *(check or [])) if not path.is_file()]
    if missing:
        raise _fail(f"no such file: {', '.join(missing)}")
    rows, others = ([row for path in paths for row in read_rows(path)] for paths in (results, check or []))
    _tune(rows, costs, others, plain)


def _sweep_tunings(cases: Sequence[Case], output: Path, device: str, reps: int, patience: float, budget: float) -> None:
    from qla.bench.isolate import WorkerError
    from qla.bench.sweep import Sweep

    if not cases:
        raise _fail("none of these workloads can be run yet")
    try:
        job = Sweep(output, device, reps, patience, budget)
    except WorkerError as error:
        raise _fail(str(error)) from None
    pairs = job.todo(cases)
    with _bar() as progress:
        task = progress.add_task("tunings", total=len(pairs))
        left = job.run(pairs, lambda result: progress.update(task, advance=1))
    typer.echo("\t".join(("workload", "tuning", "ms", "auto over it", "error", "note")))
    for row in job.table():
        typer.echo("\t".join(row))
    typer.echo(f"{len(pairs) - left} measured, {left} left: {output}")


# compare --------------------------------------------------------------------------------------------------------------


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="Git ref, checkout, folder or Python with qla, or results file (.jsonl).")],
    b: Annotated[str, typer.Argument(help="The same, of what may be slower.")],
    op: _Op = "",
    seed: _Seed = "",
    name: _Name = "",
    dtype: _Dtype = "",
    output: Annotated[str, typer.Option("--output", "-o", help="Markdown file. Default: standard output.")] = "",
    samples: Annotated[str, typer.Option(help="JSONL file of all measurements, continued if it is there.")] = "",
    margin: Annotated[float, typer.Option(help="Relative change that matters.", min=0.001)] = 0.03,
    rounds: Annotated[int, typer.Option(help="Rounds of fresh processes; a rerun has as many again.", min=2)] = 5,
    blocks: Annotated[int, typer.Option(help="Turns of each process in a round.", min=1)] = 5,
    reps: Annotated[int, typer.Option(help="Repetitions in a turn, on a GPU.", min=1)] = 10,
    cases: Annotated[int, typer.Option(help="At most so many workloads, spread over those chosen.", min=0)] = 0,
    plant: Annotated[float, typer.Option(help="Make calls of B longer by so many percent, to see it found.")] = 0.0,
    budget: _Budget = math.inf,
    patience: _Patience = 300.0,
    device: _Device = "",
) -> None:
    """Say whether B is slower than A, case by case: FAST, SLOW, SAME or AMBIGUOUS.

    Of two versions, each round starts fresh processes for A, A again (the control) and B, which take turns; what is not
    SAME is measured once more, and only what is SLOW or FAST there too is called so. Of two results files, the times of
    all repetitions are compared, without a control. SLOW anywhere exits with 1, as does a case that only B cannot run.
    """
    if a.endswith(".jsonl") != b.endswith(".jsonl"):
        raise _fail("compare two results files, or two versions")
    if a.endswith(".jsonl"):
        raise typer.Exit(_compare_files(Path(a), Path(b), margin, output, _filter(op, seed, name, dtype)))
    from qla.bench.compare import Comparer, distinct
    from qla.bench.subjects import SubjectError, prepared

    device = _device(device)
    chosen = [case for case in _selected(op, seed, name, dtype) if case.traits]
    chosen = distinct(chosen) if device == "cpu" else chosen
    if not chosen:
        raise _fail("none of these workloads can be run yet")
    chosen = _spread(chosen, cases)
    slowdown = 1 + plant / 100
    try:
        with prepared(a) as first, prepared(b) as second:
            path = Path(samples) if samples else None
            with Comparer(first, second, device, path, blocks, reps, patience, budget, slowdown) as comparer:
                code = _compare_versions(comparer, chosen, margin, rounds, output)
    except SubjectError as error:
        raise _fail(str(error)) from None
    raise typer.Exit(code)


def _filter(op: str, seed: str, name: str, dtype: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a row is of one of the selected workloads."""
    chosen = {case.name for case in _selected(op, seed, name, dtype)}
    return lambda row: "op" in row and " ".join(row[x] for x in ("seed", "op", "workload", "dtype")) in chosen


def _slow(parts: Mapping[str, Sequence[Line]]) -> bool:
    from qla.bench.verdict import Verdict

    return any(line.verdict is Verdict.SLOW for found in parts.values() for line in found)


def _compare_files(a: Path, b: Path, margin: float, output: str, wanted: Callable[[Mapping[str, Any]], bool]) -> int:
    from qla.bench.compare import between_files
    from qla.bench.comparison_report import comparison
    from qla.bench.runner import read_rows

    for path in (a, b):
        if not path.is_file():
            raise _fail(f"no such file: {path}")
    first, second = ([row for row in read_rows(path) if wanted(row)] for path in (a, b))
    parts = between_files(first, second, margin)
    if not parts:
        raise _fail("the files share no measured case of one device")
    facts = "Two results files: measured at different times, without a control or a rerun."
    _write(comparison(f"Performance: {a.name} (A) and {b.name} (B)", margin, parts, facts, {}), output)
    return int(_slow(parts))


def _compare_versions(comparer: Comparer, cases: Sequence[Case], margin: float, rounds: int, output: str) -> int:
    from qla.bench.compare import lines, undecided
    from qla.bench.comparison_report import comparison

    with _bar() as progress:
        for part, title in ((1, "rounds"), (2, "rerun")):
            chosen = list(cases) if part == 1 else undecided(comparer, cases, margin)
            task = progress.add_task(title, total=len(chosen) * rounds)
            complete = comparer.run(part, chosen, rounds, lambda task=task: progress.update(task, advance=1))  # type: ignore[misc]
            if not complete:
                break
    found = lines(comparer, cases, margin)
    one, two = (comparer.hello[side]["machine"] for side in ("A", "B"))
    facts = (
        f"A: {comparer.a.label} ({one['version']} · {one['code']}), B: {comparer.b.label} ({two['version']} · "
        f"{two['code']}). {comparer.hello['A']['timer']}; {one['compiler']}; driver: {one['driver'] or 'none'}; torch "
        f"{one['torch']}. {rounds} rounds of {comparer.blocks} turns, as many again for what was not SAME."
    )
    if comparer.hello["A"]["settled"]:
        facts += " Addresses are not random, and the same for A and B in a round."
    if comparer.slowdown != 1:
        facts += f" Calls of B were made {100 * (comparer.slowdown - 1):.3g} % longer on purpose."
    if not complete:
        facts += " The budget ended before all rounds: run again with the same --samples to go on."
    title = f"Performance: {comparer.a.label} (A) and {comparer.b.label} (B)"
    _write(comparison(title, margin, {one["device"]: found}, facts, comparer.failed), output)
    only_b = any(reason.startswith("B:") for reason in comparer.failed.values())
    return int(_slow({"": found}) or only_b)
