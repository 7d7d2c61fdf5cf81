"""The command line: what it writes builds, what it says is so, and a miss shows in the exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import qla
from qla.codegen import builds, cli, demo, lines, matrix
from qla.codegen.ops import OPS, Op
from qla.codegen.resources import Resources
from qla.codegen.spec import KernelSpec
from qla.errors import CompilerNotFoundError, UnsupportedError
from qla.runtime import drivers
from qla.targets import TARGETS

RESULT = {"cuda": ".cubin", "hip": ".co", "c++": ".so"}
RUNNABLE = [op for op in OPS if demo.public_function(op)]
# The commands say `python`; it is the one that runs the tests.
ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    return result


def commands(text: str) -> list[str]:
    """The commands in the first lines of a source."""
    head = text.split("\n\n")[0].splitlines()
    return [line.removeprefix("//   ") for line in head if line.startswith("//   ")]


# emit -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["gated_delta_rule", "gla"])
@pytest.mark.parametrize("target", list(TARGETS))
def test_emitted_sources_build_with_their_own_command(target: str, op: str, tmp_path: Path) -> None:
    call("emit", op, "--target", target, "--dv", "64", "--output", str(tmp_path))
    sources = sorted(tmp_path.iterdir())
    # What does not look at values is not named after their head dim.
    assert [s.stem for s in sources] == [f"{op}_prepare_bf16_k128_v128", f"{op}_scan_bf16_k128_v64"]
    for source in sources:
        tried = 0
        for command in commands(source.read_text()):
            if shutil.which(command.split()[0], path=ENVIRONMENT["PATH"]) is None:
                continue
            tried += 1
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
                check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            built = source.with_suffix(RESULT[TARGETS[target].language])
            assert built.stat().st_size > 1000
            built.unlink()
        # All but CUDA's have one with the compiler that the tests bring along.
        assert tried or TARGETS[target].language == "cuda"


@pytest.mark.parametrize("target", list(TARGETS))
def test_build_commands_have_the_targets_flags(target: str) -> None:
    flags = set(TARGETS[target].flags) - {"-default-device"}  # for NVRTC, which has no host side
    for command in TARGETS[target].build.splitlines():
        assert flags <= set(command.split()), command


def test_emit_one_stage_and_options(tmp_path: Path) -> None:
    arguments = ("--stage", "scan", "--dtype", "fp16", "--dk", "64", "--loads", "strided", "--saves")
    folder = tmp_path / "new" / "folder"
    result = call("emit", "delta_rule", *arguments, "--schedule", "skewed", "--output", str(folder))
    (path,) = folder.iterdir()
    assert path.name == "delta_rule_scan_fp16_k64_v128_strided_saves_skewed.cu"
    assert result.output.splitlines()[0] == str(path)


def test_emit_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = call("emit", "kda", "--target", "host", "--stage", "prepare", "--output", "-").stdout
    assert text.startswith("// kda_prepare_bf16_k128_v128 for host")
    assert not list(tmp_path.iterdir())


def test_emit_writes_to_a_folder_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in ("gfx942", "gfx950"):
        call("emit", "kda", "--target", target, "--stage", "prepare")
        assert target in (tmp_path / target / "kda_prepare_bf16_k128_v128.hip").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("emit", "softmax"), "softmax"),
        (("emit", "gla", "--target", "sm_80"), "sm_90a"),
        (("emit", "gla", "--dtype", "fp32"), "bf16, fp16 on sm_90a"),
        (("emit", "gla", "--dk", "96"), "(64, 128)"),
        (("emit", "gla", "--stage", "backward"), "prepare, carry, combine, scan, all"),
        (("emit", "gla", "--stage", "carry"), "segments need a delta op"),
        (("emit", "gla", "--loads", "random"), "tile, strided"),
        (("emit", "gla", "--loads", "strided", "--target", "host"), "loads: got strided; supported: tile on host"),
        (("emit", "kda", "--saves"), "saves: got True for kda; supported: the ops delta_rule, gla"),
        (("emit", "gla", "--schedule", "fast"), "sm_90a has no schedule `fast`; it has serial"),
        (("emit", "gla", "--schedule", "skewed", "--target", "host"), "host has no schedule `skewed`; it has serial"),
        (("emit", "gla", "--schedule", "serial", "--stage", "prepare"), "supported: the stage scan"),
        (("compile", "--targets", "sm_90a,sm_80"), "sm_80"),
        (("demo", "--device", "tpu"), "auto, host, cuda"),
        (("demo", "--tokens", "0"), "tokens"),
        (("emit",), "argument"),
    ],
)
def test_bad_requests(arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments, code=2)
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


# list, lines ----------------------------------------------------------------------------------------------------------


def test_list_names_everything() -> None:
    result = call("list")
    for name in (*OPS, *TARGETS, "skewed"):
        assert name in result.output


def test_list_for_programs() -> None:
    found = json.loads(call("list", "--json").stdout)
    assert list(found["ops"]) == list(OPS)
    assert found["head_dims"] == [64, 128]
    assert found["targets"]["sm_90a"]["schedules"] == [s.name for s in TARGETS["sm_90a"].schedules]
    assert found["targets"]["host"]["kernels"] == len(matrix.full("host"))


def test_lines_are_attributed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """{# a comment
    over two lines #}
{%- set channel = gate == "channel" %}

for all
// nobody counts this
{%- if delta %}
for delta
{%- if gate == "head" %}
for one
{%- endif %}
{%- endif %}
{{ "different" if channel else "for each" }}
{{ verb(1,
        2) }}
{{ "for gla" if not delta }}
{%- if saves %}
saved
{%- endif %}
{%- call step("W") %}
in a step
{%- endcall %}
"""
    monkeypatch.setattr(lines, "_text", lambda package, name: text)
    monkeypatch.setattr(lines, "OPS", {op: OPS[op] for op in ("gated_delta_rule", "delta_rule", "kda", "gla")})
    use = lines.kernel_use("scan")
    delta = ("gated_delta_rule", "delta_rule", "kda")
    assert use.shared == 4  # for all, verb, step, in a step
    assert use.varied == 1
    assert use.partial == {delta: 1, ("gated_delta_rule",): 1, ("gla",): 1}
    assert (use.saves, use.control) == (1, 8)
    assert use.of("gated_delta_rule") == 2


@pytest.mark.parametrize("kernel", lines.KERNELS)
def test_ops_share_more_than_each_has_of_its_own(kernel: str) -> None:
    use = lines.kernel_use(kernel)
    assert use.shared > 0
    for op in OPS:
        assert use.partial.get((op,), 0) < use.shared + use.varied


def test_lines_shows_every_file() -> None:
    result = call("lines")
    for name in ("cdna.j2", "sm_90a.j2", "host.py", "gfx950.py", "prepare", "scan"):
        assert name in result.output


# compile --------------------------------------------------------------------------------------------------------------


def few(target: str) -> list[KernelSpec]:
    return [KernelSpec("gla", "prepare", "bf16", 64, 64, target), KernelSpec("gla", "scan", "fp16", 64, 64, target)]


def test_compile_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "full", few)
    result = call("compile", "--full", "--targets", "host,gfx950", "--jobs", "2")
    assert "4 kernels compiled" in result.output
    assert "0 unfit" in result.output


SPILLED = Resources(
    registers=255, accumulators=0, scalars=0, shared_bytes=0, spill_bytes=8, scratch_bytes=0, code_bytes=1,
    binary_bytes=1, serialized_wgmma=False, injected_waits=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (SPILLED, "8 bytes of registers are spilled"),
        (replace(SPILLED, spill_bytes=0, scratch_bytes=16), "16 bytes of scratch"),
        (replace(SPILLED, spill_bytes=0, serialized_wgmma=True), "serialized"),
    ],
)
def test_an_unfit_kernel_fails(resources: Resources, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "pairwise", few)
    monkeypatch.setattr(builds, "report", lambda data, log, target: resources)
    result = call("compile", "--targets", "host", code=1)
    assert said in result.output
    assert "2 unfit" in result.output


def test_a_kernel_that_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "pairwise", few)
    right = builds.render
    monkeypatch.setattr(builds, "render", lambda spec: replace(right(spec), text="this is not C++"))
    result = call("compile", "--targets", "host", code=1)
    assert "2 unfit" in result.output
    assert "source: " in result.output


# demo -----------------------------------------------------------------------------------------------------------------


def test_demo_passes_on_the_host() -> None:
    result = call("demo", "--device", "host", "--targets", "host", "--tokens", "100")
    assert f"all {2 * len(OPS) + len(RUNNABLE)} checks passed" in result.output
    for op in OPS:
        assert op in result.output


@pytest.mark.parametrize("planted", ["o", "state", "nan"])
def test_demo_fails_on_a_wrong_result(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = qla.chunk_gla

    def wrong(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = right(**arguments)
        assert state is not None
        if planted == "o":
            o[0, 70] *= 1.1
        elif planted == "state":
            state[0, 3] *= 1.1
        else:
            state[0, 0, 0, 0] = torch.nan
        return o, state

    monkeypatch.setattr(qla, "chunk_gla", wrong)
    monkeypatch.setattr(demo, "specs", lambda targets: [])
    result = call("demo", "--device", "host", "--tokens", "100", code=1)
    assert "miss" in result.output
    assert f"1 of {len(RUNNABLE)} checks missed" in result.output


def test_demo_fails_on_an_unfit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "specs", lambda targets: few("host"))
    monkeypatch.setattr(builds, "report", lambda data, log, target: SPILLED)
    result = call("demo", "--device", "host", "--tokens", "64", code=1)
    assert f"2 of {2 + len(RUNNABLE)} checks missed" in result.output


def test_demo_does_not_run_an_op_without_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "OPS", {"gla": OPS["gla"], "decay": Op(delta=False, gate="head")})
    monkeypatch.setattr(demo, "specs", lambda targets: [])
    result = call("demo", "--device", "host", "--tokens", "64")
    assert "decay has no public function qla.chunk_decay: compiled, not run" in result.output
    assert "all 1 checks passed" in result.output
    with pytest.raises(UnsupportedError, match="chunk_decay"):
        demo.run_op("decay", {}, "cpu", lambda n: None)


def test_demo_refuses_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device host" in call("demo", "--device", "cuda", code=2).stderr
    assert demo.pick_device("auto") == ("cpu", "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A GPU that torch sees; its properties can be changed."""
    properties = types.SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    drivers._target.cache_clear()
    yield properties
    drivers._target.cache_clear()


def without_cupy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    return "pip install '.[cuda13]'"


def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> str:
    def missing() -> None:
        raise CompilerNotFoundError("NVRTC is not installed; get it")

    monkeypatch.setattr(demo, "driver_for", lambda target, index: None)
    monkeypatch.setattr(demo, "compiler_for", lambda target: types.SimpleNamespace(identity=missing))
    return "NVRTC is not installed"


@pytest.mark.parametrize("missing", [without_cupy, without_nvrtc])
def test_demo_runs_on_the_cpu_where_the_gpu_cannot_be_used(
    missing: Callable[[pytest.MonkeyPatch], str], gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = missing(monkeypatch)
    monkeypatch.setattr(demo, "specs", lambda targets: [])
    result = call("demo", "--tokens", "64")
    (line,) = (line for line in result.output.splitlines() if line.startswith("runs on the CPU, not on the GPU: "))
    assert said in line
    assert f"all {len(RUNNABLE)} checks passed" in result.output
    assert said in call("demo", "--device", "cuda", code=2).stderr
    assert demo.pick_device("host") == ("cpu", "")


def test_demo_runs_on_the_cpu_where_the_gpu_is_not_supported(gpu: types.SimpleNamespace) -> None:
    gpu.major = 8
    place, why = demo.pick_device("auto")
    assert place == "cpu"
    assert "a GPU (sm_80); supported: sm_90 (H100, H200)" in why
    with pytest.raises(UnsupportedError, match="sm_80"):
        demo.pick_device("cuda")


def test_demo_takes_a_gpu_that_can_be_used(gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(demo, "driver_for", lambda target, index: asked.append((target, index)))
    monkeypatch.setattr(demo, "compiler_for", lambda target: types.SimpleNamespace(identity=lambda: None))
    assert demo.pick_device("auto") == demo.pick_device("cuda") == ("cuda", "")
    assert asked == [("sm_90a", 5)] * 2
