"""What a `scan` template declares: tiles, column blocks and the named steps of its math.

A template calls these recorders while Jinja renders it; the text they return is empty, because the order of the steps
is a schedule's business (`codegen/schedule.py`) and their surroundings the target's (`templates/tile`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from qla.errors import TemplateError

#: What each verb does with its arguments, one letter each:
#: ``w`` writes, ``r`` reads, ``m`` modifies, all done when the statement is; ``W`` overwrites and ``A`` accumulates
#: asynchronously, ``R`` is read by that asynchronous work, ``B`` is written at once and then read by it.
VERBS: dict[str, str] = {
    "product": "WRR",  # block = tile · operand
    "accumulate": "ARR",  # block += tile · operand
    "product_rounded": "WRBr",  # operand = round(block'), block = tile · operand, in halves that overlap
    "to_operand": "wr",  # operand = round(block)
    "load_operand": "wr",  # operand = tile
    "load_rows": "wr",  # row vector = its copy in a tile
    "add_scaled": "mrr",  # operand += rows ⊙ block
    "subtract": "mr",  # operand -= block
    "scaled_operand": "wrr",  # operand = rows ⊙ operand'
    "scale_rows": "mr",  # block = rows ⊙ block
    "scale": "mr",  # block *= number
    "store_rows": "r.",  # operand to the output rows of a chunk
    "save_state": "r.",  # block to the saved states
}

#: Groups of asynchronous work that one statement of a verb commits.
GROUPS = {"product": 1, "accumulate": 1, "product_rounded": 2}

#: Verbs that fetch numbers into a register and do not wait for them.
FETCHES = ("load_operand", "load_rows")

#: Verbs that can do their work in parts.
DIVISIBLE = ("product", "accumulate", "scale", "scale_rows")

_STATEMENT = re.compile(r"(\w+)\((.*)\)$")
_ARGUMENT = re.compile(r"(?:transposed\((?P<inner>\w+)\)|(?P<name>\w+)(?:\.(?P<member>\w+))?)")


@dataclass(frozen=True)
class Tile:
    """A `[rows, cols]` tile that passes through shared memory, one per chunk.

    `source` names the tensor or the workspace buffer it comes from; `lower` tiles are zero above their diagonal;
    `by` is what it belongs to: a q/k head, a value head, or a column block of one.
    """

    name: str
    source: str
    rows: int
    cols: int
    by: str = "head"
    lower: bool = False
    workspace: bool = False


@dataclass(frozen=True)
class Vector:
    """Numbers of one (chunk, value head) in a record: one per row, or a single one; 16-bit (`half`) or float."""

    name: str
    length: int
    kind: str


@dataclass(frozen=True)
class Register:
    """A value the chain keeps in registers: a column block, a 16-bit operand, or a row vector."""

    name: str
    kind: str  # "Block", "Operand", "HalfRows", "FloatRows"
    rows: int


@dataclass(frozen=True)
class Statement:
    """One verb call; `roles` maps each name it touches to its letter in `VERBS`."""

    verb: str
    args: tuple[str, ...]
    roles: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Step:
    """A named piece of math: a line of it for the reader, and its statements."""

    name: str
    math: str
    statements: tuple[Statement, ...]


@dataclass
class Program:
    """Everything a template declared, in order."""

    tiles: dict[str, Tile] = field(default_factory=dict)
    record: dict[str, Vector] = field(default_factory=dict)
    registers: dict[str, Register] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)

    # ---- recorders, called from the template -------------------------------------------------------------------

    def tile(
        self,
        name: str,
        source: str,
        rows: int,
        cols: int,
        by: str = "head",
        lower: bool = False,
        workspace: bool = False,
    ) -> str:
        """Declare a tile."""
        # `int` refuses an undefined size here, where the template's line is known.
        self.tiles[name] = Tile(name, source, int(rows), int(cols), by, lower, workspace)
        return ""

    def vector(self, name: str, length: int, kind: str) -> str:
        """Declare a vector of the record ``rows``, which travels like a tile of that name."""
        self.record[name] = Vector(name, int(length), kind)
        return ""

    def register(self, kind: str, rows: int, *names: str) -> str:
        """Declare values that live in registers."""
        for name in names:
            self.registers[name] = Register(name, kind, int(rows))
        return ""

    def step(self, name: str, math: str, caller: Callable[[], str]) -> str:
        """Declare a step (a Jinja call block whose body holds its statements)."""
        lines = [line.strip() for line in caller().splitlines() if line.strip()]
        self.steps[name] = Step(name, math, tuple(self._statement(name, line) for line in lines))
        return ""

    def turned(self) -> dict[str, bool]:
        """Tiles that steps use transposed, and whether they use them as they are too."""
        uses = [arg for step in self.steps.values() for s in step.statements for arg in s.args]
        names = [arg.removeprefix("transposed(").rstrip(")") for arg in uses if arg.startswith("transposed(")]
        return {name: name in uses for name in names}

    # ---- parsing -----------------------------------------------------------------------------------------------

    def _statement(self, step: str, line: str) -> Statement:
        match = _STATEMENT.match(line.rstrip(";"))
        if match is None or not line.endswith(";"):
            raise TemplateError(f"step {step}: `{line}` is not a statement `verb(argument, …);`")
        verb, args = match[1], tuple(a.strip() for a in match[2].split(","))
        if verb not in VERBS:
            raise TemplateError(f"step {step}: unknown verb `{verb}`; known: {', '.join(VERBS)}")
        letters = VERBS[verb]
        if len(letters) != len(args):
            raise TemplateError(f"step {step}: `{verb}` takes {len(letters)} arguments, got {len(args)}: {line}")
        roles = []
        for letter, arg in zip(letters, args, strict=True):
            if letter != ".":
                roles.append((self._name(step, arg), letter))
        return Statement(verb, args, tuple(roles))

    def _name(self, step: str, arg: str) -> str:
        """The declared name an argument such as ``transposed(K)`` or ``rows.decay`` speaks of."""
        match = _ARGUMENT.fullmatch(arg)
        if match is not None:
            name, member = match["inner"] or match["name"], match["member"]
            if name in (self.tiles.keys() | self.registers.keys()) and member is None:
                return name
            if name == "rows" and member in self.record:
                return name
        known = ", ".join([*self.tiles, *self.registers, *(f"rows.{v}" for v in self.record)])
        raise TemplateError(f"step {step}: `{arg}` names nothing declared; declared: {known}")
