"""Launch plans, seen through a driver that records what it is asked to launch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import Recorder, problem, render

from qla.codegen.planner import Choice, split
from qla.codegen.spec import KernelSpec, Source
from qla.errors import CaptureError, LaunchError, UnsupportedError
from qla.runtime import plan
from qla.runtime.arguments import ArgumentBlock
from qla.runtime.problem import Problem, Result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    driver = Recorder()
    monkeypatch.setattr(plan, "render_source", render)
    monkeypatch.setattr(plan, "fetch_binary", lambda source: source.entry.encode())
    monkeypatch.setattr(plan, "driver_for", lambda target, index: driver)
    monkeypatch.setattr(plan, "device_target", lambda device: "sm_90a")
    monkeypatch.setattr(plan, "layouts", {})
    monkeypatch.setattr(plan, "_plans", {})
    return driver


def launched(recorder: Recorder, call: Problem) -> tuple[Result, dict[str, Any], dict[str, Any]]:
    """Run a call; its result and the decoded arguments of its two launches."""
    recorder.launches.clear()
    result = plan.run(call)
    (first, _, stream, a), (second, _, _, b) = recorder.launches
    assert (first, second, stream) == ("prepare", "scan", 77)
    return result, a, b


def blocks(recorder: Recorder) -> list[int]:
    return [launch[1] for launch in recorder.launches]


def test_dense_call(recorder: Recorder) -> None:
    call = problem(output_final_state=True, initial_state=torch.ones(2, 4, 128, 128))
    result, a, b = launched(recorder, call)
    # 2 rows of 2 chunks, 4 value heads, each by itself; 2 sequences of 4 value heads with two column blocks each.
    assert blocks(recorder) == [2 * 2 * 4, 2 * 4 * 2]
    assert result.o.shape == call.v.shape
    assert result.o.is_contiguous()
    assert result.o.dtype == torch.bfloat16
    assert result.final_state is not None
    assert result.final_state.shape == (2, 4, 128, 128)
    assert (result.states, result.A, result.w, result.u) == (None, None, None, None)
    for arguments in (a, b):
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            assert arguments[name] == getattr(call, name).data_ptr()
        assert arguments["o"] == result.o.data_ptr()
        assert arguments["final_state"] == result.final_state.data_ptr()
        for name in ("A_log", "dt_bias", "cu_seqlens", "states", "A_out", "w_out", "u_out"):
            assert arguments[name] == 0
        assert (arguments["sequences"], arguments["items"], arguments["scale"]) == (2, 16, 0.5)
        for name in "qkvo":
            assert int.from_bytes(arguments[f"{name}_map"][:8], "little") == arguments[name]


def test_workspace_buffers_are_aligned_apart_and_shared_by_the_stages(recorder: Recorder) -> None:
    _, a, b = launched(recorder, problem())
    assert a["ws_rows"] == b["ws_rows"]
    assert a["ws_a"] % 1024 == 0
    assert a["ws_rows"] % 1024 == 0
    assert a["ws_rows"] - a["ws_a"] == 4 * 4 * 8192  # slots, value heads


def in_segments(chunks: int) -> Callable[..., Choice]:
    """A planner that takes segments of so many chunks, whatever time that takes."""
    return lambda shape, target, processors: split(shape, target, processors, chunks)


def launched_in_segments(recorder: Recorder, call: Problem) -> tuple[Result, dict[str, dict[str, Any]]]:
    recorder.launches.clear()
    result = plan.run(call)
    assert [launch[0] for launch in recorder.launches] == ["prepare", "carry", "combine", "scan"]
    assert {launch[2] for launch in recorder.launches} == {77}
    return result, {launch[0]: launch[3] for launch in recorder.launches}


@pytest.mark.parametrize("packed", [False, True])
def test_segments(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(plan, "plan_call", in_segments(2))
    cu = torch.tensor([0, 1, 64, 64, 300], dtype=torch.int64) if packed else None
    call = problem(B=1 if packed else 2, T=300, cu_seqlens=cu, output_final_state=True)
    result, arguments = launched_in_segments(recorder, call)
    sequences, slots, segments = (4, 300 // 64 + 4, 300 // 128 + 4) if packed else (2, 2 * 5, 2 * 3)
    # 4 value heads; two column blocks of values and two of keys; 16 columns of a state.
    assert blocks(recorder) == [slots * 4, segments * 4 * 4, sequences * 4 * 8, segments * 4 * 2]
    for each in arguments.values():
        assert (each["segment_chunks"], each["sequences"], each["items"]) == (2, sequences, slots * 4)
    carry = arguments["carry"]["ws_carry"]
    assert arguments["combine"]["ws_carry"] == arguments["scan"]["ws_carry"] == carry
    rows = arguments["prepare"]["ws_rows"]
    assert arguments["carry"]["ws_rows"] == arguments["scan"]["ws_rows"] == rows
    # One after the other, each on a boundary of what loads want.
    assert carry % 1024 == 0
    assert carry == rows + -(-slots * 4 * 1280 // 1024) * 1024
    (layout,) = plan.layouts.values()
    assert layout is not None
    end = carry + segments * 4 * (128 * (128 + 128) * 4 + 128)
    assert end - arguments["prepare"]["ws_a"] + 1024 == layout.workspace_bytes
    assert result.final_state is not None
    assert arguments["scan"]["final_state"] == result.final_state.data_ptr()
    assert result.final_state.shape == (sequences, 4, 128, 128)


def test_what_is_saved_of_segments_is_of_whole_sequences(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "plan_call", in_segments(2))
    call = problem(op="delta_rule", g=None, T=300, saves=True)
    result, arguments = launched_in_segments(recorder, call)
    assert {spec.stage: spec.saves for spec in recorder.loaded} == {
        "prepare": True, "carry": False, "combine": False, "scan": True,
    }  # fmt: skip
    assert result.states is not None
    assert result.states.shape == (2, 6, 4, 128, 128)
    assert arguments["scan"]["states"] == result.states.data_ptr()


def test_shapes_decide_about_column_blocks_of_a_workgroup(recorder: Recorder) -> None:
    """Pairs of them where the chip is full, with a kernel of their own."""
    recorder.processors = 8
    plan.run(problem(B=4, T=300, H=2, HV=4))
    plan.run(problem(B=1, T=64, H=1, HV=2))
    assert blocks(recorder) == [4 * 5 * 2, 4 * 4, 2, 2 * 2]
    kernels = [layout.plan.key.specs() for layout in plan.layouts.values() if layout is not None]
    assert [[spec.schedule for spec in each] for each in kernels] == [["", "paired"], ["", ""]]


def test_shapes_decide_about_segments(recorder: Recorder) -> None:
    """A long sequence is split, a short one is not, each with kernels of its own; a warm call does not plan again."""
    long, short = problem(B=1, T=8192, H=1, HV=2), problem(B=1, T=64, H=1, HV=2)
    for call in (long, short):
        plan.run(call)
    assert [launch[0] for launch in recorder.launches] == ["prepare", "carry", "combine", "scan", "prepare", "scan"]
    assert recorder.launches[-1][3]["segment_chunks"] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "plan_call", None)
        plan.run(long)
        plan.run(short)
    assert len(recorder.launches) == 12
    recorder.processors = 1
    plan.layouts.clear()
    plan.run(long)
    assert len(recorder.launches) == 14, "with one processor there is nothing to gain"


def test_planning_reads_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory do."""
    monkeypatch.setattr(plan, "driver_for", lambda target, index: Recorder())
    monkeypatch.setattr(plan, "device_target", lambda device: "sm_90a")
    with torch.device("meta"):
        call = problem(B=1, T=4096, cu_seqlens=torch.empty(6, dtype=torch.int64))
    choice = plan.choose(call, 5)
    assert (choice.shape.sequences, choice.chunks) == (5, 13)


