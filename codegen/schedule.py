"""From a schedule's order to the chain's prologue, steady state and epilogue.

The steps of a few chunks are laid out in the schedule's order and walked once, keeping the queue of asynchronous work
that is under way. Where a statement needs a result that is still in that queue, an `await` is put before it; where the
last use of a ring's buffer is known to be over, a `release`; where a chunk's tiles are first needed, a `land`. What the
walk writes for the second, third and fourth chunk must be the same text: that is the steady state.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qla.codegen.program import DIVISIBLE, FETCHES, GROUPS, Program, Statement, Step
from qla.errors import ScheduleError
from qla.targets.base import Schedule

_ARGUMENT = re.compile(r"\b([A-Za-z_]\w*)(?:\.(\w+))?")
_CHUNKS = 6  # laid out for the walk: a first and a last one, and four between them to compare


@dataclass(frozen=True)
class Item:
    """One entry of an order: a step, whether it runs a chunk ahead, and which part of its inner dimension."""

    step: Step
    ahead: int
    part: int
    parts: int


@dataclass(frozen=True)
class Ring:
    """Tiles that travel together through `depth` buffers."""

    name: str
    tiles: tuple[str, ...]
    depth: int


@dataclass
class Chain:
    """The ordered text of a chain: lines of its parts, and its rings in the order their tiles are first needed.

    Where no step runs ahead there is only the steady state, which then is every chunk's.
    """

    rings: tuple[Ring, ...]
    prologue: list[str]
    steady: list[str]
    drain: list[str]
    epilogue: list[str]
    landed_ahead: dict[str, int]
    """How many chunks of each ring have landed when the main loop starts."""


@dataclass
class _Group:
    """Asynchronous work that was committed together."""

    writes: set[str]
    reads: set[tuple[str, int]]  # (register or tile, chunk)


@dataclass
class _Walk:
    """State of the walk over the laid-out statements."""

    program: Program
    asynchronous: bool
    ring_of: dict[str, str]
    pending: list[_Group] = field(default_factory=list)
    landed: dict[str, int] = field(default_factory=lambda: {})
    open_uses: Counter[tuple[str, int]] = field(default_factory=Counter)  # (ring, chunk): uses not yet over
    written: set[str] = field(default_factory=set)
    fetched: list[tuple[str, str, int]] = field(default_factory=list)  # (register, ring, chunk) it comes from
    used: set[str] = field(default_factory=set)  # registers used since the last await
    lines: list[str] = field(default_factory=list)


def parse_order(program: Program, schedule: Schedule) -> list[Item]:
    """Items of the order whose steps the program has; every step of the program must appear once, in all its parts."""
    items: list[Item] = []
    seen: dict[str, list[int]] = {}
    for entry in schedule.order:
        if entry == "await":
            items.append(Item(Step("await", "nothing stays under way", ()), 0, 0, 1))
            continue
        early = re.fullmatch(r"(>?)land (\w+)", entry)
        if early is not None:
            if early[2] in program.tiles:
                items.append(Item(Step(f"land {early[2]}", f"{early[2]} has landed", ()), len(early[1]), 0, 1))
            continue
        match = re.fullmatch(r"(>?)(\w+?)(?::(\d+)/(\d+))?", entry)
        if match is None:
            raise ScheduleError(f"schedule {schedule.name}: cannot read `{entry}`; write `step`, `>step` or `step:1/2`")
        step = program.steps.get(match[2])
        if step is None:
            continue
        part, parts = int(match[3] or 1), int(match[4] or 1)
        if parts > 1 and [s.verb in DIVISIBLE for s in step.statements] != [True]:
            raise ScheduleError(f"schedule {schedule.name}: step `{step.name}` cannot run in parts")
        items.append(Item(step, len(match[1]), part - 1, parts))
        seen.setdefault(step.name, []).append(part)
        if seen[step.name] != list(range(1, part + 1)):
            raise ScheduleError(f"schedule {schedule.name}: parts of `{step.name}` are out of order")
    for name in program.steps:
        parts_seen = seen.get(name, [])
        kinds = {(i.parts, i.ahead) for i in items if i.step.name == name}
        expected = max((parts for parts, _ in kinds), default=1)
        if len(parts_seen) != expected or len(kinds) > 1:
            why = ", which differ in size or chunk" if len(kinds) > 1 else ""
            raise ScheduleError(
                f"schedule {schedule.name}: step `{name}` runs {len(parts_seen)} of {expected} parts{why}"
            )
    return items


def check_order(program: Program, schedule: Schedule, items: Sequence[Item]) -> None:
    """Steps that share a register must run in the order in which the template lists them, chunk after chunk.

    Only reads of one value and sums into one accumulator may be exchanged.
    """
    names = list(program.steps)
    uses: dict[str, dict[str, str]] = {step: {} for step in names}
    for step in program.steps.values():
        for name, letter in (role for s in step.statements for role in s.roles if role[0] in program.registers):
            uses[step.name][name] = uses[step.name].get(name, "") + {"R": "r"}.get(letter, letter)
    at: dict[tuple[str, int], list[int]] = {}
    for index, (chunk, item) in enumerate(pair for segment in _lay_out(items) for pair in segment):
        at.setdefault((item.step.name, chunk), []).append(index)
    for i, first in enumerate(names):
        for j, then in enumerate(names):
            later = int(j <= i)  # the next chunk's
            if max(at[first, 1]) < min(at[then, 1 + later]):
                continue
            for name in sorted(uses[first].keys() & uses[then].keys()):
                if set(uses[first][name] + uses[then][name]) not in ({"r"}, {"A"}):
                    which = " of the chunk before" if later else ""
                    raise ScheduleError(
                        f"schedule {schedule.name}: step `{then}` must run after `{first}`{which}: they share `{name}`"
                    )


def rings_of(program: Program, schedule: Schedule, items: Iterable[Item]) -> tuple[Ring, ...]:
    """The schedule's rings with the tiles this program has, in the order they are first needed."""
    needed = list(dict.fromkeys(name for item in items for s in item.step.statements for name, _ in s.roles))
    tiles = [n for n in needed if n in program.tiles or (n == "rows" and program.record)]
    rings: list[Ring] = []
    for group, depth in schedule.rings.items():
        members = tuple(t for t in group.split() if t in tiles)
        if members:
            rings.append(Ring(members[0], members, depth))
    missing = set(tiles) - {t for r in rings for t in r.tiles}
    if missing:
        raise ScheduleError(f"schedule {schedule.name}: no ring for tile {', '.join(sorted(missing))}")
    return tuple(sorted(rings, key=lambda r: min(tiles.index(t) for t in r.tiles)))


