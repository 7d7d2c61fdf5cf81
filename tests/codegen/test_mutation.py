"""Changing any one line of math in `scan` fails: each mutant is built for the CPU and run against the contract.

A mutant is one changed statement of the template: left out, done twice, a name exchanged for another of its kind, a
product that adds instead of sets (or the other way round), a tile read without its transposition. It must be refused,
by the renderer or the compiler, or give results that miss the bar. fp32, so that the bar is tight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import inputs
import jinja2
import pytest
import reference
import torch

import qla
from qla.codegen import render as render_module
from qla.codegen.ops import OPS
from qla.codegen.program import VERBS, Program
from qla.codegen.spec import KernelSpec, Source, Stage
from qla.errors import CompilationError, ScheduleError, TemplateError
from qla.runtime import plan
from qla.runtime.compilers.zig import ZigHost
from qla.targets import TARGETS

TARGET = TARGETS["host"]
SCAN = "kernels/scan.j2"
BAR = reference.BARS[torch.float32]

# Names that may stand for one another: of the same kind and, with K = V = C = 64, of the same shape.
KINDS = (
    ("K", "Kt", "Q", "V", "A", "P"),
    ("S", "O", "U", "V2"),
    ("Sr", "Vr", "Or", "W", "X"),
    ("minus_in", "left", "out"),
)


@dataclass(frozen=True)
class Mutant:
    """One changed line of the template."""

    line: int
    before: str
    after: str
    how: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.how}: {self.before} -> {self.after or '(nothing)'}"

    def apply(self, lines: list[str]) -> str:
        return "\n".join([*lines[: self.line - 1], self.after, *lines[self.line :]])


def template() -> list[str]:
    loader = render_module.environment().loader
    assert loader is not None
    return loader.get_source(render_module.environment(), SCAN)[0].split("\n")


def statement_lines(lines: list[str]) -> list[int]:
    """Numbers, from 1, of the lines between `call step` and `endcall`."""
    found, inside = [], False
    for number, line in enumerate(lines, 1):
        if "call step(" in line:
            inside = True
        elif "endcall" in line:
            inside = False
        elif inside and not line.startswith("{%"):
            found.append(number)
    return found


def mutants(lines: list[str]) -> Iterator[Mutant]:
    for number in statement_lines(lines):
        line = lines[number - 1]
        for how, after in changes(line):
            if after != line:
                yield Mutant(number, line, after, how)


def changes(line: str) -> Iterator[tuple[str, str]]:
    yield "left out", ""
    if any(set(VERBS[verb]) & set("mA") for verb in verbs_in(line)):
        yield "done twice", f"{line}\n{line}"
    for kind in KINDS:
        # What stands between braces but not between quotes is Jinja's; `{{ Kt }}` is a name of a tile too.
        for match in re.finditer(r"\{\{ (Kt) \}\}|(?<![\w.])(\w+)(?![\w(])|rows\.(\w+)", line):
            name = next(group for group in match.groups() if group)
            if name in kind and not in_condition(line, match.start()):
                for other in kind:
                    if other != name:
                        text = match[0].replace(name, other) if match[1] is None else other
                        yield f"{name} is {other}", line[: match.start()] + text + line[match.end() :]
    for verb, others in {"product": ["accumulate"], "accumulate": ["product"]}.items():
        for other in others:
            yield f"{verb} is {other}", re.sub(rf"\b{verb}\(", f"{other}(", line)
    yield "not transposed", re.sub(r"transposed\(((?:\{\{ Kt \}\})|\w+)\)", r"\1", line)
    for tile in ("A", "P", "Q", "K"):
        if re.search(r"product|accumulate", line):
            yield f"{tile} transposed", re.sub(rf"(?<=, ){tile}(?=, )", f"transposed({tile})", line)


def verbs_in(line: str) -> list[str]:
    return [verb for verb in VERBS if re.search(rf"\b{verb}\(", line)]


def in_condition(line: str, at: int) -> bool:
    """Whether the place is Jinja's: between braces, outside of quotes."""
    before = line[:at]
    return before.count("{{") > before.count("}}") and before.count('"') % 2 == 0


# ---- building and running --------------------------------------------------------------------------------------------


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[KernelSpec, str], Source]]:
    """Renders a spec with another text of the scan template."""
    package, texts = render_module.environment(), {}
    assert package.loader is not None
    layered = package.overlay(loader=jinja2.ChoiceLoader([jinja2.DictLoader(texts), package.loader]))
    monkeypatch.setattr(render_module, "environment", lambda: layered)

    def render(spec: KernelSpec, text: str) -> Source:
        texts[SCAN] = text
        return render_module.render.__wrapped__(spec)

    yield render
    render_module.render.cache_clear()


@dataclass(frozen=True)
class Case:
    """An op on a small problem: three chunks, the last of two tokens; keys and queries of any length."""

    op: str
    saves: bool
    arguments: dict[str, Any]
    expected: tuple[torch.Tensor, ...]

    def spec(self, stage: Stage) -> KernelSpec:
        return KernelSpec(self.op, stage, "fp32", 64, 64, "host", saves=self.saves).canonical()

    def error(self) -> float:
        """The largest error of a call."""
        if self.saves:
            call = qla.GLAChunkFwd(scale=self.arguments["scale"])
            results: tuple[Any, ...] = call(**{n: self.arguments[n] for n in ("q", "k", "v", "g", "initial_state")})
            results += (call.h,)
        else:
            results = getattr(qla, f"chunk_{self.op}")(**self.arguments)
        return max(reference.relative_error(x, ref) for x, ref in zip(results, self.expected, strict=True))


