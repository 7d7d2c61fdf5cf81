"""The targets' data: names that exist, schedules that name real steps and tiles, limits that make sense."""

from __future__ import annotations

import dataclasses
import re

import pytest
from sources import declare

from qla.codegen.ops import OPS
from qla.codegen.render import environment, render, schedule_of
from qla.codegen.spec import HEAD_DIMS, KernelSpec
from qla.targets import TARGETS

every_target = pytest.mark.parametrize("name", TARGETS)

# Of one workgroup: what the vendor's programming guides give as the most that a kernel may ask for.
MOST_SHARED = {"sm_90a": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024, "host": 0}
LOCKSTEP = {"cuda": 32, "hip": 64, "c++": 1}  # threads that a workgroup comes in multiples of, by language


PROGRAMS = [declare(op, saves) for op in OPS for saves in (False, True)]
STEPS = {step for program in PROGRAMS for step in program.steps}
TILES = {tile for program in PROGRAMS for tile in program.tiles} | {"rows"}


def test_the_four_promised_targets_are_there() -> None:
    assert set(TARGETS) >= {"sm_90a", "gfx942", "gfx950", "host"}


def test_a_device_has_one_target() -> None:
    devices = [(target.language, target.device) for target in TARGETS.values()]
    assert len(set(devices)) == len(devices)
    assert all(target.hardware for target in TARGETS.values())


@every_target
def test_a_target_is_registered_under_its_own_name(name: str) -> None:
    assert TARGETS[name].name == name
    for part in ("", "_prepare", "_scan"):
        assert f"tile/{TARGETS[name].vocabulary}{part}.j2" in environment().list_templates()


@every_target
def test_numbers_make_sense(name: str) -> None:
    target = TARGETS[name]
    assert target.shared_limit == MOST_SHARED.get(name, target.shared_limit)
    assert target.threads.keys() == target.chunk.keys()
    for threads in target.threads.values():
        assert 0 < threads <= 1024
        assert threads % LOCKSTEP[target.language] == 0
    assert set(target.chunk) == {"none", "head", "channel"} >= {op.gate for op in OPS.values()}
    # Saved states are 64 tokens apart.
    assert all(chunk in (16, 32, 64) for chunk in target.chunk.values())
    assert set(target.dtypes) >= {"bf16", "fp16"}
    assert all(target.columns(dv) and dv % target.columns(dv) == 0 for dv in HEAD_DIMS)


@every_target
def test_every_workgroup_has_its_number_of_threads(name: str) -> None:
    target = TARGETS[name]
    for schedule in target.schedules:
        for dv in HEAD_DIMS:
            streams = min(schedule.streams, dv // target.columns(dv))
            threads = target.scan_threads(streams)
            assert threads % LOCKSTEP[target.language] == 0
            assert 0 < threads <= 1024
            assert dv % (streams * target.columns(dv)) == 0


@every_target
def test_build_commands_name_the_architecture_and_both_files(name: str) -> None:
    target = TARGETS[name]
    source = {"cuda": "{name}.cu", "hip": "{name}.hip", "c++": "{name}.cpp"}[target.language]
    binary = {"cuda": "{name}.cubin", "hip": "{name}.co", "c++": "{name}.so"}[target.language]
    commands = target.build.splitlines()
    assert commands
    for command in commands:
        assert command.split()[0] in ("nvcc", "hipcc", "python")
        assert source in command.split()
        assert f"-o {binary}" in command
        assert target.language == "c++" or name.removeprefix("sm_") in command
        # What is built by hand computes what is built here; `-default-device` is for NVRTC, which has no host side.
        assert {*target.flags} - {"-default-device"} <= {*command.split()}
    assert all(flag.startswith("-") for flag in target.flags)
    # NaN and infinity keep their meaning.
    assert not any("fast-math" in flag or "finite" in flag for flag in target.flags)


@every_target
def test_the_default_schedule_is_the_first(name: str) -> None:
    schedules = TARGETS[name].schedules
    assert schedules
    assert len({s.name for s in schedules}) == len(schedules)
    assert schedule_of(KernelSpec("kda", "scan", "bf16", 64, 64, name)) is schedules[0]
    for schedule in schedules:
        op = next(op for op, features in OPS.items() if features.gate in schedule.gates)
        assert schedule_of(KernelSpec(op, "scan", "bf16", 64, 128, name, schedule=schedule.name)) is schedule


@every_target
def test_schedules_name_known_steps_and_tiles_only(name: str) -> None:
    for schedule in TARGETS[name].schedules:
        entries = [entry.removeprefix(">") for entry in schedule.order if entry != "await"]
        landed = [entry.removeprefix("land ") for entry in entries if entry.startswith("land ")]
        steps = [re.sub(r":.*", "", entry) for entry in entries if not entry.startswith("land ")]
        assert set(steps) == STEPS, "a step that no op has is a misspelled one"
        assert set(landed) <= TILES
        tiles = " ".join(schedule.rings).split()
        assert sorted(tiles) == sorted(TILES)
        assert all(depth >= 1 for depth in schedule.rings.values())
        assert schedule.streams >= 1
        assert schedule.unroll >= 1


def test_hopper_has_a_serial_and_a_skewed_schedule_and_amd_a_serial_one() -> None:
    ahead = {s.name: any(entry.startswith(">") for entry in s.order) for s in TARGETS["sm_90a"].schedules}
    assert ahead["skewed"]
    assert not ahead["serial"]
    for name in ("gfx942", "gfx950"):
        assert "serial" in {s.name for s in TARGETS[name].schedules}


@every_target
def test_every_schedule_renders_for_every_op(name: str) -> None:
    for schedule in TARGETS[name].schedules:
        for op in (op for op, features in OPS.items() if features.gate in schedule.gates):
            source = render(KernelSpec(op, "scan", "bf16", 128, 128, name, schedule=schedule.name))
            assert source.limits.shared_bytes <= TARGETS[name].shared_limit
            assert source.limits.chunk == TARGETS[name].chunk[OPS[op].gate]


def test_pairs_have_times_for_each_gate_that_they_are_for() -> None:
    (paired,) = (s for s in TARGETS["sm_90a"].schedules if s.streams == 2)
    costs = TARGETS["sm_90a"].costs
    assert costs is not None
    assert set(costs.pair_chunk_us) == set(paired.gates)
    for gate, (alone, full) in costs.pair_chunk_us.items():
        # One pair takes longer than a single column block, else no call would take these.
        assert costs.scan_chunk_us[gate][0] < alone <= full
        assert costs.scan_chunk_us[gate][1] < full


@every_target
def test_a_target_is_data(name: str) -> None:
    target = TARGETS[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.shared_limit = 1  # type: ignore[misc]
    values = [*target.facts.values(), *vars(target).values()]
    assert not any(callable(value) for value in values)
