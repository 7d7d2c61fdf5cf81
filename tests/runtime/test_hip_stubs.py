"""HIP through the real hip-python, on shared libraries in place of ROCm's that record what arrives in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hip_stubs
import pytest

pytest.importorskip("hip")

LAUNCH_US = 5.0


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hip_stubs.build(tmp_path_factory.mktemp("stubs") / "rocm")


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second runtime, with a name like those that come with torch."""
    folder = hip_stubs.build(tmp_path_factory.mktemp("stubs") / "of torch", version=70000000, suffix=".7")
    return str(folder / "lib" / "libamdhip64.so.7")


@pytest.fixture
def child(rocm: Path) -> Callable[..., str]:
    def run(name: str, *arguments: str) -> str:
        program = f"import sys, hip_children; hip_children.{name}(*sys.argv[1:])"
        return hip_stubs.run(program, rocm, *arguments)

    return run


def test_every_byte_of_a_launch_arrives(child: Callable[..., str]) -> None:
    child("launch")


def test_a_status_becomes_an_error_with_its_name(child: Callable[..., str]) -> None:
    child("fail")


def test_cost_of_a_launch(child: Callable[..., str], record_property: Callable[[str, object], None]) -> None:
    microseconds = float(child("cost"))
    record_property("summary", f"a HIP launch costs the host {microseconds:.2f} us (limit {LAUNCH_US:.0f})")
    assert microseconds <= LAUNCH_US


def test_hiprtc_gets_the_source_and_gives_the_code(child: Callable[..., str]) -> None:
    child("compile_")


def test_a_call_from_the_source_to_the_launch_and_again_from_the_cache(child: Callable[..., str]) -> None:
    compiled, kernels = map(int, child("call").split())
    assert compiled == kernels >= 2
    assert child("call").split() == ["0", str(kernels)]


def test_the_runtime_of_torch_is_used(child: Callable[..., str], of_torch: str) -> None:
    child("use_of_torch", of_torch)


def test_a_second_runtime_is_refused(child: Callable[..., str], rocm: Path, of_torch: str) -> None:
    said = child("refuse_two", of_torch)
    assert "two HIP runtimes are loaded" in said
    assert str(rocm / "lib" / "libamdhip64.so") in said
    assert of_torch in said


def test_the_doctor_finds_the_libraries(child: Callable[..., str], rocm: Path) -> None:
    found = {name: rest for name, *rest in (line.split("|") for line in child("diagnose").splitlines())}
    assert found["HIP library"] == ["7.2.53211", f"{rocm / 'lib' / 'libamdhip64.so'} (found by hip-python)", ""]
    assert found["hiprtc"] == ["7.2", str(rocm / "lib" / "libhiprtc.so"), ""]
    assert found["hip-python"][0]


def test_the_doctor_tells_what_torch_mapped_and_warns_of_a_second(child: Callable[..., str], of_torch: str) -> None:
    found = {line.split("|")[0]: line.split("|")[1:] for line in child("diagnose", of_torch).splitlines()}
    assert found["HIP library"] == ["7.0.0", f"{of_torch} (mapped by torch)", ""]
    (part,) = [line for line in child("diagnose", of_torch, "twice").splitlines() if line.startswith("HIP library")]
    assert "two HIP runtimes are loaded" in part