def cases() -> Iterator[Case]:
    """The four ops; GLA by the call that also keeps the states at the chunks' starts."""
    for op in ("gated_delta_rule", "kda", "gla", "delta_rule"):
        function, saves = f"chunk_{op}", op == "gla"
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if OPS[op].delta else {}
        arguments = inputs.make(
            function, T=130, H=2 if saves else 1, HV=2, K=64, V=64, dtype=torch.float32, keys="raw", state=True, seed=3,
            scale=0.3, **options,
        )  # fmt: skip
        expected = reference.forward(function, **arguments)
        if saves:
            states = [arguments["initial_state"].double()]
            for end in (64, 128, 130):
                part = {n: x[:, :end] if n in ("q", "k", "v", "g") else x for n, x in arguments.items()}
                states.append(reference.forward(function, **part)[1])
            expected += (torch.stack(states, 1),)
        yield Case(op, saves, arguments, expected)


def steps_of(text: str, case: Case) -> dict[str, Any]:
    """The program's statements, to tell whether a mutant differs for an op."""
    program, features = Program(), OPS[case.op]
    render_module.environment().from_string(text).render(
        delta=features.delta, gate=features.gate, saves=case.saves, outputs=True, loads="tile", C=64, K=64, V=64,
        columns=64, factors="half", reach=False,
        tile=program.tile, vector=program.vector, register=program.register, step=program.step,
    )  # fmt: skip
    return program.steps


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    """So that what a kernel does not write cannot be what the call before it wrote."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialized_is_nan")
def test_no_line_of_math_can_be_changed(
    rendered: Callable[[KernelSpec, str], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, lines = ZigHost(TARGET), template()
    sources: dict[KernelSpec, Source] = {}
    built: dict[KernelSpec, bytes] = {}
    monkeypatch.setattr(plan, "render_source", lambda spec: sources[spec])
    monkeypatch.setattr(plan, "fetch_binary", lambda source: built[source.spec])
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "layouts", {})

    def build(source: Source) -> bytes | None:
        try:
            return compiler.compile(source).data
        except CompilationError:
            return None

    def run(case: Case, source: Source, binary: bytes) -> float:
        sources[source.spec], built[source.spec] = source, binary
        plan._plans.clear()
        plan.layouts.clear()
        return case.error()

    killed: set[Mutant] = set()
    survivors: dict[Mutant, str] = {}
    everything = list(mutants(lines))
    for case in cases():
        text = "\n".join(lines)
        for stage in ("prepare", "scan"):
            spec = case.spec(stage)  # type: ignore[arg-type]
            sources[spec] = rendered(spec, text)
            built[spec] = compiler.compile(sources[spec]).data
        scan = case.spec("scan")
        unchanged = run(case, sources[scan], built[scan])
        assert unchanged <= BAR

        ends: Counter[str] = Counter()
        waiting: list[tuple[Mutant, Source]] = []
        original = steps_of(text, case)
        for mutant in everything:
            # Names are exchanged for the first op that has the line; lines are taken out for each of them.
            if mutant in killed and mutant.how not in ("left out", "done twice"):
                continue
            try:
                if steps_of(mutant.apply(lines), case) != original:
                    waiting.append((mutant, rendered(scan, mutant.apply(lines))))
            except ScheduleError:
                ends["refused by the scheduler"] += 1
                killed.add(mutant)
            except TemplateError:
                pass  # a name that this op does not have; another one may
        texts = {source.text: source for _, source in waiting}
        with ThreadPoolExecutor(2) as pool:
            binaries = dict(zip(texts, pool.map(build, texts.values()), strict=True))
        for mutant, source in waiting:
            binary = binaries[source.text]
            if binary is None:
                ends["refused by the compiler"] += 1
            elif run(case, source, binary) > BAR:
                ends["wrong result"] += 1
            else:
                survivors[mutant] = case.op
                continue
            killed.add(mutant)
        print(f"{case.op}: {dict(ends)}; error of the unchanged kernel {unchanged:.1e}, bar {BAR:.0e}")
        assert ends["wrong result"] >= 5
    undeclared = [m for m in everything if m not in killed and m not in survivors]
    print(f"{len(everything)} mutants: {len(killed)} killed, {len(undeclared)} name what no op has there")
    assert not survivors, "\n".join(f"{op}: {mutant}" for mutant, op in survivors.items())
    # Every line has mutants, and every line's were killed.
    assert {m.line for m in killed} == set(statement_lines(lines))
    assert len(killed) >= 5 * len(undeclared)


def test_every_line_has_a_mutant() -> None:
    lines = template()
    numbers = statement_lines(lines)
    assert len(numbers) >= 15
    assert {m.line for m in mutants(lines)} == set(numbers)
