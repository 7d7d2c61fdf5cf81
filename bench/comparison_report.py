"""What `compare` found, as Markdown: a section per device, a summary by suite, a table per suite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from qla.bench.compare import Line
from qla.bench.report import Block, Heading, Paragraph, Table, markdown
from qla.bench.verdict import Interval, Verdict

__all__ = ["comparison"]


def _speedups(part: Sequence[Line]) -> list[float]:
    return [math.exp(-line.ratio.middle) for line in part]


def _spread(part: Sequence[Line]) -> tuple[str, str, str]:
    values = _speedups(part)
    return tuple(f"{x:.3f}x" for x in (statistics.median(values), min(values), max(values)))  # type: ignore[return-value]


def _range(ratio: Interval | None) -> str:
    """Interval of a speedup."""
    return "–" if ratio is None else f"{math.exp(-ratio.high):.3f} to {math.exp(-ratio.low):.3f}"


def _row(line: Line) -> tuple[str, ...]:
    speedup = f"{math.exp(-line.ratio.middle):.3f}x"
    mark = f"**{line.verdict.value}**" if line.verdict is Verdict.SLOW else line.verdict.value
    times = (f"{line.a:.4g}", f"{line.b:.4g}")
    return (line.workload, line.dtype, mark, *times, speedup, _range(line.ratio), _range(line.control))


def _section(device: str, facts: str, found: Sequence[Line], failed: Mapping[str, str]) -> list[Block]:
    suites: dict[str, list[Line]] = {}
    for line in found:
        suites.setdefault(line.op, []).append(line)
    blocks: list[Block] = [Heading(2, device), Paragraph(facts)]
    columns = (
        "suite",
        "cases",
        *(v.value for v in Verdict),
        "median speedup",
        "least",
        "most",
        "half-width",
        "largest",
    )

    def summary(name: str, part: Sequence[Line]) -> tuple[str, ...]:
        counts = [str(sum(line.verdict is verdict for line in part)) for verdict in Verdict]
        widths = [line.ratio.half_width for line in part]
        ends = (f"{100 * width:.1f} %" for width in (statistics.median(widths), max(widths)))
        return (name, str(len(part)), *counts, *_spread(part), *ends)

    rows = [summary(op, part) for op, part in suites.items()]
    if len(suites) > 1:
        rows.append(summary("all", found))
    blocks.append(Table(columns, rows))
    for op, part in suites.items():
        median, least, most = _spread(part)
        blocks.append(Heading(3, f"{op} (median {median}, least {least}, most {most})"))
        names = ("case", "dtype", "verdict", "A (ms)", "B (ms)", "speedup", "its 95 % interval", "A against itself")
        blocks.append(Table(names, [_row(line) for line in part], 3))
    if failed:
        blocks += [Heading(3, "Not compared"), Table(("case", "why"), sorted(failed.items()), 2)]
    return blocks


def comparison(
    title: str, margin: float, parts: Mapping[str, Sequence[Line]], facts: str, failed: Mapping[str, str]
) -> str:
    """Return the report.

    Parameters
    ----------
    title : what was compared.
    margin : relative change that matters.
    parts : results by device.
    facts : how they were measured.
    failed : reasons by case, of those that a side could not run.
    """
    rule = (
        f"Speedup: time of A over time of B. SAME: all of the interval is within {100 * margin:.3g} %. SLOW or FAST: "
        f"1 is outside the interval, and the estimate is beyond {100 * margin:.3g} %. Anything else is AMBIGUOUS."
    )
    blocks: list[Block] = [Heading(1, title), Paragraph(rule)]
    for device, found in parts.items():
        blocks += _section(device, facts, found, failed)
    return markdown(blocks)
