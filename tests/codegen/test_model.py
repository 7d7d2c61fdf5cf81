"""The model of times: cycles of instructions, occupancy against documented figures, and how parts add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from qla.codegen.instruction_costs import Cycles, cycles, kind_of, kinds
from qla.codegen.machine_code import Count
from qla.codegen.model import Occupancy, occupancy, time_of, working_waves
from qla.targets import TARGETS
from qla.targets.chips import CHIPS, H200, MI325X, MI355X, Chip

AMD = (MI325X, MI355X)


def of(chip: Chip, **counts: int) -> Cycles:
    """Of one wave; double underscores stand for dots."""
    return cycles(Count(Counter({name.replace("__", "."): n for name, n in counts.items()})), chip)


# ---- the chips


@pytest.mark.parametrize(
    ("chip", "name", "flops"),
    [
        (MI325X, "v_mfma_f32_32x32x8_bf16", 2 * 32 * 32 * 8),
        (MI325X, "v_mfma_f32_16x16x16_f16", 2 * 16 * 16 * 16),
        (MI355X, "v_mfma_f32_32x32x16_bf16", 2 * 32 * 32 * 16),
        (MI355X, "v_mfma_f32_16x16x32_f16", 2 * 16 * 16 * 32),
        (H200, "HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16 // 4),  # a warp's part
        (H200, "HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
    ],
)
def test_cycles_of_products_give_the_published_peak(chip: Chip, name: str, flops: int) -> None:
    taken = cycles(Count(Counter({name: 1})), chip).matrix
    peak = chip.processors * chip.schedulers * chip.mhz * flops / taken / 1e6
    # NVIDIA's figure is at a clock of 1830 MHz.
    assert peak == pytest.approx(chip.tflops * (chip.mhz / 1830 if chip is H200 else 1), rel=0.002)


def test_vector_units_give_the_published_peak() -> None:
    """163.4 and 157.3 TFLOP/s in float32, of packed fused multiply-adds."""
    for chip, published in ((MI325X, 163.4), (MI355X, 157.3)):
        flops = chip.processors * chip.schedulers * chip.mhz * 64 * 4 / of(chip, v_pk_fma_f32=1).vector / 1e6
        assert flops == pytest.approx(published, rel=0.002)


def test_chips_are_those_of_the_targets() -> None:
    for name, chip in CHIPS.items():
        assert chip.target == name
        assert chip.processors == TARGETS[name].processors
        assert chip.name in TARGETS[name].hardware
        assert chip.shared_bytes - chip.shared_reserved == TARGETS[name].shared_limit


# ---- instructions


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("v_mfma_f32_32x32x8_bf16", "matrix"), ("v_accvgpr_read_b32", "vector"), ("v_exp_f32_e32", "vector"),
        ("ds_read_b64_tr_b16", "shared"), ("global_store_short_d16_hi", "global"), ("buffer_load_dword", "global"),
        ("s_load_dwordx4", "scalar"), ("s_cbranch_scc1", "scalar"), ("s_waitcnt", "wait"), ("s_nop", "wait"),
        ("s_barrier", "barrier"),
        ("HGMMA.64x64x16.F32.BF16", "matrix"), ("HMMA.1688.F32.TF32", "matrix"), ("F2FP.BF16.F32.PACK_AB", "vector"),
        ("HFMA2.BF16_V2", "vector"), ("LDSM.16.M88.4", "shared"), ("LDS.128", "shared"), ("STS", "shared"),
        ("LDG.E.128", "global"), ("LDGSTS.E.BYPASS.128", "global"), ("UTMALDG.4D", "global"), ("LDC", "scalar"),
        ("UIADD3", "scalar"), ("S2R", "scalar"), ("BRA", "scalar"), ("SYNCS.ARRIVE.TRANS64", "wait"),
        ("WARPGROUP.DEPBAR.LE", "wait"), ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
    ],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    language = "hip" if name.islower() else "cuda"
    assert kind_of(name, language) == kind
    count = Count(Counter({name: 3}))
    assert {k: n for k, n in kinds(count, language).items() if n} == {kind: 3}


def test_vector_instructions() -> None:
    for chip in AMD:
        assert of(chip, v_add_f32_e32=3) == Cycles(vector=12, issue=12)
        assert of(chip, v_mul_lo_u32=1).vector == 16
        # A product takes the vector unit's turn in which it is issued, and no more.
        assert of(chip, v_mfma_f32_16x16x16_f16=1) == Cycles(matrix=16, vector=4, issue=4)
    assert (of(MI325X, v_exp_f32_e32=1).vector, of(MI355X, v_exp_f32_e32=1).vector) == (16, 8)
    assert of(H200, FFMA=1, MUFU__EX2=1, F2FP__BF16__F32__PACK_AB=1, F2F__F16__F32=1) == Cycles(vector=19, issue=4)


def test_shared_memory() -> None:
    """64 lanes: 32 a cycle, and 128 bytes a cycle, 256 where CDNA 4 reads."""
    expected = {
        "ds_read_u16": (2, 2), "ds_read_b32": (2, 2), "ds_read_b64": (4, 2), "ds_read2_b64": (8, 4),
        "ds_read_b128": (8, 4), "ds_read_b64_tr_b16": (4, 2), "ds_write_b128": (8, 8), "ds_write2st64_b32": (4, 4),
        "ds_bpermute_b32": (2, 2),
    }  # fmt: skip
    for name, (cdna3, cdna4) in expected.items():
        assert (of(MI325X, **{name: 1}).shared, of(MI355X, **{name: 1}).shared) == (cdna3, cdna4), name
    assert of(H200, LDS=1, LDS__128=1, LDSM__16__M88__4=1, STS__U16=1).shared == 1 + 4 + 4 + 1


def test_the_way_to_memory() -> None:
    assert of(MI325X, global_load_dwordx4=1).l1 == 16
    assert of(MI325X, global_store_short=1).l1 == 4
    assert of(H200, STG__E__128=1, UTMALDG__4D=1).l1 == 8


def test_unknown_products_are_refused() -> None:
    for chip, name in ((MI325X, "v_mfma_f32_32x32x16_bf16"), (MI355X, "v_mfma_i32_32x32x8_i8"), (H200, "IMMA.16832")):
        with pytest.raises(ValueError, match=f"no cycles for {name} on {chip.name}"):
            cycles(Count(Counter({name: 1})), chip)


# ---- occupancy


@pytest.mark.parametrize(
    ("registers", "waves"),
    [(1, 8), (64, 8), (65, 7), (72, 7), (80, 6), (96, 5), (97, 4), (128, 4), (129, 3), (168, 3), (256, 2), (512, 1)],
)
def test_waves_of_a_simd_by_registers(registers: int, waves: int) -> None:
    """As `llvm-calc-occupancy` and AMD's table for CDNA 2 and 3 have it: 512 registers in eights, at most 8 waves."""
    for chip in AMD:
        assert occupancy(chip, 256, registers, 0).waves == waves


