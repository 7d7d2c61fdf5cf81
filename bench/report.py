"""A results file as Markdown: per device and op a table, and geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["geometric_mean", "markdown"]

Row = dict[str, Any]

_COLUMNS = (
    "case", "dtype", "device time (ms)", "wall (ms)", "best peer (ms)", "ratio",
    "TFLOP/s", "TB/s", "% of floor", "bound",
)  # fmt: skip
_LEGEND = (
    "ratio: time of the best peer over ours, above 1 we are faster. TFLOP/s counts the operations of the chunk-wise "
    "form, TB/s each tensor in and out once; % of floor is the least time that these take on the device over ours. "
    "bound: what the floor is made of, lat where launching takes longer than it. (reduced): smaller than published."
)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a Markdown table; columns after the first `left` are aligned to the right."""
    marks = ["---" if i < left else "---:" for i in range(len(columns))]
    return [f"| {' | '.join(cells)} |" for cells in (columns, marks, *rows)]


def _number(row: Row, name: str, digits: int = 3) -> str:
    return f"{row[name]:.{digits}g}" if row.get(name) is not None else "–"


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _label(row: Row) -> str:
    return f"{row['workload']} (reduced)" if row.get("reduced") else str(row["workload"])


def _cells(row: Row) -> list[str]:
    peer = f"{row['best_peer_ms']:.4g} {row['best_peer']}" if "best_peer" in row else "–"
    percent, ratio = _fixed(row.get("floor_percent"), 0), _fixed(row.get("ratio"), 2)
    numbers = (_number(row, "device_ms", 4), _number(row, "wall_ms", 4))
    rates = (_number(row, "tflops"), _number(row, "tbps"))
    return [_label(row), row["dtype"], *numbers, peer, ratio, *rates, percent, row.get("bound", "–")]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name)]


def _means(groups: dict[str, list[Row]]) -> list[str]:
    """Geometric means of each op, and counts of all rows, measured or not."""

    def cells(op: str, rows: Sequence[Row]) -> list[str]:
        ok = [row for row in rows if row["status"] == "ok"]
        ratios, percents = _values(ok, "ratio"), _values(ok, "floor_percent")
        errors = _values(ok, "output_error") + _values(ok, "state_error")
        counts = [sum(row["status"] == status for row in rows) for status in ("ok", "error", "unsupported")]
        slower = sum(ratio < 1 for ratio in ratios)
        means = [_fixed(geometric_mean(ratios), 2), f"{slower}" if ratios else "–"]
        error = f"{max(errors):.2g}" if errors else "–"
        return [op, *map(str, counts), *means, _fixed(geometric_mean(percents), 1), error]

    columns = ("op", "measured", "errors", "not supported", "ratio", "slower than best peer", "% of floor", "error")
    rows = [cells(op, group) for op, group in groups.items()]
    if len(groups) > 1:
        rows.append(cells("all", [row for group in groups.values() for row in group]))
    return _table(columns, rows)


def _group(rows: Iterable[Row], *names: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(" · ".join(str(row[name]) for name in names), []).append(row)
    return groups


def _facts(rows: Sequence[Row]) -> str:
    """What the rows of a section have in common, each fact with every value it has."""
    parts = []
    for name in ("target", "driver", "torch", "compiler", "timer"):
        values = sorted({str(row[name]) for row in rows if row.get(name)})
        if values:
            parts.append(f"{name}: {' / '.join(values)}")
    clock = sorted(row["clocks"]["sm_mhz"] for row in rows if row.get("clocks", {}).get("sm_mhz"))
    if clock:
        parts.append(f"SM clock: {clock[0]} to {clock[-1]} MHz")
    return "; ".join(parts)


def markdown(rows: Sequence[Row]) -> str:
    """Return the report of all rows, a section per device and code."""
    lines = [_LEGEND, ""]
    for title, section in _group(rows, "device", "version", "code").items():
        ops = _group(section, "op")
        lines += [f"## {title}", "", _facts(section), "", "Geometric means, and the largest error:", ""]
        lines += [*_means(ops), ""]
        for op, group in ops.items():
            ok = [row for row in group if row["status"] == "ok"]
            if not ok:
                continue
            lines += [f"### {op}", ""]
            for seed, part in _group(ok, "seed").items():
                lines += [f"Workloads {seed}", "", *_table(_COLUMNS, map(_cells, part), 2), ""]
        lines += _problems(section)
    return "\n".join(lines)


def _problems(rows: Sequence[Row]) -> list[str]:
    """Everything that was not measured, or measured with a wrong result."""
    wrong = [row | {"reason": "result too far from the recurrence"} for row in rows if row.get("accurate") is False]
    bad = [row for row in rows if row["status"] != "ok"] + wrong
    if not bad:
        return []
    cells = [
        (f"{row['seed']} {row['op']} {row['workload']}", row["dtype"], row["status"], row["reason"].replace("|", "\\|"))
        for row in bad
    ]
    return ["### Not measured, or wrong", "", *_table(("case", "dtype", "status", "why"), cells, 4), ""]