def build_chain(program: Program, schedule: Schedule, asynchronous: bool) -> Chain:
    """Order the program's steps; raise `ScheduleError` where the order cannot work."""
    items = parse_order(program, schedule)
    check_order(program, schedule, items)
    parted = next((i.step.name for i in items if i.parts > 1), "")
    if parted and not asynchronous:
        raise ScheduleError(f"schedule {schedule.name}: step `{parted}` runs in parts, but products are done at once")
    rings = rings_of(program, schedule, items)
    walk = _Walk(program, asynchronous, {t: r.name for r in rings for t in r.tiles})
    walk.landed = {r.name: 0 for r in rings}
    layout = _lay_out(items)
    for chunk, item in (pair for segment in layout for pair in segment):
        for statement in item.step.statements:
            for ring in {walk.ring_of[n] for n, _ in statement.roles if n in walk.ring_of}:
                walk.open_uses[ring, chunk] += 1

    texts: list[list[str]] = []
    landed_ahead: dict[str, int] = {}
    under_way: list[str] = []
    for index, segment in enumerate(layout):
        walk.lines = []
        if index == 1:
            landed_ahead = dict(walk.landed)
        last = index == len(layout) - 1
        base = "0" if index == 0 else "n"
        for chunk, item in segment:
            ahead = item.ahead and not last and index > 0
            _emit(walk, item, chunk, f"{base} + 1" if ahead else base)
        if last:
            _await(walk, len(walk.pending))
        else:
            under_way = sorted({name for group in walk.pending for name in group.writes})
        texts.append(walk.lines)
    bodies = texts[1:-1]
    if any(body != bodies[0] for body in bodies[1:]):
        raise ScheduleError(f"schedule {schedule.name}: chunks differ, so there is no steady state")
    drain = [f"await<0>({', '.join(under_way)});"] if under_way else []
    epilogue = texts[-1]
    if not texts[0] and not drain:
        if epilogue != bodies[0]:
            raise ScheduleError(f"schedule {schedule.name}: the last chunk differs, though no step runs ahead")
        epilogue = []
    return Chain(rings, texts[0], bodies[0], drain, epilogue, landed_ahead)


def _lay_out(items: Sequence[Item]) -> list[list[tuple[int, Item]]]:
    """Segments of (chunk, item): the first chunk's leading steps, the bodies, the last chunk's remaining steps."""
    first = [(0, i) for i in items if i.ahead]
    bodies = [[(n + i.ahead, i) for i in items] for n in range(_CHUNKS - 1)]
    last = [(_CHUNKS - 1, i) for i in items if not i.ahead]
    return [first, *bodies, last]


