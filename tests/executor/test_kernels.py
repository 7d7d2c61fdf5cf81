"""Every op on both AMD targets, lane by lane, against the float64 recurrence."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any

import inputs
import pytest
import reference
import torch
from executor.machine import NAMES, Device, Executor, run

import qla

GDN, DELTA, KDA, GLA = reference.FUNCTIONS
LENGTHS = [0, 1, 64, 65]
Record = Callable[[str, object], None]
Choices = dict[str, Any]

# ---- cases: every pair of choices of an op occurs together once


def axes(name: str) -> dict[str, list[Any]]:
    """What a call may choose, by what it concerns."""
    types = [torch.float32, torch.bfloat16, torch.float16]
    found: dict[str, list[Any]] = {
        "dtype": [torch.bfloat16, torch.float16],
        "dims": [(64, 64), (64, 128), (128, 64), (128, 128)],
        "strided": [False, True],
        "state": ["none", "given"] if name == DELTA else ["none", "given", "v first"],
        "index": [torch.int32, torch.int64],
        "scale": [None, 0.7],
    }
    if name != GLA:
        found["keys"] = ["unit", "raw", "l2norm"]
        found["beta_dtype"] = types
    if name in (GDN, KDA):
        found["beta"] = ["plain", "sigmoid", "doubled"]
    if name != DELTA:
        found["gate"] = ["ordinary", "strong", "none"] + ["raw"] * (name in (GDN, KDA)) + ["bounded"] * (name == KDA)
        found["gate_dtype"] = types
    return found


def pairwise(choices: dict[str, list[Any]]) -> list[Choices]:
    """Rows in which any two choices of two axes occur together at least once; greedy, and the same on every run."""
    names = list(choices)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i, j in product(range(len(choices[a])), range(len(choices[b])))
    }
    rows: list[Choices] = []
    while missing:
        (a, i), (b, j) = min(missing)
        row = {a: i, b: j}
        for name in names:
            if name not in row:
                row[name] = max(range(len(choices[name])), key=partial(gain, missing, row, name))
        missing -= {((x, row[x]), (y, row[y])) for x, y in combinations(names, 2)}
        rows.append({name: choices[name][at] for name, at in row.items()})
    return rows


def gain(missing: set[Any], row: dict[str, int], name: str, n: int) -> int:
    return sum(((x, at), (name, n)) in missing or ((name, n), (x, at)) in missing for x, at in row.items())


def options(row: Choices) -> dict[str, Any]:
    """Keyword arguments of `inputs.make` for a row of choices."""
    K, V = row["dims"]
    found: dict[str, Any] = {
        "K": K, "V": V, "dtype": row["dtype"], "state": row["state"] != "none", "v_first": row["state"] == "v first",
    }  # fmt: skip
    if row["scale"] is not None:
        found["scale"] = row["scale"]
    if row.get("keys") in ("raw", "l2norm"):
        found["keys"] = "raw"
        found |= {"use_qk_l2norm_in_kernel": True} if row["keys"] == "l2norm" else {}
    if row.get("beta", "plain") != "plain":
        # Betas from a sigmoid are as large as they come, so keys have to be of norm 1.
        found["keys"] = "unit"
        found |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": row["beta"] == "doubled"}
    if row.get("gate") in ("raw", "bounded"):
        found |= {"use_gate_in_kernel": True} | ({"lower_bound": -5.0} if row["gate"] == "bounded" else {})
    elif "gate" in row:
        found["gate"] = row["gate"]
    return found | {name: row[name] for name in ("gate_dtype", "beta_dtype") if name in row}


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same numbers two apart, NaN between them."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def poison_padding(arguments: dict[str, Any]) -> None:
    """NaN after the last sequence."""
    end = inputs.unpadded(arguments)
    for name in ("q", "k", "v", "g", "beta"):
        if name in arguments:
            arguments[name][:, end:] = torch.nan


def check(
    executor: Executor, name: str, arguments: dict[str, Any], expected: tuple[torch.Tensor, ...], ungated: bool = False
) -> Device:
    rows = inputs.unpadded(arguments)
    o, final, device = run(executor, name, **arguments)
    pairs = ((o[:, :rows], expected[0][:, :rows]), (final, expected[1]))
    errors = [reference.relative_error(x, ref) for x, ref in pairs]
    bar = (reference.BARS_UNGATED if ungated else reference.BARS)[arguments["q"].dtype]
    assert max(errors) <= bar, f"{name} on {executor.target}, seed {executor.seed}: errors of o and state {errors}"
    return device


@pytest.mark.parametrize("name", reference.FUNCTIONS)
@pytest.mark.parametrize("target", NAMES)
def test_ops(target: str, name: str, record_property: Record) -> None:
    began, seed, accesses, count = time.perf_counter(), 0, 0, 0
    for row in pairwise(axes(name)):
        shapes: tuple[Choices, ...] = ({"T": 129}, {"T": 135, "lengths": LENGTHS, "index_dtype": row["index"]})
        for shape in shapes:
            seed += 1
            arguments = inputs.make(name, H=1, HV=2, seed=seed, **shape, **options(row))
            if row["strided"]:
                arguments |= {x: spread(arguments[x]) for x in ("q", "k", "v")}
            expected = reference.forward(name, **arguments)
            poison_padding(arguments)
            # Bounded gates with the biases of `make` are nearly none.
            ungated = name == DELTA or row["gate"] in ("none", "bounded")
            accesses += check(Executor(target, seed), name, arguments, expected, ungated).accesses
            count += 1
    seconds = time.perf_counter() - began
    text = f"{target} {name}: {count} calls within the bars, {accesses:.1e} accesses checked, {seconds:.0f} s"
    record_property("summary", text)
    assert count >= 20


@pytest.mark.parametrize("name", reference.FUNCTIONS)
@pytest.mark.parametrize("target", NAMES)
def test_longer(target: str, name: str) -> None:
    """Nine chunks of 64, several heads of queries and keys and two value heads to each."""
    arguments = inputs.make(name, T=513, H=2, HV=4, state=True, seed=5)
    check(Executor(target, 5), name, arguments, reference.forward(name, **arguments))


@pytest.mark.parametrize("name", reference.FUNCTIONS)
@pytest.mark.parametrize("target", NAMES)
def test_groups_and_batches(target: str, name: str) -> None:
    """A group of five value heads, whose last does not fill a team's turn; two rows of the batch."""
    arguments = inputs.make(name, T=66, B=2, H=2, HV=10, K=64, V=64, state=True, seed=6)
    check(Executor(target, 6), name, arguments, reference.forward(name, **arguments))


