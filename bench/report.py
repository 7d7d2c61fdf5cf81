"""A results file as tables: per device and op one with the published columns, and geometric means.

`report` makes a list of blocks, which `markdown` and `page.html` write down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qla.bench.peers import OURS

__all__ = ["Block", "Heading", "Paragraph", "Section", "Table", "geometric_mean", "markdown", "report", "sections"]

Row = dict[str, Any]

_COLUMNS = (
    "case", "dtype", "ratio", "device time (ms)", "wall (ms)", "alternatives (ms)", "TFLOP/s", "TB/s", "% of ceiling",
    "bound",
)  # fmt: skip
_LEGEND = (
    "ratio: time of the fastest alternative over ours, above 1 we are faster. Alternatives: (published) with the "
    "workload, (measured) earlier on the same kind of device, all others in the same file as ours. TFLOP/s counts the "
    "operations of the chunk-wise form, TB/s each tensor in and out once; % of ceiling is the least time that these "
    "take on the device over ours. bound: what that least time is made of, lat where launching takes longer than it. "
    "(reduced): smaller than published."
)


@dataclass(frozen=True)
class Heading:
    """A title of a level, from 1."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells as text; columns after the first `left` hold numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


Block = Heading | Paragraph | Table


@dataclass(frozen=True)
class Section:
    """Rows of ours, by one code on one device, each with its `alternatives` by name; and what was not measured."""

    device: str
    code: str
    rows: Sequence[Row]
    problems: Sequence[Row]

    @property
    def title(self) -> str:
        """Device and code."""
        return f"{self.device} · {self.code}" if self.code else self.device


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _case(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("device", "seed", "op", "workload", "dtype"))


def sections(rows: Iterable[Row]) -> list[Section]:
    """Sort rows by device and code, and put the times of peers beside ours."""
    rows = list(rows)
    others: dict[tuple[str, ...], list[Row]] = {}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] == "unavailable":
            continue
        if row["peer"] == OURS:
            groups.setdefault((row["device"], f"{row['version']} · {row['code']}"), []).append(row)
        else:
            others.setdefault(_case(row), []).append(row)
    found = []
    for (device, code), ours in groups.items():
        done = [row | _compared(row, others.get(_case(row), [])) for row in ours if row["status"] == "ok"]
        beside = [row for key, known in others.items() for row in known if key[0] == device]
        absent = [row for row in rows if row["status"] == "unavailable"]
        found.append(Section(device, code, done, _problems([*ours, *beside, *absent])))
    return found


def _compared(row: Row, others: Sequence[Row]) -> Row:
    """Alternatives of a row, and its ratio to the fastest."""
    times: dict[str, float] = dict(row.get("published") or {})
    times |= {f"{x['peer']} {x['peer_version']}": x["device_ms"] for x in others if x["status"] == "ok"}
    times = dict(sorted(times.items(), key=lambda item: item[1]))
    best = min(times.values(), default=None)
    return {"alternatives": times} | ({} if best is None else {"ratio": best / row["device_ms"]})


def _problems(rows: Sequence[Row]) -> list[Row]:
    wrong = [row | {"reason": "result too far from the recurrence"} for row in rows if row.get("accurate") is False]
    return [row for row in rows if row["status"] != "ok"] + wrong


# Cells ----------------------------------------------------------------------------------------------------------------


def _number(row: Row, name: str, digits: int = 3) -> str:
    return f"{row[name]:.{digits}g}" if row.get(name) is not None else "–"


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _label(row: Row) -> str:
    return f"{row['workload']} (reduced)" if row.get("reduced") else str(row["workload"])


def _cells(row: Row) -> list[str]:
    others = ", ".join(f"{name} {ms:.4g}" for name, ms in row["alternatives"].items()) or "–"
    times = (_number(row, "device_ms", 4), _number(row, "wall_ms", 4))
    rates = (_number(row, "tflops"), _number(row, "tbps"), _fixed(row.get("floor_percent"), 0))
    ratio = _fixed(row.get("ratio"), 2)
    return [_label(row), row["dtype"], ratio, *times, others, *rates, row.get("bound", "–")]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name)]


def _group(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[name]), []).append(row)
    return groups


