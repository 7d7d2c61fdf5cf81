"""The ids: what changes them, and what must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qla.codegen.spec import Field, KernelSpec, Limits, Source
from qla.runtime import ids
from qla.runtime.compilers import CompilerIdentity

SOURCE = Source(
    KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, "host"),
    "kernel",
    "c++",
    "int x;",
    (Field("q", "ptr"), Field("tokens", "i64")),
    Limits(1, 0, 0, 64),
)
ZIG = CompilerIdentity("zig-host", "0.17.1", "sha256:1")


def test_kernel_id_is_stable_across_releases() -> None:
    # A change here means that no cached kernel and no pack is found any more: raise ids.SCHEMA with it.
    assert ids.kernel_id(SOURCE, ("-O3",), ("x86_64-linux-none", "avx")) == (
        "eac68f37428e8512bed3b5191748d9e700bf1436da45f16c5b6d624d36704e1c"
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(SOURCE, text="int y;"),
        replace(SOURCE, entry="other"),
        replace(SOURCE, language="hip"),
        replace(SOURCE, abi=SOURCE.abi[:1]),
        replace(SOURCE, abi=SOURCE.abi[::-1]),
        replace(SOURCE, abi=(Field("q", "ptr"), Field("tokens", "i32"))),
        replace(SOURCE, spec=replace(SOURCE.spec, target="gfx950")),
    ],
)
def test_kernel_id_sees_every_part_of_the_source(other: Source) -> None:
    assert ids.kernel_id(other, (), ()) != ids.kernel_id(SOURCE, (), ())


def test_kernel_id_keeps_fields_apart() -> None:
    flags = [(), ("ab",), ("a", "b"), ("b", "a"), ("a",)]
    features = [(), ("ab",), ("a", "b"), ("b",)]
    every = {ids.kernel_id(SOURCE, some, others) for some in flags for others in features}
    assert len(every) == len(flags) * len(features)


def test_identify_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from qla.runtime.compilers import zig

    def refuse() -> None:
        raise AssertionError("a compiler was looked for")

    monkeypatch.setattr(zig, "_zig", refuse)
    assert len(ids.identify(SOURCE)) == 64


def test_build_id_sees_compiler_and_environment() -> None:
    kernel = ids.identify(SOURCE)
    every = [
        ids.build_id(kernel, ZIG, {}),
        ids.build_id(kernel[::-1], ZIG, {}),
        ids.build_id(kernel, replace(ZIG, build="sha256:2"), {}),
        ids.build_id(kernel, replace(ZIG, version="0.17.2"), {}),
        ids.build_id(kernel, replace(ZIG, name="zig-hip"), {}),
        ids.build_id(kernel, ZIG, {"A": "1"}),
        ids.build_id(kernel, ZIG, {"A": "2"}),
        ids.build_id(kernel, ZIG, {"A1": ""}),
    ]
    assert len(set(every)) == len(every)
    assert ids.build_id(kernel, ZIG, {"A": "1", "B": "2"}) == ids.build_id(kernel, ZIG, {"B": "2", "A": "1"})


def test_altering_environment_picks_only_what_the_compiler_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"NVRTC_APPEND_FLAGS": "-G", "HIPRTC_COMPILE_OPTIONS_APPEND": "-g", "NVRTCWIZ": "", "USER": "me"}
    assert ids.altering_environment("nvrtc", environ) == {"NVRTC_APPEND_FLAGS": "-G"}
    assert ids.altering_environment("hiprtc", environ) == {"HIPRTC_COMPILE_OPTIONS_APPEND": "-g"}
    assert ids.altering_environment("zig-host", environ) == {}
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-lineinfo")
    assert ids.altering_environment("nvrtc")["NVRTC_APPEND_FLAGS"] == "-lineinfo"
