"""Pictures of a report: time against sequence length, and the roofline. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from qla.bench.cost import Ceilings
from qla.bench.workloads import CHUNK, OPS

__all__ = ["lengths", "roofline", "svg"]

Row = dict[str, Any]
Series = dict[str, dict[int, float]]

_OURS, _FLOOR = "qla", "floor"
_LEAST_POINTS = 3
_COLORS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
_MARKERS = "osD^vPX"
_MOST = len(_COLORS)


def svg(figure: Figure) -> str:
    """A figure as an SVG element."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qla"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _sizes(row: Row) -> tuple[int, tuple[int, ...]]:
    """Tokens of the one sequence per batch row, and batch, heads, value heads and head dims."""
    batch, tokens, heads, dk = row["shapes"]["q"]
    value_heads, dv = row["shapes"]["v"][2:]
    if OPS[row["op"]].head_major:
        tokens, heads, value_heads = heads, tokens, row["shapes"]["v"][1]
    return tokens, (batch, heads, value_heads, dk, dv)


def _short(name: str) -> str:
    """Alternatives by library: the tables have the versions."""
    return re.sub(r" [\w.+]+(?= \(|$)", "", name) if " " in name and "(published)" not in name else name


def _panels(rows: Sequence[Row]) -> dict[tuple[int, ...], Series]:
    """By head configuration: for each line its times by length, the least of rows that are the same work."""
    panels: dict[tuple[int, ...], Series] = {}
    for row in rows:
        if row.get("lengths") and len(row["lengths"]) > 1:
            continue
        tokens, heads = _sizes(row)
        if tokens < CHUNK:  # decoding is another question, far off to the left
            continue
        lines = {_OURS: row["device_ms"], **({_FLOOR: row["floor_ms"]} if "floor_ms" in row else {})}
        for name, ms in row["alternatives"].items():
            lines[_short(name)] = min(ms, lines.get(_short(name), ms))
        series = panels.setdefault(heads, {})
        for name, ms in lines.items():
            points = series.setdefault(name, {})
            points[tokens] = min(ms, points.get(tokens, ms))
    return {heads: s for heads, s in sorted(panels.items()) if len(s[_OURS]) >= _LEAST_POINTS}


def _tokens(value: float, _: object) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _ticks(tokens: Collection[int]) -> list[int]:
    """Powers of two from the shortest to the longest."""
    first, last = math.floor(math.log2(min(tokens))), math.ceil(math.log2(max(tokens)))
    return [2**n for n in range(first, last + 1)]


def _line(axes: Axes, name: str, points: Mapping[int, float], others: Sequence[str]) -> None:
    x = sorted(points)
    y = [points[tokens] for tokens in x]
    if name == _OURS:
        axes.plot(x, y, label=name, color="#0072b2", linewidth=2.2, marker="o", markersize=4, zorder=5)
    elif name == _FLOOR:
        axes.plot(x, y, label=name, color="black", linewidth=1.2, linestyle="--")
    else:
        n = others.index(name) % _MOST
        axes.plot(x, y, label=name, color=_COLORS[n], linewidth=1.1, marker=_MARKERS[n], markersize=3)


def lengths(rows: Sequence[Row]) -> Figure | None:
    """Device time against tokens, a panel per head configuration; None where no configuration has three lengths.

    Parameters
    ----------
    rows : of one op and dtype, as `report.sections` gives them.
    """
    panels = _panels(rows)
    if not panels:
        return None
    counts: dict[str, int] = {}
    for series in panels.values():
        for name, points in series.items():
            counts[name] = counts.get(name, 0) + len(points)
    others = [name for name in sorted(counts, key=lambda n: -counts[n]) if name not in (_OURS, _FLOOR)]
    wide = min(4, len(panels))
    high = -(-len(panels) // wide)
    figure = Figure(figsize=(max(6.0, 3.3 * wide), 2.9 * high + 0.6), layout="constrained")
    grid = figure.subplots(high, wide, sharey=True, squeeze=False)
    for axes, (heads, series) in zip(grid.flat, panels.items(), strict=False):
        for name in (_FLOOR, *others, _OURS):
            if name in series:
                _line(axes, name, series[name], others)
        batch, h, hv, dk, dv = heads
        sizes = f"K = {dk}" if dk == dv else f"K = {dk}, V = {dv}"
        axes.set_title(f"{h}/{hv} heads, {sizes}" + (f", batch {batch}" if batch > 1 else ""), fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(_ticks(series[_OURS]))
        axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.tick_params(labelsize=7.5)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens of a sequence", fontsize=9)
    figure.supylabel("device time (ms)", fontsize=9)
    seen: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            seen.setdefault(name, handle)
    figure.legend(list(seen.values()), list(seen), loc="outside upper center", ncols=min(5, len(seen)), fontsize=8)
    return figure


def roofline(rows: Sequence[Row], limits: Ceilings | None) -> Figure:
    """Rate against operations per byte, a point per case, under what the device could do."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Axes = figure.subplots()
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["op"], []).append(row)
    for n, (op, group) in enumerate(groups.items()):
        x, y = [row["flops"] / row["bytes"] for row in group], [row["tflops"] for row in group]
        color, marker = _COLORS[n % _MOST], _MARKERS[n % _MOST]
        axes.scatter(x, y, s=22, alpha=0.6, label=op, linewidths=0, color=color, marker=marker)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if limits is not None:
        low, high = axes.get_xlim()
        ridge = limits.tflops / limits.tbps
        low = min([row["flops"] / row["bytes"] for row in rows]) / 1.5
        high = max(high, 2 * ridge)
        axes.plot([low, ridge, high], [limits.tbps * low, limits.tflops, limits.tflops], color="black", linewidth=1.4)
        axes.text(ridge / 1.5, limits.tflops, f"{limits.tflops:g} TFLOP/s", ha="right", va="center", fontsize=9)
        axes.text(ridge / 12, limits.tflops / 10, f"{limits.tbps:g} TB/s ", ha="right", va="bottom", fontsize=9)
        axes.set_ylim(top=2.5 * limits.tflops)
    axes.set_xlabel("operations per byte, each tensor moved once", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=9)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=8, loc="lower right")
    return figure
