"""Schedules: what is refused. `test_chain.py` runs the text that is emitted for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sources import HOPPER, SERIAL, SKEWED, declare

from qla.codegen.layout import shared_layout
from qla.codegen.render import render
from qla.codegen.schedule import Chain, build_chain
from qla.codegen.spec import KernelSpec
from qla.errors import ScheduleError
from qla.targets import TARGETS


def chain_of(op: str, order: Sequence[str], **changes: Any) -> Chain:
    return build_chain(declare(op), replace(SKEWED, name="trial", order=tuple(order), **changes), asynchronous=True)


def without(order: Sequence[str], *names: str) -> list[str]:
    return [entry for entry in order if entry not in names]


def test_steps_that_an_op_lacks_are_passed_over() -> None:
    text = "\n".join(build_chain(declare("gla"), SKEWED, True).steady)
    assert "V2" not in text
    assert "product<0, 2>(O" in text


@pytest.mark.parametrize("step", ["Vr", "S", "O", ">U", "out", "store", ">V", ">W", ">V2", ">rows"])
def test_a_missing_step_is_refused(step: str) -> None:
    name = step.removeprefix(">")
    with pytest.raises(ScheduleError, match=f"trial: step `{name}` runs 0 of 1 parts"):
        chain_of("gated_delta_rule", without(SKEWED.order, step))


def test_a_misspelled_step_is_reported_as_the_missing_one() -> None:
    with pytest.raises(ScheduleError, match="step `U` runs 0 of 1"):
        chain_of("gated_delta_rule", [entry.replace(">U", ">u") for entry in SKEWED.order])


def test_a_missing_part_is_refused() -> None:
    with pytest.raises(ScheduleError, match="step `QS` runs 1 of 2 parts"):
        chain_of("gated_delta_rule", without(SKEWED.order, ">QS:2/2"))


@pytest.mark.parametrize("step", ["Vr", "store"])
def test_a_step_that_runs_twice_is_refused(step: str) -> None:
    with pytest.raises(ScheduleError, match=f"trial: parts of `{step}` are out of order"):
        chain_of("gated_delta_rule", [*SKEWED.order, step])


def test_parts_out_of_order_are_refused() -> None:
    swapped = {">QS:1/2": ">QS:2/2", ">QS:2/2": ">QS:1/2"}
    with pytest.raises(ScheduleError, match="parts of `QS` are out of order"):
        chain_of("gated_delta_rule", [swapped.get(entry, entry) for entry in SKEWED.order])


def test_parts_of_different_sizes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="step `QS` runs 2 of 3 parts, which differ in size or chunk"):
        chain_of("gated_delta_rule", [">QS:2/3" if entry == ">QS:2/2" else entry for entry in SKEWED.order])


@pytest.mark.parametrize("step", [">U", ">V", ">W", "S", "out"])
def test_a_step_whose_verbs_have_no_parts_is_refused(step: str) -> None:
    order = [part for e in SKEWED.order for part in ((f"{e}:1/2", f"{e}:2/2") if e == step else (e,))]
    with pytest.raises(ScheduleError, match=f"step `{step.removeprefix('>')}`.*parts"):
        chain_of("gated_delta_rule", order)


@pytest.mark.parametrize("entry", [">>U", "U:1", "U 1/2", "U:x/2", ""])
def test_an_entry_that_cannot_be_read_is_refused(entry: str) -> None:
    with pytest.raises(ScheduleError, match=r"cannot read `.*`; write `step`"):
        chain_of("gated_delta_rule", [*SKEWED.order, entry])


@pytest.mark.parametrize(
    ("op", "step", "before", "what"),
    [
        # A value is read before it is written.
        ("gated_delta_rule", "V2", "Vr", "V2"),
        ("gated_delta_rule", "U", "W", "U"),
        ("gated_delta_rule", "out", "store", "Or"),
        ("delta_rule", "V", "W", "W"),
        ("kda", "Vr", "S", "Vr"),
        ("gla", "Sr", "QS", "Sr"),
        # The state changes before the chunk has used it.
        ("kda", "U", "decay", "S"),
        ("gla", "Sr", "decay", "S"),
    ],
)
def test_a_step_before_one_that_it_builds_on_is_refused(op: str, step: str, before: str, what: str) -> None:
    order = without(SERIAL.order, before)
    order.insert(order.index(step), before)
    with pytest.raises(ScheduleError, match=f"trial: step `{before}` must run after `{step}`.*`{what}`"):
        chain_of(op, order)


@pytest.mark.parametrize(
    ("op", "step", "before", "what"),
    [
        ("gated_delta_rule", "S", ">rows", "left"),
        ("delta_rule", "S", ">U", "S"),
        ("gla", "out", ">QS:1/2", "O"),
    ],
)
def test_a_value_that_the_next_chunk_replaces_too_soon_is_refused(op: str, step: str, before: str, what: str) -> None:
    order = without(SKEWED.order, before)
    order.insert(order.index(step), before)
    name = before.strip(">").partition(":")[0]
    with pytest.raises(ScheduleError, match=f"step `{name}` must run after `{step}` of the chunk before.*`{what}`"):
        chain_of(op, order)


@pytest.mark.parametrize(("step", "after"), [("decay", "S"), ("QS", "O")])
def test_a_block_that_starts_after_its_sum_is_refused(step: str, after: str) -> None:
    order = without(SERIAL.order, step)
    order.insert(order.index(after) + 1, step)
    with pytest.raises(ScheduleError, match=f"trial: step `{after}` must run after `{step}`: they share `{after}`"):
        chain_of("gated_delta_rule", order)


def test_the_parts_of_a_step_belong_to_one_chunk_ahead() -> None:
    order = ["QS:2/2" if entry == ">QS:2/2" else entry for entry in SKEWED.order]
    with pytest.raises(ScheduleError, match=r"trial: step `QS` runs 2 of 2 parts, which differ in size or chunk"):
        chain_of("gla", order)


def test_a_tile_without_a_ring_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"trial: no ring for tile P$"):
        chain_of("gated_delta_rule", SKEWED.order, rings={"K Kt V rows": 3, "Q": 3, "A": 3})


def test_a_buffer_still_in_use_is_not_landed_again() -> None:
    """V travels with P here, and V of chunk n + 1 is needed before P of chunk n."""
    rings = {"K Kt rows": 3, "Q": 3, "A": 3, "P V": 3}
    with pytest.raises(ScheduleError, match=r"ring P: chunk 0 is used after a later one has landed; reorder its steps"):
        chain_of("kda", [">V", *without(SKEWED.order, ">V")], rings=rings)


def test_without_a_steady_state_the_schedule_is_refused() -> None:
    """The second chunk must wait for the state of the first, which the first has nothing to wait for."""
    with pytest.raises(ScheduleError, match="chunks differ, so there is no steady state"):
        chain_of("gated_delta_rule", without(SERIAL.order, "await"))


def test_parts_are_refused_where_products_run_at_once() -> None:
    with pytest.raises(ScheduleError, match="trial: step `QS` runs in parts, but products are done at once"):
        build_chain(declare("gated_delta_rule"), replace(SKEWED, name="trial"), asynchronous=False)


def test_shared_memory_over_the_limit_is_refused() -> None:
    program = declare("kda")
    chain = build_chain(program, SKEWED, True)
    deep = tuple(replace(ring, depth=4) for ring in chain.rings)
    used = shared_layout(program, chain.rings, 1, 64, HOPPER.shared_limit).total
    assert used <= HOPPER.shared_limit
    with pytest.raises(ScheduleError, match=rf"\d+ bytes .* exceed the target's {HOPPER.shared_limit} \(rings .*: 4"):
        shared_layout(program, deep, 1, 64, HOPPER.shared_limit)


def test_a_schedule_with_too_deep_rings_is_refused_when_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = replace(SKEWED, name="deep", rings=dict.fromkeys(SKEWED.rings, 4))
    monkeypatch.setitem(TARGETS, "sm_90a", replace(HOPPER, schedules=(SKEWED, deep)))
    with pytest.raises(ScheduleError, match="exceed the target's"):
        render(KernelSpec("kda", "scan", "bf16", 128, 128, "sm_90a", schedule="deep"))


@pytest.mark.parametrize("target", TARGETS)
def test_an_unknown_schedule_is_refused_with_the_known_ones(target: str) -> None:
    known = ", ".join(s.name for s in TARGETS[target].schedules)
    with pytest.raises(ScheduleError, match=f"{target} has no schedule `fastest`; it has {known}"):
        render(KernelSpec("gla", "scan", "bf16", 64, 64, target, schedule="fastest"))


def test_the_host_refuses_steps_that_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    host = TARGETS["host"]
    order = (*("Vr", "S", "O", "out", "store", ">Sr", ">U", ">QS", ">V", ">rows", ">decay", ">W", ">V2"),)
    ahead = replace(host, schedules=(replace(host.schedules[0], order=order),))
    monkeypatch.setitem(TARGETS, "host", ahead)
    render.cache_clear()
    with pytest.raises(ScheduleError, match="one chunk after the other"):
        render(KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, "host"))
    render.cache_clear()
