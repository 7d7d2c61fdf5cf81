"""`render(spec)`: from a spec to self-contained source text. Pure: no torch, GPU, clock or environment."""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePath
from typing import Any

import jinja2

from qla.codegen.abi import combine_abi, flags_of, prepare_abi, scan_abi, segment_workspace
from qla.codegen.layout import (
    MATRIX_BYTES,
    SharedLayout,
    prepare_shared_bytes,
    record_layout,
    shared_layout,
    static_layout,
)
from qla.codegen.program import Program
from qla.codegen.schedule import build_chain
from qla.codegen.spec import COMBINE_COLUMNS, KernelSpec, Limits, Source
from qla.errors import ScheduleError, TemplateError
from qla.targets import TARGETS, Schedule, Target

_PTX = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Templates from the installed package only; an undefined name is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("qla.templates", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
        autoescape=False,
    )


@lru_cache(maxsize=512)
def render(spec: KernelSpec) -> Source:
    """Render one kernel.

    Raises
    ------
    TemplateError
        A template uses an undefined name, an unknown verb or an undeclared tile.
    ScheduleError
        The schedule's order cannot work, or its buffers exceed the target's shared memory.
    """
    target = TARGETS[spec.target]
    context = _context(spec, target)
    try:
        return _RENDERERS[spec.stage](spec, target, context)
    except jinja2.TemplateError as error:
        raise TemplateError(f"{spec.name} for {spec.target}: {_place(error)}: {error}") from error


def _place(error: jinja2.TemplateError) -> str:
    """Template and line of an error: a syntax error has them, any other leaves them in its traceback."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name}:{error.lineno}"
    place, traceback = "a template", error.__traceback__
    while traceback is not None:
        path = PurePath(traceback.tb_frame.f_code.co_filename)
        if path.suffix == ".j2":
            place = f"{path.parent.name}/{path.name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def schedule_of(spec: KernelSpec) -> Schedule:
    """The schedule a spec names, or its target's default."""
    return TARGETS[spec.target].schedule(spec.schedule)


def _context(spec: KernelSpec, target: Target) -> dict[str, Any]:
    """What every template sees: the op's features, dims and the target's facts.

    The names of the op and the target are there for the text's first lines and its entry symbol alone.
    """
    op, factors = spec.features, target.facts.get("factors", "half")
    return {
        "delta": op.delta,
        "gate": op.gate,
        "saves": spec.saves and spec.stage in ("prepare", "scan"),
        "outputs": spec.stage != "carry",
        "loads": spec.loads,
        # What is left of a state after a chunk, which tells a `carry` where to start.
        "reach": target.segments and op.delta and op.gate == "head",
        "dtype": spec.dtype,
        "ptx": _PTX[spec.dtype],
        "C": target.chunk[op.gate],
        "K": spec.dk,
        "V": spec.dv,
        "factors": factors,
        "put_factor": {"half": "put_half_row", "float": "put_row"}[factors],
        "facts": target.facts,
        "processors": target.processors,
        "spec": {"name": spec.name, "target": spec.target},
        "entry": spec.name,
        "title": _title(spec),
        "build": target.build,
    }


_TITLES = {
    "scan": "the chain over chunks",
    "carry": "what a segment makes of a state",
    "combine": "the states at the ends of segments",
}


def _title(spec: KernelSpec) -> str:
    if spec.stage in _TITLES:
        return _TITLES[spec.stage]
    op = spec.features
    parts = ["gate sums"] * (op.gate != "none") + ["Gram products"] + ["triangular inverse"] * op.delta
    return f"per chunk: {', '.join(parts)}"


def _declare(kernel: str, program: Program, context: dict[str, Any]) -> None:
    """Run a kernel template for what it declares."""
    recorders = {name: getattr(program, name) for name in ("tile", "vector", "register", "step")}
    environment().get_template(f"kernels/{kernel}.j2").render(**context, **recorders)


