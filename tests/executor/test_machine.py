"""What the machine must not let pass, each in a kernel of a few lines, and what it must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from executor import build
from executor.machine import ExecutionError
from executor.small import lanes_of, launch

SHARED = "__shared__ float x[256];\n  const int t = thread_id();\n  float* out = (float*)args.out;\n"
WIDE = "typedef double D __attribute__((ext_vector_type(2), aligned(8)));\n"
ASYNCHRONOUS = """
  __shared__ u32 x[128];
  const int t = thread_id();
  typedef __attribute__((address_space(1))) u32 G;
  typedef __attribute__((address_space(3))) u32 S;
  const u32* in = (const u32*)args.x;
  __builtin_amdgcn_global_load_lds((G*)(in + t), (S*)x, 4, 0, 0);
  __builtin_amdgcn_global_load_lds((G*)(in + 64 + t), (S*)(x + 64), 4, 0, 0);
"""


def floats(n: int = 256) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.zeros(n, np.float32)


def fails(message: str, body: str, *, size: int = 256, threads: int = 128, blocks: int = 1, **options: Any) -> None:
    with pytest.raises(ExecutionError, match=message) as caught:
        launch(body, threads=threads, blocks=blocks, outputs={"out": floats(size)}, **options)
    assert "seed 0" in str(caught.value)


# ---- memory


def test_memory_out_of_bounds() -> None:
    fails(r"out of bounds: write of 4 bytes at byte 1024 of out, which has 1024", SHARED + "out[t + 129] = 1.f;")
    before = SHARED + "out[t] = 1.f; out[t] = out[t - 1];"
    fails(r"out of bounds: read of 4 bytes at byte -4 of out", before, threads=64)
    fails(r"out of bounds: read of 16 bytes at byte 1016", SHARED + WIDE + "*(D*)out = *(D*)(out + 254);")


def test_lds_out_of_bounds() -> None:
    fails("array index 256 out of bounds", SHARED + "x[t + 129] = 1.f;")
    fails(r"out of bounds: write of 4 bytes at byte 1024 of LDS", SHARED + "float* y = x; y[t + 129] = 1.f;")
    fails(r"LDS: write of 16 bytes at byte 1016, past its 1024", SHARED + WIDE + "if (t == 127) *(D*)(x + 254) = 1.0;")


def test_registers_out_of_bounds() -> None:
    fails("array index 4 out of bounds, line", SHARED + "float y[4] = {}; out[t] = y[t % 5];")


def test_addresses_that_are_not_aligned() -> None:
    fails("not aligned for its type, line", SHARED + "if (t == 1) *(double*)(out + t) = 1.0;")


def test_more_lds_than_there_is() -> None:
    with pytest.raises(ExecutionError, match="1024 bytes of LDS, of which it has 1000"):
        launch(SHARED + "x[t] = out[t] = 0.f;", shared_bytes=1000, outputs={"out": floats()})


def test_reads_of_what_nothing_wrote() -> None:
    fails(r"LDS: read of 4 bytes at byte \d+, which nothing wrote", SHARED + "out[t] = x[t];")
    fails(r"out: read of 4 bytes at byte \d+, which nothing wrote", SHARED + "out[t] = out[t] + 1.f;")
    # What another workgroup left in LDS counts for nothing.
    body = SHARED + "if (block_id() == 0) x[t] = 1.f; else out[t] = x[t];"
    fails("which nothing wrote", body, blocks=2)


def test_writes_of_inputs() -> None:
    with pytest.raises(ExecutionError, match="x: write of 4 bytes at byte 0, which is an input"):
        launch("((float*)args.x)[0] = 1.f;", inputs={"x": floats()})


# ---- races


def test_races_in_lds() -> None:
    other = r"which another thread {} between the same barriers \(wave \d, lane \d+\)"
    fails(other.format("wrote"), SHARED + "x[t % 64] = 1.f;")
    body = "x[t] = 0.f; sync(); if (t < 64) x[t] = 1.f; else out[t] = x[t - 64];"
    fails(other.format("(wrote|read)"), SHARED + body)
    fails("between the same barriers", SHARED + "x[t] = 1.f; sync(); out[t] = x[t ^ 64]; x[t] = 2.f;")
    # Lanes of one wave do not run in step as far as a compiler is concerned.
    fails("between the same barriers", SHARED + "x[t] = 0.f; sync(); x[t] = 1.f; out[t] = x[t ^ 1];", threads=64)


def test_no_races_where_barriers_stand() -> None:
    body = SHARED + "x[t] = t; sync(); out[t] = x[t ^ 64]; sync(); x[t ^ 64] = 2.f; ((u16*)x)[256 + t] = 1;"
    for seed in range(5):
        found = floats()
        launch(body, threads=128, seed=seed, outputs={"out": found})
        np.testing.assert_array_equal(found[:128], np.arange(128) ^ 64)


def test_races_of_workgroups() -> None:
    fails("which another workgroup wrote", SHARED + "out[t] = block_id();", blocks=2)
    fails(
        "which another workgroup (wrote|read)",
        SHARED + "out[t + 128 * block_id()] = out[t] = 1.f;",
        blocks=2,
    )


# ---- barriers


def test_divergent_barriers() -> None:
    fails("divergent barrier: it is .*, and lane 0 of its wave", SHARED + "if (t & 1) sync();")
    fails("divergent barrier: this wave has returned", SHARED + "if (t < 64) return; sync();")
    body = SHARED + "if (t < 64) { x[t] = 1.f; sync(); out[t] = x[t]; } else sync();"
    fails("divergent barrier: wave 0 waits at another", body)
    fails("divergent wave", SHARED + "if (t & 1) x[t] = __builtin_amdgcn_readfirstlane(t);")


def test_barriers_without_fences() -> None:
    fails("a barrier without a release fence", SHARED + "x[t] = 1.f; __builtin_amdgcn_s_barrier();")
    fence = '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");'
    fails("without an acquire fence", SHARED + f"x[t] = 1.f; {fence} __builtin_amdgcn_s_barrier(); out[t] = x[t ^ 64];")


# ---- asynchronous loads


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        ("", "was not waited for"),
        ("__builtin_amdgcn_s_waitcnt(0xF71);", "was not waited for"),  # all but the last one
        ("sync();", "was not waited for"),
    ],
)
def test_asynchronous_loads_that_nothing_waits_for(waits: str, message: str) -> None:
    body = ASYNCHRONOUS + waits + "((u32*)args.out)[t] = x[64 + t];"
    with pytest.raises(ExecutionError, match=message):
        launch(body, inputs={"x": np.arange(128, dtype=np.uint32)}, outputs={"out": np.zeros(64, np.uint32)})


def test_asynchronous_loads() -> None:
    given, found = np.arange(128, dtype=np.uint32), np.zeros(64, np.uint32)
    read = " sync(); ((u32*)args.out)[t] = x[{} + (t ^ 1)];"
    launch(
        ASYNCHRONOUS + "__builtin_amdgcn_s_waitcnt(0xF70);" + read.format(64),
        inputs={"x": given},
        outputs={"out": found},
    )
    np.testing.assert_array_equal(found, 64 + (np.arange(64) ^ 1))
    body = ASYNCHRONOUS + "__builtin_amdgcn_s_waitcnt(0xF71);" + read.format(0) + "__builtin_amdgcn_s_waitcnt(0xF70);"
    launch(body, inputs={"x": given}, outputs={"out": found})
    np.testing.assert_array_equal(found, np.arange(64) ^ 1)
    with pytest.raises(ExecutionError, match="nothing waited for"):
        launch(ASYNCHRONOUS, inputs={"x": given}, outputs={"out": found})
    wide = ASYNCHRONOUS.replace(", 4, 0, 0", ", 16, 0, 0").replace("x[128]", "x[320]").replace("in + t)", "in)")
    with pytest.raises(ExecutionError, match="16 bytes, which this target does not have"):
        launch(wide, target="gfx942", inputs={"x": given}, outputs={"out": found})


# ---- single lanes, and the text


def test_functions_of_one_number() -> None:
    x = np.concatenate([np.linspace(-130, 129, 40), [0, -0.5, 1e-30, np.inf, -np.inf]]).astype(np.float32)
    found = lanes_of("__builtin_amdgcn_exp2f", x)
    with np.errstate(over="ignore"):
        exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    exact[x < -126] = 0
    np.testing.assert_array_max_ulp(found, exact, 1)
    x = np.concatenate([np.logspace(-37, 38, 50), [1, np.inf, 1.0000001]]).astype(np.float32)
    np.testing.assert_allclose(lanes_of("__builtin_amdgcn_logf", x), np.log2(x.astype(np.float64)), rtol=1e-6)
    np.testing.assert_allclose(lanes_of("__builtin_amdgcn_rsqf", x), x.astype(np.float64) ** -0.5, rtol=1e-7)


def test_conversion_to_bf16() -> None:
    x = np.array([1.0, 1.00390625, 1.01171875, 1e-40, 3e38, 3.4e38, np.inf, -2.7, np.nan], np.float32)
    body = "((u16*)args.out)[thread_id()] = __builtin_bit_cast(u16, (__bf16)((const float*)args.x)[thread_id()]);"
    given, found = np.zeros(64, np.float32), np.zeros(64, np.int16)
    given[: len(x)] = x
    launch(body, inputs={"x": given}, outputs={"out": found})
    expected = torch.from_numpy(x).bfloat16()
    got = torch.from_numpy(found[: len(x)]).view(torch.bfloat16)
    assert torch.equal(got[:-1], expected[:-1])
    assert got[-1].isnan()


def test_what_the_device_does_not_have_does_not_compile() -> None:
    with pytest.raises(build.BuildError, match="__builtin_amdgcn_s_sleep"):
        launch("__builtin_amdgcn_s_sleep(1);")
    with pytest.raises(build.BuildError, match="ds_read_tr16_b64"):
        launch("__builtin_amdgcn_ds_read_tr16_b64_v4i16(nullptr);", target="gfx942")