def _emit(walk: _Walk, item: Item, chunk: int, chunk_text: str) -> None:
    """Write one item's statements, with what must stand before and after them."""
    if item.step.name == "await":
        _await(walk, len(walk.pending))
        return
    if item.step.name.startswith("land "):
        _land(walk, walk.ring_of[item.step.name.removeprefix("land ")], chunk)
        return
    part = f", part {item.part + 1} of {item.parts}" if item.parts > 1 else ""
    walk.lines.append(f"// {item.step.math}{part}{' (next chunk)' if chunk_text.endswith('+ 1') else ''}")
    for statement in (_later_part(s) if item.part else s for s in item.step.statements):
        _await(walk, _needed(walk, statement))
        rings = {walk.ring_of[n] for n, _ in statement.roles if n in walk.ring_of}
        for ring in sorted(rings):
            _land(walk, ring, chunk)
        walk.lines.append(_call(walk, statement, item, chunk_text))
        _check_reads(walk, statement, item)
        walk.used |= {name for name, letter in statement.roles if letter != "w"}
        if walk.asynchronous and statement.verb in GROUPS:
            group = _Group(
                {n for n, letter in statement.roles if letter in "WA"},
                {(n, chunk) for n, letter in statement.roles if letter in "RB"},
            )
            # Work is retired in order, so only the statement's last group can tell that it is over.
            walk.pending += [_Group(set(), set())] * (GROUPS[statement.verb] - 1) + [group]
        else:
            # What fetches numbers does not wait for them: the buffer has been read when work that used them is over.
            fetched = walk.asynchronous and statement.verb in FETCHES
            for ring in sorted(rings):
                if fetched:
                    walk.fetched.append((statement.args[0], ring, chunk))
                else:
                    _over(walk, ring, chunk)


def _later_part(statement: Statement) -> Statement:
    """The second and later parts of a product add to what the first has begun."""
    if statement.verb != "product":
        return statement
    roles = tuple((name, "A" if letter == "W" else letter) for name, letter in statement.roles)
    return Statement("accumulate", statement.args, roles)


def _needed(walk: _Walk, statement: Statement) -> int:
    """How many of the oldest pending groups must be over before the statement may run."""
    oldest = 0
    for index, group in enumerate(walk.pending):
        reads = {name for name, _ in group.reads}
        for name, letter in statement.roles:
            touches = name in group.writes and letter not in "A"
            overwrites = name in reads and letter in "wmB"
            if touches or overwrites:
                oldest = index + 1
    return oldest


def _await(walk: _Walk, count: int) -> None:
    if count == 0:
        return
    over, walk.pending = walk.pending[:count], walk.pending[count:]
    still = {n for g in walk.pending for n in g.writes}
    names = sorted({n for g in over for n in g.writes} - still)
    walk.lines.append(f"await<{len(walk.pending)}>({', '.join(names)});")
    for group in over:
        for ring, chunk in sorted({(walk.ring_of[n], c) for n, c in group.reads if n in walk.ring_of}):
            _over(walk, ring, chunk)
    arrived = [each for each in walk.fetched if each[0] in walk.used]
    walk.fetched = [each for each in walk.fetched if each not in arrived]
    walk.used.clear()
    for _, ring, chunk in arrived:
        _over(walk, ring, chunk)


def _over(walk: _Walk, ring: str, chunk: int) -> None:
    walk.open_uses[ring, chunk] -= 1
    if walk.open_uses[ring, chunk] == 0:
        if walk.landed[ring] != chunk + 1:
            raise ScheduleError(f"ring {ring}: a later chunk lands before chunk {chunk} is released; reorder its steps")
        walk.lines.append(f"release(ring_{ring});")


def _land(walk: _Walk, ring: str, chunk: int) -> None:
    if walk.landed[ring] > chunk + 1:
        raise ScheduleError(f"ring {ring}: chunk {chunk} is used after a later one has landed; reorder its steps")
    if walk.landed[ring] == chunk:
        walk.landed[ring] += 1
        walk.lines.append(f"land(ring_{ring});")


def _check_reads(walk: _Walk, statement: Statement, item: Item) -> None:
    """Registers must have been written by an earlier statement (the state S is there from the start)."""
    for name, letter in statement.roles:
        if name in walk.program.registers and letter in "rmRA" and name not in walk.written and name != "S":
            raise ScheduleError(f"step `{item.step.name}` reads `{name}` before any step has written it")
    walk.written |= {n for n, letter in statement.roles if letter in "wWBA"}


def _call(walk: _Walk, statement: Statement, item: Item, chunk_text: str) -> str:
    verb, split = statement.verb, ""
    if item.parts > 1:
        split = f"<{item.part}, {item.parts}>"
    args = [_ARGUMENT.sub(lambda m: _argument(walk, m, chunk_text), a) for a in statement.args]
    return f"{verb}{split}({', '.join(args)});"


def _argument(walk: _Walk, match: re.Match[str], chunk_text: str) -> str:
    name, member = match[1], match[2]
    if name == "chunk":
        return chunk_text
    if name not in walk.ring_of:
        return match[0]
    if member:
        return f"ring_{walk.ring_of[name]}.{name}().{member}()"
    stream = "stream" if walk.program.tiles[name].by == "columns" else ""
    return f"ring_{walk.ring_of[name]}.{name}({stream})"