@pytest.mark.parametrize("target", NAMES)
def test_views_of_one_buffer(target: str) -> None:
    """Queries, keys and values side by side, as a projection leaves them."""
    arguments = inputs.make(GDN, T=70, H=2, K=64, V=64, state=True, seed=10)
    expected = reference.forward(GDN, **arguments)
    parts = torch.cat([arguments[x] for x in ("q", "k", "v")], dim=-1)
    arguments |= dict(zip(("q", "k", "v"), (parts[..., :64], parts[..., 64:128], parts[..., 128:]), strict=True))
    check(Executor(target, 10), GDN, arguments, expected)


@pytest.mark.parametrize("name", [GDN, KDA])
@pytest.mark.parametrize("target", NAMES)
def test_order_of_waves_changes_no_bit(target: str, name: str, record_property: Record) -> None:
    arguments = inputs.make(name, T=130, H=1, HV=2, state=True, seed=7)
    first = run(Executor(target, 0), name, **arguments)
    for seed in range(1, 21):
        o, final, _ = run(Executor(target, seed), name, **arguments)
        assert inputs.same_bits(o, first[0]), f"seed {seed}"
        assert inputs.same_bits(final, first[1]), f"seed {seed}"
    record_property("summary", f"{target} {name}: 21 orders of waves and workgroups, equal bit for bit")


# ---- kernels that write what the published chunk ops return: against the same call on the CPU


@pytest.mark.parametrize(("K", "V", "dtype"), [(64, 128, torch.bfloat16), (128, 64, torch.float16)])
@pytest.mark.parametrize("target", NAMES)
def test_chunk_states(target: str, K: int, V: int, dtype: torch.dtype) -> None:
    arguments = inputs.make(GLA, T=160, H=2, K=K, V=V, dtype=dtype, state=True, seed=8)
    del arguments["output_final_state"]
    call = qla.GLAChunkFwd(scale=0.3)
    _, device = compare(target, call, arguments)
    assert device.products


@pytest.mark.parametrize(("K", "V", "dtype"), [(64, 128, torch.bfloat16), (128, 64, torch.float16)])
@pytest.mark.parametrize("target", NAMES)
def test_chunk_factors(target: str, K: int, V: int, dtype: torch.dtype) -> None:
    arguments = inputs.make(DELTA, T=160, H=2, K=K, V=V, dtype=dtype, beta_dtype=dtype, seed=9)
    del arguments["output_final_state"]
    head_major = {x: y.transpose(1, 2).contiguous() for x, y in arguments.items()}
    compare(target, qla.DeltaNetChunkFwd(), head_major)


def compare(target: str, call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, Device]:
    expected = call(**arguments)
    found, device = Executor(target, 8).call(call, **arguments)
    bar = reference.BARS[arguments["q"].dtype]
    for x, ref in zip(found, expected, strict=True):
        assert (x is None) == (ref is None)
        assert x is None or reference.relative_error(x, ref) <= bar
    return found, device
