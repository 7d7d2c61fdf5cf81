"""Peers get inputs with which they compute what a case asks for, checked with stand-ins that have their interfaces."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import qla
from qla.bench import inputs
from qla.bench.cli import app
from qla.bench.isolate import Process, Setup, WorkerError
from qla.bench.peers import PEERS, NotOfferedError
from qla.bench.reference import recurrence, relative_error
from qla.bench.runner import Runner, batches, read_rows
from qla.bench.workloads import Case, load, select


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., Any]) -> None:
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:n]))
        vars(module).update(functions if n == len(parts) else {})
        monkeypatch.setitem(sys.modules, module.__name__, module)


def small(op: str, name: str, dtype: str = "bf16", seed: str = "001") -> Case:
    return select(load(), op=op, seed=seed, name=name, dtype=dtype)[0].shrink(130, 4)


def errors(peer: str, case: Case) -> tuple[float, float]:
    given = inputs.tensors(case, "cpu")
    before = {name: x.clone() for name, x in given.items()}
    call = PEERS[peer].call(case, given)
    results = call.outputs(call.run())
    assert all(torch.equal(x, before[name]) for name, x in given.items())
    output, state = (relative_error(x, y) for x, y in zip(results, recurrence(case, given), strict=True))
    return output, state


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    def recurrent_gdn(q: Any, k: Any, v: Any, g: Any = None, **more: Any) -> Any:
        return qla.chunk_gated_delta_rule(q, k, v, g, more.pop("beta"), **more)

    def recurrent_gla(q: Any, k: Any, v: Any, gk: Any = None, **more: Any) -> Any:
        return qla.chunk_gla(q, k, v, gk, **more)

    stand_in(monkeypatch, "fla.ops.gla", chunk_gla=qla.chunk_gla, fused_recurrent_gla=recurrent_gla)
    stand_in(monkeypatch, "fla.ops.kda", chunk_kda=qla.chunk_kda, fused_recurrent_kda=qla.chunk_kda)
    stand_in(
        monkeypatch, "fla.ops.delta_rule", chunk_delta_rule=qla.chunk_delta_rule,
        fused_recurrent_delta_rule=qla.chunk_delta_rule,
    )  # fmt: skip
    stand_in(
        monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=qla.chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule=recurrent_gdn,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("GDNFwd", "prefill-4k"), ("GDNFwd", "prefill-raw-ragged"), ("GDNFwd", "decode-b1"),
        ("GDNFwd", "prefill-v-first-narrow"), ("KDAFwd", "kda-tp1-4x1024"), ("DeltaNetFwd", "varlen-ragged"),
        ("DeltaNetFwd", "decode-l2norm"), ("DeltaNetChunkFwd", "train-2k"), ("GLAChunkFwd", "train-2k"),
        ("GLAFwd", "prefill-2k"), ("GLAFwd", "decode-b1"),
    ],
)  # fmt: skip
def test_fla(fla: None, op: str, name: str) -> None:
    assert max(errors("fla", small(op, name))) < 0.006


def flashinfer_prefill(
    q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, scale: Any = None, initial_state: Any = None,
    output_final_state: bool = False, cu_seqlens: Any = None, use_qk_l2norm_in_kernel: bool = False,
    output: Any = None, output_state: Any = None, max_seqlen: int = 0,
) -> Any:  # fmt: skip
    """Linear gates, no batch dimension, states `[N, HV, V, K]`, results in the caller's memory."""
    assert not use_qk_l2norm_in_kernel
    assert max_seqlen == int(cu_seqlens.diff().max())
    o, state = qla.chunk_gated_delta_rule(
        q[None], k[None], v[None], g.log()[None], beta[None], scale, initial_state, output_final_state,
        cu_seqlens=cu_seqlens, state_v_first=True,
    )  # fmt: skip
    return output.copy_(o[0]), output_state.copy_(state)


