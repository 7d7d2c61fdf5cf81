"""Reading machine code: blocks, loops and how often they run, the longest way, on code written here and on kernels."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from qla.codegen.machine_code import Code, read_amd, read_sass
from qla.codegen.measure import measure
from qla.codegen.spec import KernelSpec
from qla.runtime.compilers.zig import ZigHip
from qla.targets import TARGETS

THREADS = 256


def amd(text: str, **more: object) -> Code:
    """Code of lines without their tabs; labels end with a colon."""
    lines = (line if line.endswith(":") else f"\t{line}" for line in dedent(text).strip().splitlines())
    return read_amd("\n".join(lines), THREADS, **more)  # type: ignore[arg-type]


def sass(text: str, **more: object) -> Code:
    """Code of lines ``NAME operands`` or ``@P0 NAME operands``; labels end with a colon."""
    lines = (line if line.endswith(":") else f"        /*0000*/ {line} ;" for line in dedent(text).strip().splitlines())
    return read_sass("\n".join(lines), THREADS, **more)  # type: ignore[arg-type]


def passes(code: Code) -> list[int | None]:
    """Of its loops, in the order of their headers."""
    return [loop.passes for loop in sorted(code.loops, key=lambda loop: loop.header)]


NESTED = """
    s_mov_b32 s2, 0
    .LBB0_1:
    v_add_f32_e32 v1, v1, v2 ; a comment
    s_mov_b32 s3, 0
    .LBB0_2:
    v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
    s_add_i32 s3, s3, 8
    s_cmp_lg_u32 s3, 64
    s_cbranch_scc1 .LBB0_2
    s_add_i32 s2, s2, 1
    s_cmp_lt_i32 s2, s9
    s_cbranch_scc1 .LBB0_1
    s_endpgm
"""


def test_inner_loops_count_as_often_as_they_run() -> None:
    code = amd(NESTED)
    assert passes(code) == [None, 8]
    outer = code.main_loop("v_mfma")
    assert outer.passes is None
    count = code.count(outer)
    assert count.instructions["v_mfma_f32_32x32x8_bf16"] == 8
    assert count.instructions["v_add_f32_e32"] == 1
    assert (count.total, count.open_loops) == (2 + 8 * 4 + 3, 0)
    assert (code.count().total, code.count().open_loops) == (1 + 37 + 1, 1)


def test_a_block_behind_the_end_that_jumps_back_is_no_loop() -> None:
    code = amd(
        """
        s_cbranch_scc1 .LBB0_2
        .LBB0_1:
        v_mov_b32_e32 v1, v2
        s_endpgm
        .LBB0_2:
        v_mov_b32_e32 v2, 0
        s_branch .LBB0_1
        """
    )
    assert code.loops == []
    assert code.count().total == 5  # by way of the block behind the end


def test_the_longest_of_two_ways_counts() -> None:
    code = amd(
        """
        s_cbranch_scc1 .LBB0_2
        ds_read_b32 v1, v2
        s_branch .LBB0_3
        .LBB0_2:
        v_mov_b32_e32 v1, v2
        v_mov_b32_e32 v2, v2
        v_mov_b32_e32 v3, v2
        .LBB0_3:
        s_endpgm
        """
    )
    assert code.count().instructions == {"s_cbranch_scc1": 1, "v_mov_b32_e32": 3, "s_endpgm": 1}


def test_a_loop_over_threads_runs_as_long_as_its_last() -> None:
    """`for (i = thread; i < 1000; i += 256)`, and `for (i = 0; i <= thread % 64; i++)`."""
    code = amd(
        """
        v_and_b32_e32 v3, 63, v0
        s_mov_b64 s[0:1], 0
        .LBB0_1:
        v_add_u32_e32 v0, 0x100, v0
        v_cmp_lt_u32_e32 vcc, 0x3e7, v0
        s_or_b64 s[0:1], vcc, s[0:1]
        s_andn2_b64 exec, exec, s[0:1]
        s_cbranch_execnz .LBB0_1
        s_or_b64 exec, exec, s[0:1]
        s_mov_b32 s4, 0
        s_mov_b64 s[2:3], 0
        .LBB0_2:
        v_cmp_eq_u32_e32 vcc, s4, v3
        s_add_i32 s4, s4, 1
        s_or_b64 s[2:3], vcc, s[2:3]
        s_andn2_b64 exec, exec, s[2:3]
        s_cbranch_execnz .LBB0_2
        s_endpgm
        """
    )
    assert passes(code) == [4, 64]


def test_a_loop_of_two_passes_by_a_mask() -> None:
    code = amd(
        """
        s_mov_b64 s[2:3], -1
        .LBB0_1:
        s_xor_b64 s[6:7], s[2:3], -1
        s_mov_b64 s[2:3], 0
        s_and_b64 vcc, exec, s[6:7]
        s_cbranch_vccz .LBB0_1
        s_endpgm
        """
    )
    assert passes(code) == [2]


def test_what_memory_decides_stays_open() -> None:
    code = amd(
        """
        s_load_dword s3, s[4:5], 0x0
        s_mov_b32 s2, 0
        .LBB0_1:
        s_add_i32 s2, s2, 1
        s_cmp_lt_i32 s2, s3
        s_cbranch_scc1 .LBB0_1
        s_endpgm
        """
    )
    assert passes(code) == [None]
    assert code.count().open_loops == 1


ARGUMENTS = """
    s_load_dwordx2 s[2:3], s[0:1], 0x10
    s_bitcmp0_b32 s3, 3
    s_cbranch_scc1 .LBB0_2
    v_exp_f32_e32 v1, v1
    v_exp_f32_e32 v2, v2
    .LBB0_2:
    s_endpgm