def test_a_capture_needs_the_kernels_of_its_own_shapes(recorder: Recorder) -> None:
    plan.run(problem(B=1, T=64, H=1, HV=2))
    recorder.captures = True
    with pytest.raises(CaptureError, match=r"sequences split into segments.*run this call once before capturing"):
        plan.run(problem(B=1, T=8192, H=1, HV=2))
    plan.run(problem(B=1, T=65, H=1, HV=2))


def test_varlen_slots_and_blocks(recorder: Recorder) -> None:
    cu = torch.tensor([0, 1, 64, 64, 150], dtype=torch.int32)
    _, a, b = launched(recorder, problem(B=1, T=200, cu_seqlens=cu))
    slots = 200 // 64 + 4
    assert blocks(recorder) == [slots * 4, 4 * 4 * 2]
    assert (a["items"], a["sequences"], a["has_cu_seqlens"], a["batch"]) == (slots * 4, 4, 1, 1)
    assert b["cu_seqlens"] == cu.data_ptr()
    # The kernels place sequence n at slot cu[n] // 64 + n: no two sequences may overlap, none may run over.
    ends = [int(cu[n]) // 64 + n + -(-int(cu[n + 1] - cu[n]) // 64) for n in range(4)]
    assert all(end <= int(cu[n + 1]) // 64 + n + 1 for n, end in enumerate(ends))
    assert ends[-1] <= slots


def test_channel_gates_prepare_per_value_head(recorder: Recorder) -> None:
    launched(recorder, problem(op="kda", g=torch.zeros(2, 70, 4, 128)))
    assert blocks(recorder) == [2 * 2 * 4, 2 * 4 * 2]


def test_heads_of_a_large_group_go_to_several_blocks(recorder: Recorder) -> None:
    launched(recorder, problem(HV=12))
    # Chunks of both batch rows, heads, and six value heads: all run at once one by one, on fewer processors in threes.
    assert blocks(recorder)[0] == 2 * 2 * 2 * 6
    recorder.processors = 2
    plan.layouts.clear()
    launched(recorder, problem(HV=12))
    assert blocks(recorder)[0] == 2 * 2 * 2 * 2


def test_state_layout(recorder: Recorder) -> None:
    call = problem(V=64, output_final_state=True, state_v_first=True, initial_state=torch.ones(2, 4, 64, 128))
    result, _, b = launched(recorder, call)
    assert result.final_state is not None
    assert result.final_state.shape == (2, 4, 64, 128)
    assert (b["final_stride_k"], b["final_stride_v"]) == (1, 128)


def test_saves(recorder: Recorder) -> None:
    result, a, b = launched(recorder, problem(op="delta_rule", g=None, saves=True))
    assert result.states is not None
    assert result.states.shape == (2, 3, 4, 128, 128)
    assert result.states.dtype == torch.float32
    assert b["states"] == result.states.data_ptr()
    for name, tensor, last in (("A_out", result.A, 64), ("w_out", result.w, 128), ("u_out", result.u, 128)):
        assert tensor is not None
        assert tensor.shape == (2, 70, 4, last)
        assert tensor.dtype == torch.bfloat16
        assert a[name] == tensor.data_ptr()
    assert all(spec.saves for spec in recorder.loaded)
    recorder.loaded.clear()
    result, _, _ = launched(recorder, problem(op="gla", g=torch.zeros(2, 70, 4, 128), beta=None, saves=True))
    assert result.states is not None
    assert result.A is None
    # Without a delta rule it is the scan alone that saves, after a prepare that is like any other.
    assert {spec.stage: spec.saves for spec in recorder.loaded} == {"prepare": False, "scan": True}


def test_repeated_calls_pass_the_new_addresses_and_load_once(recorder: Recorder) -> None:
    first, second = problem(), problem()
    launched(recorder, first)
    result, a, _ = launched(recorder, second)
    assert a["q"] == second.q.data_ptr() != first.q.data_ptr()
    assert a["o"] == result.o.data_ptr()
    launched(recorder, problem(T=33))
    assert [spec.stage for spec in recorder.loaded] == ["prepare", "scan"]
    assert len(plan.layouts) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 2.0},
        {"gate_in_kernel": True, "lower_bound": -1.0},
        {"qk_l2norm": True},
        {"beta_sigmoid": True},
        {"beta_double": True},
        {"gate_in_kernel": True},
        {"output_final_state": True},
        {"state_v_first": True},
        {"saves": True},
        {"g": torch.zeros(2, 70, 4, dtype=torch.bfloat16)},
        {"g": torch.zeros(2, 4, 70).transpose(1, 2)},
        {"beta": torch.zeros(2, 70, 4)},
        {"beta": torch.zeros(2, 70, 8, dtype=torch.bfloat16)[..., ::2]},
        {"gate_in_kernel": True, "A_log": torch.zeros(4)},
        {"gate_in_kernel": True, "dt_bias": torch.zeros(4, dtype=torch.float16)},
        {"initial_state": torch.zeros(2, 4, 128, 128)},
        {"initial_state": torch.zeros(2, 4, 128, 256)[..., ::2]},
        {"q": torch.zeros(2, 2, 70, 128, dtype=torch.bfloat16).transpose(1, 2)},
        {"k": torch.zeros(2, 2, 70, 128, dtype=torch.bfloat16).transpose(1, 2)},
        {"v": torch.zeros(2, 4, 70, 128, dtype=torch.bfloat16).transpose(1, 2)},
        {"v": torch.zeros(2, 70, 8, 128, dtype=torch.bfloat16)},
        {"v": torch.zeros(2, 70, 4, 64, dtype=torch.bfloat16)},
    ],
    ids="-".join,
)
def test_a_layout_is_never_reused_for_a_call_that_differs(recorder: Recorder, changes: dict[str, Any]) -> None:
    """After a plain call, any change must give the same arguments as without that call."""
    plain = {"op": "delta_rule", "g": None} if "saves" in changes else {}
    call = problem(**plain, **changes)
    _, fresh, fresh_scan = launched(recorder, call)
    plan.layouts.clear()
    launched(recorder, problem(**plain))
    _, warm, warm_scan = launched(recorder, call)
    workspace = ("ws_a", "ws_rows", "ws_carry")
    new = ("o", "final_state", "states", "A_out", "w_out", "u_out", "o_map", *workspace)
    for a, b in ((fresh, warm), (fresh_scan, warm_scan)):
        assert {n: x for n, x in a.items() if n not in new} == {n: x for n, x in b.items() if n not in new}
    assert len(plan.layouts) == 2


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_that_tile_loads_cannot_address_take_the_strided_kernels(recorder: Recorder, name: str) -> None:
    tensor = getattr(problem(), name)
    odd = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    plan.run(problem())
    plan.run(problem(**{name: odd}))
    assert [spec.loads for spec in recorder.loaded] == ["tile", "tile", "strided", "strided"]
    assert len(recorder.encoded) == 4