def _means(section: Section) -> Table:
    """Geometric means of each op, and counts of all our rows, measured or not."""
    ours = [row for row in section.problems if row["peer"] == OURS and row["status"] in ("error", "unsupported")]

    def cells(op: str, done: Sequence[Row], not_done: Sequence[Row]) -> list[str]:
        ratios, percents = _values(done, "ratio"), _values(done, "floor_percent")
        errors = [e for name in ("output_error", "state_error", "sampled_error") for e in _values(done, name)]
        counts = [len(done), *(sum(row["status"] == s for row in not_done) for s in ("error", "unsupported"))]
        slower = str(sum(ratio < 1 for ratio in ratios)) if ratios else "–"
        error = f"{max(errors):.2g}" if errors else "–"
        means = (_fixed(geometric_mean(ratios), 2), slower, _fixed(geometric_mean(percents), 1), error)
        return [op, *map(str, counts), *means]

    done, not_done = _group(section.rows, "op"), _group(ours, "op")
    rows = [cells(op, done.get(op, []), not_done.get(op, [])) for op in dict.fromkeys([*done, *not_done])]
    if len(rows) > 1:
        rows.append(cells("all", section.rows, ours))
    counts = ("measured", "errors", "not supported")
    return Table(("op", *counts, "ratio", "slower than best", "% of ceiling", "largest error"), rows)


def _against(section: Section) -> Table:
    """Geometric means of the ratio to each alternative alone."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in section.rows:
        for name, ms in row["alternatives"].items():
            ratios.setdefault((row["op"], name), []).append(ms / row["device_ms"])
    rows = [
        (op, name, str(len(values)), _fixed(geometric_mean(values), 2), _fixed(min(values), 2), _fixed(max(values), 2))
        for (op, name), values in sorted(ratios.items())
    ]
    return Table(("op", "alternative", "cases", "its time over ours", "least", "most"), rows, 2)


def _facts(section: Section) -> str:
    """What the rows of a section have in common, each fact with every value it has."""
    parts = []
    for name in ("target", "driver", "torch", "compiler", "timer"):
        values = sorted({str(row[name]) for row in section.rows if row.get(name)})
        if values:
            parts.append(f"{name}: {' / '.join(values)}")
    clock = sorted(row["clocks"]["sm_mhz"] for row in section.rows if row.get("clocks", {}).get("sm_mhz"))
    if clock:
        parts.append(f"SM clock: {clock[0]} to {clock[-1]} MHz")
    days = sorted({str(row["date"])[:10] for row in section.rows if row.get("date")})
    return "; ".join([*parts, *days])


def report(section: Section) -> list[Block]:
    """Return a section as blocks."""
    blocks: list[Block] = [Heading(2, section.title), Paragraph(_facts(section))]
    blocks += [Paragraph("Geometric means, and the largest error:"), _means(section)]
    against = _against(section)
    if against.rows:
        blocks += [Paragraph("Against each alternative, geometric means:"), against]
    for op, group in _group(section.rows, "op").items():
        blocks.append(Heading(3, op))
        for seed, part in _group(group, "seed").items():
            blocks += [Paragraph(f"Workloads {seed}"), Table(_COLUMNS, [_cells(row) for row in part], 2)]
    if section.problems:
        cells = [
            (row["peer"], " ".join(str(row.get(n, "")) for n in ("seed", "op", "workload")).strip() or "all",
             row.get("dtype", ""), row["status"], row["reason"])
            for row in section.problems
        ]  # fmt: skip
        blocks += [Heading(3, "Not measured, or wrong"), Table(("peer", "case", "dtype", "status", "why"), cells, 5)]
    return blocks


def legend() -> Paragraph:
    """What the columns mean."""
    return Paragraph(_LEGEND)


def _lines(block: Block) -> list[str]:
    if isinstance(block, Heading):
        return ["#" * block.level + " " + block.text, ""]
    if isinstance(block, Paragraph):
        return [block.text, ""]
    marks = ["---" if i < block.left else "---:" for i in range(len(block.columns))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (block.columns, marks, *block.rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]


def markdown(blocks: Iterable[Block]) -> str:
    """Write blocks down as Markdown."""
    return "\n".join(line for block in blocks for line in _lines(block))


def results(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the report of all rows as Markdown, a section per device and code."""
    blocks: list[Block] = [legend()]
    for section in sections(dict(row) for row in rows):
        blocks += report(section)
    return markdown(blocks)