def flashinfer_decode(
    q: Any, k: Any, v: Any, state: Any, A_log: Any, a: Any, dt_bias: Any, b: Any, scale: Any, output: Any, l2norm: bool
) -> Any:
    """Raw gates and betas; the state is updated where it is."""
    o, new = qla.chunk_gated_delta_rule(
        q, k, v, a, b, scale, state, True, use_qk_l2norm_in_kernel=l2norm, use_beta_sigmoid_in_kernel=True,
        state_v_first=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return output.copy_(o), state.copy_(new)


@pytest.mark.parametrize(
    "name", ["prefill-4k", "varlen-4x1k", "prefill-v-first-narrow", "decode-b1", "decode-gate-fused"]
)
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stand_in(monkeypatch, "flashinfer.gdn_prefill", chunk_gated_delta_rule=flashinfer_prefill)
    stand_in(monkeypatch, "flashinfer.gdn_decode", gated_delta_rule_decode_pretranspose=flashinfer_decode)
    assert max(errors("flashinfer", small("GDNFwd", name))) < 0.008


def test_what_is_not_offered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "flashinfer.gdn_prefill", chunk_gated_delta_rule=flashinfer_prefill)
    stand_in(monkeypatch, "flash_qla", chunk_gated_delta_rule=lambda q, k, v, g, beta, output_final_state: None)
    raw, packed = small("GDNFwd", "prefill-raw-ragged"), small("GDNFwd", "varlen-4x1k")
    for peer, case, what in (
        ("flashinfer", raw, "use_"), ("flashinfer", small("KDAFwd", "4096"), "op"), ("flashqla", packed, "cu_seqlens"),
        ("flashinfer", small("GDNFwd", "decode-beta-l2norm"), "allow_neg_eigval"), ("flashkda", packed, "op"),
        ("torch", select(load(), seed="h200", name="tp8-65536")[0], "1024 chunks"),
    ):  # fmt: skip
        with pytest.raises(NotOfferedError, match=what):
            PEERS[peer].call(case, inputs.tensors(case, "cpu") if case.reduced else {})


def flash_kda(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, out: Any, A_log: Any, dt_bias: Any, lower_bound: float,
    initial_state: Any = None, final_state: Any = None, cu_seqlens: Any = None,
) -> None:  # fmt: skip
    """Raw gates with a lower bound, raw betas, normalized keys and queries."""
    assert g.dtype == beta.dtype == torch.bfloat16
    o, state = qla.chunk_kda(
        q, k, v, g, beta, scale, initial_state, True, True, True, True, lower_bound=lower_bound, A_log=A_log,
        dt_bias=dt_bias, cu_seqlens=cu_seqlens, state_v_first=True,
    )  # fmt: skip
    out.copy_(o)
    final_state.copy_(state)


