"""Launches on a GPU: streams, graphs, threads, and what a warm call costs the host."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import inputs
import pytest
import torch

import qla
from qla.runtime import plan

pytestmark = pytest.mark.gpu

HOST_US = 30.0
Results = tuple[torch.Tensor, torch.Tensor]


def make(seed: int = 0, **options: Any) -> dict[str, Any]:
    return inputs.make(
        "chunk_gated_delta_rule", T=256, H=2, HV=8, device="cuda", seed=seed, output_final_state=True, **options
    )


def run(a: dict[str, Any]) -> Results:
    o, final = qla.chunk_gated_delta_rule(**a)
    assert final is not None
    return o, final


def same(got: Results, expected: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that has loaded nothing; the one before comes back afterwards."""
    monkeypatch.setattr(plan, "layouts", {})
    monkeypatch.setattr(plan, "_plans", {})


def test_another_stream_gives_the_same_bits() -> None:
    a = make()
    expected = run(a)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = [run(a) for _ in range(3)]
    side.synchronize()
    assert all(same(got, expected) for got in results)


def test_a_call_runs_on_the_current_stream() -> None:
    """Behind a long wait on its stream, a call sees what was written there just before it."""
    a, new = make(), make(seed=1)
    expected = run(new)
    run(a)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for name in ("q", "k", "v", "g", "beta"):
            a[name].copy_(new[name])
        got = run(a)
    side.synchronize()
    assert same(got, expected)


def test_a_graph_replays_the_same_bits_also_with_new_values() -> None:
    a, new = make(), make(seed=1)
    expected, expected_new = run(a), run(new)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(a)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, expected)
    for name in ("q", "k", "v", "g", "beta"):
        a[name].copy_(new[name])
    graph.replay()
    torch.cuda.synchronize()
    assert same(got, expected_new)


def test_two_calls_in_one_graph() -> None:
    """The second may be given the workspace of the first, and outputs of the first are its inputs."""
    a = make()

    def twice() -> Results:
        _, state = run(a)
        return run(a | {"initial_state": state})

    expected = twice()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = twice()
    torch.empty(1 << 26, device="cuda").fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert same(got, expected)


@pytest.mark.usefixtures("cold")
def test_a_cold_kernel_cannot_be_captured() -> None:
    a = make()
    with (
        pytest.raises(qla.CaptureError, match="run this call once before capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run(a)
    torch.cuda.synchronize()
    expected = run(a)  # the failed attempt left nothing behind
    assert same(run(a), expected)


def test_the_workspace_of_a_warm_call_is_given_back() -> None:
    a = make()
    run(a)
    before = torch.cuda.memory_allocated()
    results = [run(a) for _ in range(4)]
    outputs = sum(-(-x.nbytes // 512) * 512 for pair in results for x in pair)
    assert torch.cuda.memory_allocated() - before == outputs


def test_threads_on_streams_of_their_own_get_their_own_bits() -> None:
    count, rounds = 8, 50
    calls = [make(seed=seed) for seed in range(count)]
    expected = [run(a) for a in calls]
    torch.cuda.synchronize()
    start = threading.Barrier(count)
    failures: list[object] = []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            start.wait(timeout=60)
            with torch.cuda.stream(stream):
                results = [run(calls[index]) for _ in range(rounds)]
            stream.synchronize()
            failures.extend(index for got in results if not same(got, expected[index]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_host_cost_of_a_warm_call() -> None:
    a = make()
    q, k, v, g, beta = (a[name] for name in ("q", "k", "v", "g", "beta"))
    times = []
    for batch in range(24):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            qla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        if batch >= 4:  # the first ones fill caches
            times.append((time.perf_counter() - begin) / 50 * 1e6)
    torch.cuda.synchronize()
    cost = statistics.median(times)
    print(f"host time of a warm call: {cost:.1f} us (median of {len(times)} batches, least {min(times):.1f})")
    assert cost <= HOST_US