def test_workgroups_by_lds() -> None:
    assert occupancy(MI325X, 256, 64, 32768) == Occupancy(2, 2)
    assert occupancy(MI325X, 256, 64, 32769) == Occupancy(1, 1)
    assert occupancy(MI355X, 256, 64, 163840 // 4) == Occupancy(4, 4)
    assert occupancy(MI325X, 512, 50, 0) == Occupancy(4, 8)  # the example of llvm-calc-occupancy


def test_workgroups_of_hopper() -> None:
    """By the registers of a multiprocessor (65536), its shared memory with 1 KiB taken per workgroup, and 64 warps."""
    assert occupancy(H200, 128, 128, 0).workgroups == 4
    assert occupancy(H200, 128, 32, 0).workgroups == 16
    assert occupancy(H200, 192, 224, 232448) == Occupancy(1, 2)
    assert occupancy(H200, 128, 32, 115712).workgroups == 2
    assert occupancy(H200, 128, 32, 115713).workgroups == 1


def test_waves_that_work() -> None:
    assert (working_waves(H200, 192, "scan"), working_waves(H200, 128, "prepare")) == (4, 4)
    assert working_waves(MI325X, 256, "scan") == 4


# ---- how parts add up

PARTS = Cycles(matrix=1000, vector=800, issue=1200, shared=100, l1=10)


def test_alone_a_wave_waits_for_everything() -> None:
    time = time_of(PARTS, MI325X, waves=4, workgroups=1, moved=0, busy=304)
    assert time.parts == {"matrix": 1000, "vector": 800, "issue": 1200, "LDS": 400, "L1": 40, "memory": 0}
    assert (time.floor, time.sum, time.cycles) == (1200, 1000 + 1200 + 400, 2600)
    assert time.bound == "issue"
    assert time.us == pytest.approx(2600 / 2100)


def test_more_waves_hide_what_exceeds_the_floor() -> None:
    time = time_of(PARTS, MI325X, waves=4, workgroups=4, moved=0, busy=304)
    # Each wave has turns of its own, so that four of them issue in a quarter of the time.
    assert time.parts["issue"] == 300
    assert (time.floor, time.bound) == (1000, "matrix")
    assert time.cycles == 1000 + (2600 - 1000) / 4
    # On Hopper they share them.
    assert time_of(PARTS, H200, waves=4, workgroups=4, moved=0, busy=132).parts["issue"] == 1200


def test_memory_takes_its_share_of_the_bandwidth() -> None:
    full = time_of(PARTS, MI325X, waves=4, workgroups=1, moved=60000, busy=304)
    assert full.parts["memory"] == pytest.approx(60000 * 304 / 6e6 * 2100)
    assert (full.bound, full.cycles) == ("memory", full.parts["memory"])
    alone = time_of(PARTS, MI325X, waves=4, workgroups=1, moved=60000, busy=1)
    assert alone.cycles == 2600


def test_a_workgroup_of_more_waves_takes_more_of_each_scheduler() -> None:
    once = time_of(PARTS, MI325X, waves=4, workgroups=1, moved=0, busy=1)
    twice = time_of(PARTS, MI325X, waves=8, workgroups=1, moved=0, busy=1)
    assert twice.parts["matrix"] == 2 * once.parts["matrix"]
    assert twice.parts["LDS"] == 2 * once.parts["LDS"]
    assert twice.sum == 2 * once.sum
    assert twice.cycles < 2 * once.cycles


def test_a_faster_chip_is_faster() -> None:
    fast = replace(MI325X, mhz=2 * MI325X.mhz)
    slow_time, fast_time = (time_of(PARTS, chip, 4, 1, 0, 1).us for chip in (MI325X, fast))
    assert fast_time == slow_time / 2