def test_the_host_has_one_kernel_for_all_strides(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "device_target", lambda device: "host")
    q = torch.zeros(2, 70, 2, 256, dtype=torch.bfloat16)[..., ::2]
    _, a, _ = launched(recorder, problem(q=q))
    assert a["q_stride_d"] == 2
    assert {spec.loads for spec in recorder.loaded} == {"tile"}


def test_tensor_maps_describe_the_tensors(recorder: Recorder) -> None:
    call = problem()
    plan.run(call)
    shapes = [tuple(t.shape) for t in (call.q, call.k, call.v, call.v)]
    assert [e[0] for e in recorder.encoded] == shapes
    assert recorder.encoded[3][1] == call.v.stride()
    assert {e[2:] for e in recorder.encoded} == {(torch.bfloat16, 64)}


def test_workspace_lives_until_both_stages_are_launched(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch has the raw interface, and where a launch fails."""
    events: list[Any] = []

    def allocate(size: int, stream: int) -> int:
        events.append((size, stream))
        return 4096 + 512

    monkeypatch.setattr(plan, "_memory", lambda device: (allocate, events.append))
    recorder.during = lambda: events.append("launch")
    _, a, _b = launched(recorder, problem())
    (size, stream), *rest = events
    assert rest == ["launch", "launch", 4096 + 512]
    assert stream == 77
    assert a["ws_a"] == 5120
    assert a["ws_rows"] + 4 * 4 * 1280 <= 4096 + 512 + size

    def fail() -> None:
        raise LaunchError("no")

    recorder.during = fail
    events.clear()
    with pytest.raises(LaunchError):
        plan.run(problem())
    assert events == [(size, 77), 4096 + 512]


def test_workspace_without_the_raw_interface_is_a_tensor_until_released() -> None:
    memory = plan._TensorMemory(torch.device("cpu"))
    addresses = [memory.allocate(5000, 0) for _ in range(3)]
    assert len({*addresses, *memory.live}) == 3
    for address in addresses:
        assert memory.live[address].numel() == 5000
        memory.release(address)
    assert not memory.live


def test_blocks_are_filled_again_only_for_other_addresses(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    call, other = problem(), problem()
    plan.run(call)
    (layout,) = plan.layouts.values()
    layout.free.clear()
    out, at = torch.empty_like(call.v), torch.empty(1 << 20, dtype=torch.uint8).data_ptr()
    fills: list[tuple[int, ...]] = []
    real_fill = layout._fill

    def fill(blocks: Any, addresses: tuple[int, ...]) -> None:
        fills.append(addresses)
        real_fill(blocks, addresses)

    monkeypatch.setattr(layout, "empty", lambda *a: out)
    monkeypatch.setattr(layout, "allocate", lambda size, stream: at)
    monkeypatch.setattr(layout, "release", lambda address: None)
    monkeypatch.setattr(layout, "_fill", fill)
    for each in (call, call, other, other, call):
        assert launched(recorder, each)[1]["q"] == each.q.data_ptr()
    assert [f[0] for f in fills] == [call.q.data_ptr(), other.q.data_ptr(), call.q.data_ptr()]


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("v_first", [True, False])
def test_no_tokens(recorder: Recorder, with_state: bool, v_first: bool) -> None:
    shape = (2, 4, 64, 128) if v_first else (2, 4, 128, 64)
    initial = torch.randn(shape) if with_state else None
    call = problem(T=0, V=64, initial_state=initial, state_v_first=v_first, output_final_state=True, saves=True)
    result = plan.run(call)
    assert recorder.launches == []
    assert result.o.shape == (2, 0, 4, 64)
    assert result.final_state is not None
    assert torch.equal(result.final_state, torch.zeros(shape) if initial is None else initial)
    assert initial is None or result.final_state.data_ptr() != initial.data_ptr()
    assert result.states is not None
    assert result.states.shape == (2, 1, 4, 128, 64)
    if initial is not None:
        assert torch.equal(result.states[:, 0], initial.transpose(-1, -2) if v_first else initial)
    assert result.w is not None
    assert result.w.shape == (2, 0, 4, 128)


def test_no_sequences(recorder: Recorder) -> None:
    result = plan.run(problem(B=1, cu_seqlens=torch.zeros(1, dtype=torch.int64), output_final_state=True))
    assert recorder.launches == []
    assert result.final_state is not None
    assert result.final_state.shape == (0, 4, 128, 128)
    assert torch.equal(result.o, torch.zeros_like(result.o))


def test_no_tokens_in_any_sequence(recorder: Recorder) -> None:
    initial = torch.randn(3, 4, 128, 128)
    cu = torch.zeros(4, dtype=torch.int32)
    result = plan.run(problem(B=1, T=0, cu_seqlens=cu, initial_state=initial, output_final_state=True))
    assert result.final_state is not None
    assert torch.equal(result.final_state, initial)


def test_inputs_are_not_written(recorder: Recorder) -> None:
    call = problem(initial_state=torch.randn(2, 4, 128, 128), output_final_state=True)
    before = [t.clone() for t in (call.q, call.k, call.v, call.g, call.beta, call.initial_state) if t is not None]
    plan.run(call)
    after = (call.q, call.k, call.v, call.g, call.beta, call.initial_state)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True) if y is not None)


def test_nothing_is_loaded_inside_a_capture(recorder: Recorder) -> None:
    recorder.captures = True
    with pytest.raises(CaptureError, match="run this call once before capturing"):
        plan.run(problem())
    recorder.captures = False
    plan.run(problem())
    recorder.captures = True
    plan.run(problem())
    plan.run(problem(T=300))  # other shapes need no other kernel
    assert len(recorder.launches) == 6


def test_a_failed_build_is_tried_again(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Source) -> bytes:
        raise LaunchError("no")

    with monkeypatch.context() as patch:
        patch.setattr(plan, "fetch_binary", refuse)
        with pytest.raises(LaunchError):
            plan.run(problem())
    plan.run(problem())
    assert len(recorder.launches) == 2


def test_a_failed_launch_leaves_the_plan_usable(recorder: Recorder) -> None:
    def fail() -> None:
        raise LaunchError("no")

    recorder.during = fail
    with pytest.raises(LaunchError):
        plan.run(problem())
    recorder.during = None
    launched(recorder, problem())


def test_unsupported_dtype(recorder: Recorder) -> None:
    with pytest.raises(UnsupportedError, match="float64"):
        plan.run(problem(q=torch.zeros(2, 70, 2, 128, dtype=torch.float64)))


def test_stages_must_agree(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_chunk(spec: KernelSpec) -> Source:
        source = render(spec)
        chunk = 32 if spec.stage == "scan" else 64
        return dataclasses.replace(source, limits=dataclasses.replace(source.limits, chunk=chunk))

    def other_size(spec: KernelSpec) -> Source:
        source = render(spec)
        return source if spec.stage == "prepare" else dataclasses.replace(source, workspace=(("rows", 4),))

    for broken, words in ((other_chunk, "chunks of 64 tokens"), (other_size, "workspace")):
        monkeypatch.setattr(plan, "render_source", broken)
        with pytest.raises(LaunchError, match=words):
            plan.run(problem())


def test_layouts_are_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_LAYOUTS_KEPT", 3)
    for tokens in range(1, 9):
        plan.run(problem(T=tokens))
    assert len(plan.layouts) == 3


def test_threads_do_not_share_argument_blocks(recorder: Recorder) -> None:
    """Every thread stops inside its launch, while others pack theirs; each must see its own addresses."""
    count, rounds = 8, 25
    gate = threading.Barrier(count)
    problems = [problem() for _ in range(count)]
    mine = threading.local()
    wrong: list[Any] = []

    def launch(kernel: Any, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        gate.wait(timeout=30)
        if kernel[1].unpack(arguments.view)["q"] != mine.address:
            wrong.append(mine.address)
        gate.wait(timeout=30)

    def work(call: Problem) -> None:
        mine.address = call.q.data_ptr()
        for _ in range(rounds):
            plan.run(call)

    plan.run(problems[0])
    for layout in plan.layouts.values():
        assert isinstance(layout, plan.Layout)
        layout.launch = launch
    threads = [threading.Thread(target=work, args=(call,)) for call in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_threads_build_a_plan_once(recorder: Recorder) -> None:
    threads = [threading.Thread(target=plan.run, args=(problem(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(recorder.loaded) == 2
    assert len(recorder.launches) == 16
