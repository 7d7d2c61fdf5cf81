"""A report as one HTML page that needs nothing else: tables, and pictures in it as SVG."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from qla.bench import plots
from qla.bench.cost import ceilings
from qla.bench.report import Heading, Paragraph, Section, Table, legend, report, sections

__all__ = ["html"]


def _pictures(section: Section) -> list[dict[str, str]]:
    """Titles and SVG elements."""
    if not section.rows:
        return []
    found = [("Roofline", plots.roofline(section.rows, ceilings(section.device)))]
    kinds = sorted({(row["op"], row["dtype"]) for row in section.rows})
    for op, dtype in kinds:
        figure = plots.lengths([row for row in section.rows if (row["op"], row["dtype"]) == (op, dtype)])
        if figure is not None:
            found.append((f"{op}, {dtype}: device time against sequence length", figure))
    return [{"title": title, "svg": plots.svg(figure)} for title, figure in found]


def html(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page of all rows."""
    environment = Environment(
        loader=PackageLoader("qla.bench", "data"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    parts = [{"title": s.title, "blocks": report(s)[1:], "pictures": _pictures(s)} for s in sections(rows)]
    kind = {"heading": Heading, "paragraph": Paragraph, "table": Table}
    tests = {name: lambda block, of=of: isinstance(block, of) for name, of in kind.items()}
    environment.tests.update(tests)
    return environment.get_template("report.html.j2").render(legend=legend().text, sections=parts)