@pytest.mark.parametrize("name", ["kda-tp1-4096", "kda-tp1-4x1024"])
def test_flashkda(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stand_in(monkeypatch, "flash_kda", fwd=flash_kda)
    assert max(errors("flashkda", small("KDAFwd", name))) < 0.008  # its gates are rounded to 16 bits as logits


def test_torch() -> None:
    assert max(errors("torch", small("KDAFwd", "kda-tp1-4x1024"))) < 0.003


_CRASHES = "import os, signal\ndef fwd(*a, **k):\n    print('about to die')\n    os.kill(os.getpid(), signal.SIGSEGV)\n"


def test_a_peer_that_crashes_costs_one_row(tmp_path: Path) -> None:
    (tmp_path / "kda").mkdir()
    (tmp_path / "kda" / "flash_kda.py").write_text("__version__ = '9'\n" + _CRASHES)
    (tmp_path / "qla").mkdir()
    (tmp_path / "qla" / "flash_qla.py").write_text("raise OSError('libsomething.so: not found')\n")
    path = tmp_path / "rows.jsonl"
    filters = ["--op", "KDAFwd,GDNFwd", "--name", "kda-tp1-decode-b1,decode-b1-v", "--dtype", "bf16", "--device", "cpu"]
    filters += ["--reps", "2", "-o", str(path), "--peers", "flashkda,flashqla,qla"]
    # As an unpacked wheel has it whose module lies deeper, where only its .pth file says so.
    (tmp_path / "wheels" / "deeper").mkdir(parents=True)
    (tmp_path / "kda" / "flash_kda.py").rename(tmp_path / "wheels" / "deeper" / "flash_kda.py")
    (tmp_path / "wheels" / "some").mkdir()
    (tmp_path / "wheels" / "some" / "__init__.py").touch()
    code = "import sys, some; sys.path.insert(0, some.__path__[0] + '/../deeper')"
    (tmp_path / "wheels" / "some.pth").write_text(f"# a comment\nno such folder\n{code}\n")
    folders = [
        "--peer-path",
        f"flashkda={tmp_path / 'kda'}:{tmp_path / 'wheels'}",
        "--peer-path",
        f"flashqla={tmp_path / 'qla'}",
    ]
    result = CliRunner().invoke(app, ["run", *filters, *folders])
    assert result.exit_code == 0, result.output
    rows = read_rows(path)
    assert [(row["peer"], row["status"]) for row in rows] == [
        ("flashkda", "error"), ("flashkda", "error"), ("flashqla", "unavailable"), ("qla", "ok"), ("qla", "ok")
    ]  # fmt: skip
    assert all("SIGSEGV" in row["reason"] and row["peer_version"] == "9" for row in rows[:2])
    assert "libsomething.so" in rows[2]["reason"]
    assert all(row["accurate"] for row in rows[3:])
    report = CliRunner().invoke(app, ["report", str(path)]).output
    assert "SIGSEGV" in report
    assert "libsomething.so" in report
    # Nothing of this is done again.
    assert "0 cases done, 0 left" in CliRunner().invoke(app, ["run", *filters, *folders]).output
    assert len(path.read_text().splitlines()) == len(rows)


def test_what_crashes_costs_no_row_of_what_is_measured_with_it(tmp_path: Path) -> None:
    crash = _CRASHES.replace(
        "    print", "    if a[0].shape[1] == 1: a[6].zero_(); k['final_state'].zero_(); return\n    print"
    )
    (tmp_path / "flash_kda.py").write_text("__version__ = '9'\n" + crash)
    cases = [small("KDAFwd", name) for name in ("kda-tp1-decode-b1", "kda-tp1-4096", "kda-tp1-decode-b8")]
    runner = Runner(tmp_path / "rows.jsonl", "cpu", 2, folders={"flashkda": [str(tmp_path)]}, jobs=2)
    assert [case.name for case in next(batches(cases))] == [case.name for case in cases]
    assert runner.run("flashkda", cases, lambda hello, todo: None, lambda case, row: None) == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert not rows[0]["accurate"]  # zeros are not the result
    assert "SIGSEGV" in rows[1]["reason"]


def test_a_peer_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "flash_kda.py").write_text("import time\n__version__ = '9'\ndef fwd(*a, **k): time.sleep(600)\n")
    case = small("KDAFwd", "kda-tp1-4096")
    with Process(Setup("flashkda", "cpu"), [str(tmp_path)]) as process:
        assert process.hello["version"] == "9"
        with pytest.raises(WorkerError, match="no answer within 2 s") as caught:
            process.ask({"measure": [{"case": asdict(case), "check": "", "errors": None}]}, 2.0)
        assert caught.value.late
        assert not process.running


def test_wrong_peers(tmp_path: Path) -> None:
    for arguments in (["--peers", "nobody"], ["--peer-path", "fla"], ["--peer-path", f"fla={tmp_path / 'none'}"]):
        assert CliRunner().invoke(app, ["run", "--name", "decode-b1", "--device", "cpu", *arguments]).exit_code == 2
