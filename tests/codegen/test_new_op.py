"""Adding an op whose features all exist is a line: here a head gate without the delta rule, which no public op has."""

from __future__ import annotations

import inputs
import pytest
import reference
import torch
from typer.testing import CliRunner

from qla.codegen import cli, matrix
from qla.codegen.builds import build
from qla.codegen.ops import OPS, Op
from qla.codegen.render import render
from qla.codegen.spec import HEAD_DIMS, KernelSpec, Stage
from qla.ops import forward
from qla.targets import TARGETS

NEW, FUNCTION = "decayed", "chunk_decayed"


@pytest.fixture(autouse=True)
def new_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, NEW, Op(delta=False, gate="head"))
    monkeypatch.setitem(reference.DELTA, FUNCTION, False)
    monkeypatch.setitem(reference.GATE, FUNCTION, "head")


@pytest.mark.parametrize("target", TARGETS)
def test_both_stages_render(target: str) -> None:
    own = [spec for spec in matrix.full(target) if spec.op == NEW]
    assert {spec.stage for spec in own} == {"prepare", "scan"}
    for spec in own:
        assert spec.name in render(spec).text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stage", ["prepare", "scan"])
def test_both_stages_compile(stage: Stage, target: str) -> None:
    for dk in HEAD_DIMS:
        assert build(KernelSpec(NEW, stage, "bf16", dk, dk, target)).problems == ()


def test_the_command_line_knows_it() -> None:
    runner = CliRunner()
    assert NEW in runner.invoke(cli.app, ["list"]).output
    assert f"{NEW}_scan" in runner.invoke(cli.app, ["emit", NEW, "--target", "host", "--output", "-"]).output
    assert NEW in runner.invoke(cli.app, ["lines"]).output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dk", HEAD_DIMS)
def test_it_runs(dk: int, dtype: torch.dtype) -> None:
    a = inputs.make(FUNCTION, T=150, H=2, HV=4, K=dk, V=64, dtype=dtype, lengths=[1, 64, 0, 80], state=True)
    cu_seqlens, state = a["cu_seqlens"], a["initial_state"]
    result = forward(NEW, False, a["q"], a["k"], a["v"], a["g"], None, cu_seqlens, None, None, state, True)
    o, final = reference.forward(FUNCTION, **a)
    rows = inputs.unpadded(a)
    assert reference.relative_error(result.o[:, :rows], o[:, :rows]) <= reference.BARS[dtype]
    assert result.final_state is not None
    assert reference.relative_error(result.final_state, final) <= reference.BARS[dtype]