"""


@pytest.mark.parametrize(("flags", "exponentials"), [(None, 2), (8, 2), (1, 0)])
def test_ways_that_arguments_rule_out_do_not_count(flags: int | None, exponentials: int) -> None:
    code = amd(ARGUMENTS, arguments={} if flags is None else {0x14: flags})
    assert code.count().instructions["v_exp_f32_e32"] == exponentials


def test_a_number_that_is_not_known_may_be_given() -> None:
    text = """
        MOV R3, RZ
        .L_x_1:
        IADD3 R3, R3, 0x1, RZ
        ISETP.GE.AND P0, PT, R3, R9, PT
        @!P0 BRA `(.L_x_1)
        EXIT
    """
    assert passes(sass(text)) == [None]
    assert passes(sass(text, bound=4)) == [4]


def test_sass_loops() -> None:
    """By thread, by a uniform register through a predicate, one that waits for a barrier, and one that repeats."""
    code = sass(
        """
        S2R R1, SR_TID.X
        LOP3.LUT R2, R1, 0x1f, RZ, 0xc0, !PT
        .L_x_1:
        STS [R2], R4
        ISETP.GE.AND P0, PT, R2.reuse, 0x20, PT
        VIADD R2, R2, 0x20
        @!P0 BRA `(.L_x_1)
        UMOV UR4, URZ
        .L_x_2:
        HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0
        UIADD3 UR4, UR4, 0x2000, URZ
        UISETP.GE.U32.AND UP0, UPT, UR4, 0x6000, UPT
        PLOP3.LUT P3, PT, PT, PT, UP0, 0x80, 0x0
        @!P3 BRA `(.L_x_2)
        .L_x_3:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R2
        @!P0 BRA `(.L_x_3)
        .L_x_4:
        UBLKCP.G.S [UR10], [UR9], UR8
        @P1 BRA.U.ANY `(.L_x_4)
        EXIT
        BRA `(.L_x_3)
        """
    )
    assert passes(code) == [2, 3, None, None]
    count = code.count()
    assert count.instructions["HGMMA.64x128x16.F32.BF16"] == 3
    assert (count.instructions["STS"], count.open_loops) == (2, 0)


def test_sass_arguments() -> None:
    text = """
        LDC.64 R4, c[0x0][0x218]
        LOP3.LUT P0, RZ, R5, 0x8, RZ, 0xc0, !PT
        @!P0 BRA `(.L_x_1)
        MUFU.EX2 R1, R1
        .L_x_1:
        EXIT
    """
    assert sass(text).count().instructions["MUFU.EX2"] == 1
    assert sass(text, arguments={0xC: 8}).count().instructions["MUFU.EX2"] == 1
    assert sass(text, arguments={0xC: 1}).count().instructions["MUFU.EX2"] == 0


def test_code_without_such_a_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="no loop"):
        amd("s_endpgm").main_loop("v_mfma")


# ---- kernels


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_prepare_of_amd_is_read_to_its_end(target: str) -> None:
    """Its products can be counted by hand, and no loop is left open.

    A wave has those of squares of two tiles, and to merge inverted blocks, with squares of 16 in steps of 4, at first
    2 and then 2 for each of 2, and 3.
    """
    found = measure(KernelSpec("gated_delta_rule", "prepare", "bf16", 128, 128, target))
    assert found.kinds["matrix"] == 2 * 128 // TARGETS[target].facts["mfma_k"] + 4 * (2 + 2 * 2 + 3)
    assert found.count.open_loops == 0
    assert found.chunks == 1
    # The compiler's own opinion, in a comment that is not read.
    said = re.search(r"; Occupancy: (\d+)", ZigHip(TARGETS[target]).assembly(found.source))
    assert said
    assert found.occupancy.waves == int(said[1])


def test_scan_of_hopper_is_counted_by_the_chunk() -> None:
    found = measure(KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a"))
    products = {name: n for name, n in found.count.instructions.items() if name.startswith("HGMMA")}
    # Q S, K S: 8 each of 64 columns; A W, P V': 6 each of 32; Kᵀ V': 4 of 128.
    by_rows = {rows: sum(n for name, n in products.items() if f"64x{rows}x16" in name) for rows in (32, 64, 128)}
    assert by_rows == {rows: n * found.chunks for rows, n in {32: 12, 64: 16, 128: 4}.items()}
    assert found.kinds["matrix"] == sum(products.values())
    assert found.count.open_loops == 0
