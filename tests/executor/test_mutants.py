"""Changing emitted text in one place fails: the machine refuses it, or the result misses the bar."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import inputs
import pytest
import reference
import torch
from executor import build, machine, mutants
from executor.machine import Executor, run
from executor.mutants import Mutant

from qla.codegen.render import render
from qla.codegen.spec import KernelSpec, Source, Stage

STRIDES = {"barrier": 1, "wait": 1, "operands": 1, "mask": 1, "lane": 1, "index": 5}  # of each kind, one in so many
SECONDS = 20  # after which a mutant counts as one that does not end

# Survivors that change nothing that any device could show, by a part of their description.
EXPLAINED = {
    # Barriers that others make up for.
    "sync_tiles": "where gates are per head, the barrier within sum_gates is between what this one would part",
    "below `}`: sync();": "after the norms: where gates are per channel, nothing reads them before the next barrier",
    "solve_unit_lower(shared.L);`: sync();": "the inversion ends with a barrier of its own",
    # Changes that reach both factors of a product, or nothing.
    "u32x2{pack(x[1], x[0]), pack(x[2], x[3])}": "both operands of decayed products: k runs in another order for both",
    "u32x2{pack(x[0], x[1]), pack(x[3], x[2])}": "likewise",
    "if ((thread_id() / 2) < C) {": "threads beyond the matrix work on memory behind it that nobody uses by then",
    "RECORD / 32 - 1": "what threads without a piece of the record load goes nowhere",
    "(low + high + 1 + 1) / 2": "still between the ends of the search, which takes any such place",
    "(low + 1 + high + 1) / 2": "likewise",
    "(row * COLUMNS + 1 + column) / 2": "columns of pairs are even",
    "after += lane + 1 + offset < C": "nothing comes after the last row, whose lane is then not asked",
    "column / 17 * 16": "zeros above the diagonal are multiplied too",
    "q_norm[query] = wanted": "both waves of a square's rows have their norms, and both halves of each wave",
    "i % (i <= 128 ? 4 : 8)": "128 is a multiple of both",
    "number x[ROWS * COLUMNS];": "the matrix that is inverted takes more room than the keys in whose place it lies",
    "(1e-6f + 1 + of_key)": "below the bar: the norms of the keys are well above 1",
    "(1e-6f + 1 + row_square(": "likewise",
    "(head + 1 + 1) * (int)group": "of the value heads that are left, the workgroup's one team takes one",
    "x = args.lower_bound / (": "gates per head have no lower bound",
}

RAW: dict[str, Any] = {"use_gate_in_kernel": True}
SIGMOID: dict[str, Any] = {"use_beta_sigmoid_in_kernel": True}

Case = tuple[dict[str, Any], tuple[torch.Tensor, ...]]


def cases(name: str) -> list[Case]:
    """Calls that between them take every branch of the text, with gates that let states live on and strong ones."""
    long = inputs.make(name, T=129, H=1, HV=2, state=True, gate="long", seed=1, allow_neg_eigval=True, **SIGMOID)
    packed = inputs.make(
        name, T=135, H=2, HV=4, lengths=[0, 1, 64, 65], index_dtype=torch.int32, v_first=True, state=True,
        gate_dtype=torch.bfloat16, beta_dtype=torch.float16, seed=2, keys="raw", use_qk_l2norm_in_kernel=True, **RAW,
    )  # fmt: skip
    bounded: dict[str, Any] = {"lower_bound": -5.0} if name == "chunk_kda" else {}
    batch = inputs.make(name, T=64, B=2, H=1, HV=2, seed=3, gate_dtype=torch.float16, scale=0.7, **RAW, **bounded)
    strong = inputs.make(name, T=70, H=1, HV=2, gate="strong", seed=4)
    return [(a, reference.forward(name, **a)) for a in (long, packed, batch, strong)]


def explained(mutant: Mutant) -> bool:
    return any(part in str(mutant) for part in EXPLAINED)


def chosen(text: str) -> list[Mutant]:
    """A part of the mutants, spread over the text; of each kind every so many."""
    everything = list(mutants.mutants(text))
    return [m for kind, stride in STRIDES.items() for m in [m for m in everything if m.kind == kind][::stride]]


def outcome(target: str, name: str, calls: list[Case], source: Source) -> str:
    """How a mutant ends: empty where nothing told it from the original."""

    def sources(spec: KernelSpec) -> Source:
        return source if spec.canonical() == source.spec else render(spec)

    for seed, (arguments, expected) in enumerate(calls):
        try:
            o, final, _ = run(Executor(target, seed, sources), name, **arguments)
        except build.BuildError:
            return "refused by the compiler"
        except machine.ExecutionError as error:
            return f"stopped by the machine: {error}"
        rows = inputs.unpadded(arguments)
        for x, ref in ((o[:, :rows], expected[0][:, :rows]), (final, expected[1])):
            if reference.relative_error(x, ref) > reference.BARS_UNGATED[torch.bfloat16]:
                return "wrong result"
    return ""


@pytest.mark.parametrize(("target", "op"), [("gfx942", "gated_delta_rule"), ("gfx950", "kda")])
def test_mutants(target: str, op: str, record_property: Callable[[str, object], None]) -> None:
    """Between them the two have every macro of the CDNA templates but those of GLA's states."""
    name, began = f"chunk_{op}", time.perf_counter()
    calls, ends, survivors = cases(name), Counter[str](), list[tuple[Stage, Mutant]]()
    stages: tuple[Stage, ...] = ("prepare", "scan")
    for stage in stages:
        source = render(KernelSpec(op, stage, "bf16", 128, 128, target).canonical())
        assert outcome(target, name, calls, source) == ""
        for mutant in chosen(source.text):
            changed = replace(source, text=mutant.apply(source.text))
            end = mutants.isolated(partial(outcome, target, name, calls, changed), SECONDS).strip()
            ends[end.split(":")[0] or "survived"] += 1
            if not end:
                survivors.append((stage, mutant))
    count = ends.total()
    rate = 1 - len(survivors) / count
    counts = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    seconds = time.perf_counter() - began
    text = f"{target} {name}: {count} mutants, {rate:.1%} killed ({counts}), {seconds:.0f} s"
    record_property("summary", text)
    unexplained = [f"{stage}, {mutant}" for stage, mutant in survivors if not explained(mutant)]
    assert not unexplained, "\n".join([text, *unexplained])
    assert count >= 100
    assert rate >= 0.95