def _render_scan(spec: KernelSpec, target: Target, context: dict[str, Any]) -> Source:
    schedule = schedule_of(spec)
    outputs = context["outputs"]
    program, columns = Program(), target.columns(spec.dv)
    element = 4 if spec.dtype == "fp32" else 2
    _declare("scan", program, {**context, "columns": columns})
    chain = build_chain(program, schedule, target.asynchronous)
    if chain.prologue and target.language == "c++":
        raise ScheduleError(f"schedule {schedule.name}: {target.name} walks one chunk after the other, nothing ahead")
    offsets, record_bytes = record_layout(program.record, element)
    streams = min(schedule.streams, spec.dv // columns) if outputs else 1
    chunk = target.chunk[spec.features.gate]
    layout, turned = SharedLayout(), dict[str, bool]()
    if target.asynchronous:
        layout = shared_layout(program, chain.rings, streams, chunk, target.shared_limit)
    elif target.shared_limit:
        turned = {} if target.facts["transposing_reads"] else program.turned()
        layout = static_layout(program, chain.rings, target.facts["tile_pad"], target.shared_limit, turned)
    abi = scan_abi(spec, program, target.asynchronous)
    threads = target.scan_threads(streams)
    rows = sorted({chunk, chunk // 2, spec.dk} & {16, 32, 64, 128})
    template = environment().get_template(f"tile/{target.vocabulary}_scan.j2")
    text = template.render(
        **context,
        abi=abi,
        program=program,
        tiles_=program.tiles,
        tensor_tiles={
            r.name: [program.tiles[t] for t in r.tiles if t != "rows" and not program.tiles[t].workspace]
            for r in chain.rings
        },
        turned=turned,
        record=program.record,
        record_offsets=offsets,
        record_bytes=record_bytes,
        verbs={s.verb for step in program.steps.values() for s in step.statements},
        chain=chain,
        layout=layout,
        streams=streams,
        columns=columns,
        threads=threads,
        unroll=schedule.unroll if outputs else 1,
        ring_of_V=next((r.name for r in chain.rings if "V" in r.tiles), ""),
        wgmma_rows=rows,
    )
    workspace = tuple((t.source, t.rows * t.cols * element) for t in program.tiles.values() if t.workspace)
    workspace += (("rows", record_bytes),) if program.record else ()
    if not outputs:
        workspace += segment_workspace(spec)
    limits = Limits(threads, layout.total, columns * streams, chunk)
    return Source(spec, spec.name, target.language, _tidy(text), abi, limits, workspace)


def _render_combine(spec: KernelSpec, target: Target, context: dict[str, Any]) -> Source:
    abi, columns = combine_abi(), COMBINE_COLUMNS
    shared_bytes = 2 * columns * spec.dk * 4
    template = environment().get_template(f"tile/{target.vocabulary}_combine.j2")
    text = template.render(**context, abi=abi, columns=columns, shared_bytes=shared_bytes)
    limits = Limits(2 * spec.dk, shared_bytes, columns, context["C"])
    return Source(spec, spec.name, target.language, _tidy(text), abi, limits, segment_workspace(spec))


def _render_prepare(spec: KernelSpec, target: Target, context: dict[str, Any]) -> Source:
    # What `prepare` writes is what `scan` declares: the same program tells both.
    program = Program()
    _declare("scan", program, {**context, "columns": target.columns(spec.dv)})
    element = 4 if spec.dtype == "fp32" else 2
    offsets, record_bytes = record_layout(program.record, element)
    buffers = tuple((t.source, t.rows * t.cols * element) for t in program.tiles.values() if t.workspace)
    buffers += (("rows", record_bytes),) if program.record else ()
    abi = prepare_abi(spec, buffers)
    threads = target.threads[spec.features.gate]
    pad, teams = target.facts.get("tile_pad", 0), target.facts.get("teams", 1)
    keys_alone = target.facts.get("queries_in_registers", False)
    shared_bytes = prepare_shared_bytes(
        spec.features, context["C"], spec.dk, spec.dv, pad, teams, spec.saves, context["reach"], keys_alone
    )
    if 0 < target.shared_limit < shared_bytes:
        raise ScheduleError(f"{shared_bytes} bytes of shared memory exceed the target's {target.shared_limit}")
    template = environment().get_template("kernels/prepare.j2")
    text = template.render(
        **context,
        abi=abi,
        vocabulary=f"tile/{target.vocabulary}.j2",
        prepare_vocabulary=f"tile/{target.vocabulary}_prepare.j2",
        record=program.record,
        record_offsets=offsets,
        record_bytes=record_bytes,
        threads=threads,
        flags=flags_of(spec.features),
        shared_bytes=shared_bytes,
    )
    chosen = "heads_at_once" in {f.name for f in abi} and spec.features.delta
    parts = (2 * context["C"] * spec.dk * element, MATRIX_BYTES) if chosen else ()
    limits = Limits(threads, shared_bytes if target.shared_limit else 0, 0, context["C"], *parts)
    return Source(spec, spec.name, target.language, _tidy(text), abi, limits, buffers)


_RENDERERS = {"prepare": _render_prepare, "carry": _render_scan, "combine": _render_combine, "scan": _render_scan}


def _tidy(text: str) -> str:
    """No trailing blanks, no runs of empty lines: the text is read by people."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines) + "\n"
