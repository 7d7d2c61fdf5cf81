"""How many lines of the kernel templates the ops share, and how long the files of each target are.

A line of a kernel template belongs to the ops for which it renders to something. To see which line a piece of output
comes from, every line of the template is marked, and the verbs are replaced by a placeholder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import jinja2

from qla.codegen.ops import OPS

KERNELS = ("prepare", "scan")
_MARK = re.compile("\x01(\\d+)\x02")
_OPENS = {"block_begin", "variable_begin", "comment_begin"}
_CLOSES = {"block_end", "variable_end", "comment_end"}


@dataclass(frozen=True)
class Use:
    """What of one kernel template serves whom, in lines; blank lines and comments are left out.

    Parameters
    ----------
    shared : the same text for all ops.
    varied : text for all ops, with something in the line that depends on the op.
    partial : text for some ops only, by those ops.
    saves : text only with the option `saves`.
    control : no text of their own (conditions, loops, imports).
    """

    shared: int
    varied: int
    partial: Mapping[tuple[str, ...], int]
    saves: int
    control: int

    @property
    def total(self) -> int:
        return self.shared + self.varied + sum(self.partial.values()) + self.saves + self.control

    def of(self, op: str) -> int:
        """Lines that only some ops have, this one among them."""
        return sum(count for ops, count in self.partial.items() if op in ops)


class _Placeholder(jinja2.Undefined):
    """Stands for any verb or number: callable, and prints as a word."""

    # The base class says that calling it never returns.
    def __call__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        body = kwargs["caller"]() if "caller" in kwargs else ""
        return f"{self._undefined_name}{args}{body}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name=name)

    def __str__(self) -> str:
        return str(self._undefined_name)

    def __iter__(self) -> Any:
        return iter(())


def kernel_use(kernel: str) -> Use:
    """Attribute the lines of ``templates/kernels/{kernel}.j2``."""
    source = _text("templates", f"kernels/{kernel}.j2")
    environment = jinja2.Environment(undefined=_Placeholder, keep_trailing_newline=True, autoescape=False)
    environment.loader = jinja2.FunctionLoader(lambda name: "")
    marked, counted = _mark(environment, source)
    template = environment.from_string(marked)
    plain = {op: _rendered(template, op, saves=False) for op in OPS}
    saving = {op: _rendered(template, op, saves=True) for op in OPS}
    shared = varied = saves = control = 0
    partial: Counter[tuple[str, ...]] = Counter()
    for line in counted:
        ops = tuple(op for op in OPS if line in plain[op])
        if not ops:
            saved = any(line in saving[op] for op in OPS)
            saves, control = saves + saved, control + (not saved)
        elif len(ops) < len(OPS):
            partial[ops] += 1
        elif len({plain[op][line] for op in OPS}) == 1:
            shared += 1
        else:
            varied += 1
    return Use(shared, varied, partial, saves, control)


def file_lines(folder: str) -> dict[str, int]:
    """Lines of each file of ``templates/tile`` or ``targets``, without blank ones and comments."""
    if folder == "targets":
        names = [e.name for e in resources.files("qla.targets").iterdir() if e.name.endswith(".py")]
        return {name: _code_lines(_text("targets", name), "#") for name in sorted(names) if "__" not in name}
    tile = resources.files("qla.templates") / "tile"
    names = [e.name for e in tile.iterdir() if e.name.endswith(".j2")]
    return {name: _code_lines(_text("templates", f"tile/{name}"), "//") for name in sorted(names)}


@lru_cache
def _text(package: str, name: str) -> str:
    return (resources.files(f"qla.{package}") / name).read_text(encoding="utf-8")


def _code_lines(text: str, comment: str) -> int:
    text = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    text = re.sub(r'^""".*?"""$', "", text, flags=re.DOTALL | re.MULTILINE)
    stripped = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith(comment) for line in stripped)


def _mark(environment: jinja2.Environment, source: str) -> tuple[str, list[int]]:
    """Put a mark before each line that does not begin inside a tag; also say which of them are worth counting."""
    inside, start, comments = set(), 0, set()
    for number, kind, value in environment.lex(source):
        if kind in _OPENS:
            start = number
        elif kind in _CLOSES:
            last = number + value.count("\n") if not value.endswith("\n") else number
            inside |= set(range(start + 1, last + 1))
        elif kind == "comment":
            comments |= set(range(number, number + value.count("\n") + 1))
    lines = source.split("\n")
    marked = [line if n in inside else f"\x01{n}\x02{line}" for n, line in enumerate(lines, 1)]
    counted = [
        n for n, line in enumerate(lines, 1)
        if line.strip() and n not in comments and not line.strip().startswith("//")
    ]  # fmt: skip
    return "\n".join(marked), [n for n in counted if n not in inside]


def _rendered(template: jinja2.Template, op: str, saves: bool) -> dict[int, str]:
    """The text that each line renders to, of lines that render to some."""
    features = OPS[op]
    text = template.render(delta=features.delta, gate=features.gate, saves=saves, outputs=True)
    pieces = _MARK.split(text)
    found: dict[int, str] = {}
    for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        if piece.strip():
            found[int(number)] = found.get(int(number), "") + piece.strip()
    return found
