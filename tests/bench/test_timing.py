"""What becomes of a profiler's events, without a profiler; and, on a GPU, with one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from qla.bench import timing as timing_module
from qla.bench.plant import slowed
from qla.bench.timing import (
    ClockTimer,
    DeviceTimer,
    Event,
    EventTimer,
    ProcessorTimer,
    TimerError,
    busy,
    repetitions,
    summarize,
)

FLUSH = Event("Memset (Device)", 0.0, 60.0)


def trace(count: int) -> list[Event]:
    """Repetitions of a flush, a short memset, and two kernels that overlap."""
    events = []
    for start in (1000.0 * i for i in range(count)):
        events += [
            Event("Memset (Device)", start, start + 65.0),
            Event("Memset (Device)", start + 70.0, start + 71.0),
            Event("prepare", start + 80.0, start + 100.0),
            Event("scan", start + 95.0, start + 130.0 + start / 1000),
        ]
    return events


def test_union_of_intervals() -> None:
    assert busy([]) == 0.0
    assert busy([Event("a", 0.0, 10.0), Event("b", 2.0, 5.0), Event("c", 9.0, 12.0), Event("d", 20.0, 21.0)]) == 13.0
    assert busy([Event("d", 20.0, 21.0), Event("a", 0.0, 10.0)]) == 11.0


def test_repetitions_begin_at_flushes_only() -> None:
    (groups,) = repetitions(list(reversed(trace(6))), FLUSH, [5])
    assert [[e.name for e in group] for group in groups] == [["Memset (Device)", "prepare", "scan"]] * 5
    timing = summarize(groups, 0.3)
    assert timing.device_ms == pytest.approx((1 + 50 + 3) / 1e3)
    assert (timing.q1_ms, timing.q3_ms) == (pytest.approx(53e-3), pytest.approx(55e-3))
    assert timing.kernels == pytest.approx({"Memset (Device)": 1e-3, "prepare": 20e-3, "scan": 38e-3})
    assert (timing.wall_ms, len(timing.samples)) == (0.3, 5)


def test_several_calls_in_one_trace() -> None:
    # The first of a call's repetitions does something more, and is not looked at.
    single = [Event(FLUSH.name, 8000.0, 8065.0), Event("plan", 8070.0, 8075.0), Event("scan", 8080.0, 8090.0)]
    single += [Event(FLUSH.name, 9000.0, 9065.0), Event("scan", 9070.0, 9080.0)]
    first, second = repetitions([*trace(4), *single], FLUSH, [3, 1])
    assert [len(group) for group in first] == [3, 3, 3]
    assert summarize(second, 0.0).device_ms == pytest.approx(10e-3)
    with pytest.raises(TimerError):  # a call must do the same each time
        repetitions([*trace(4), *single], FLUSH, [2, 2])


@pytest.mark.parametrize("lost", [0, 4, 7, 8])
def test_lost_events_are_noticed(lost: int) -> None:
    events = trace(6)
    del events[lost]
    with pytest.raises(TimerError):
        repetitions(events, FLUSH, [5])


def test_nothing_but_flushes_is_no_measurement() -> None:
    with pytest.raises(TimerError, match="kernels after one"):
        repetitions([Event(FLUSH.name, 100.0 * i, 100.0 * i + 60) for i in range(4)], FLUSH, [3])


def test_clock() -> None:
    calls: list[int] = []
    timing = ClockTimer(4).measure(lambda: calls.append(sum(range(1000))))
    assert len(calls) == 5
    assert 0 < timing.q1_ms <= timing.device_ms <= timing.q3_ms
    assert timing.wall_ms > 0
    assert ClockTimer(3).block(lambda: time.sleep(0.002)) >= 2


def test_slow_calls_are_repeated_less_often() -> None:
    assert len(ClockTimer(1000).measure(lambda: time.sleep(0.02)).samples) < 101


def test_processor_time_leaves_waiting_out() -> None:
    timer = ProcessorTimer(3, block_s=0.01)
    assert timer.measure(lambda: time.sleep(0.02)).device_ms < 2
    busy_ms = timer.block(lambda: sum(range(100_000)))
    assert 0.1 < busy_ms < 100


class Recorded(DeviceTimer):
    """A timer of calls that write down what a device would do; each `lost` takes an event from a trace."""

    def __init__(self, lost: int = 0) -> None:
        self.count, self.calls, self.lost, self.traces = 5, 2, lost, 0
        self.now, self.events = 0.0, list[Event]()
        self._mark = Event("flush", 0.0, 60.0)
        self._flush = lambda: self.run("flush", 61.0)  # type: ignore[assignment]

    def run(self, name: str, us: float) -> None:
        """A kernel."""
        self.events.append(Event(name, self.now, self.now + us))
        self.now += us + 1

    def _profile(self, run: Callable[[], object]) -> list[Event]:
        self.traces += 1
        self.events = []
        run()
        if self.lost:
            self.lost -= 1
            del self.events[-1]
        return self.events


def test_calls_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_module, "_warm", lambda call: 0.1)  # affordable only three times
    monkeypatch.setattr(timing_module, "_wall_ms", lambda call, calls: float(calls))
    timer = Recorded(lost=1)
    seen: list[str] = []

    def planned() -> None:
        if seen[-1:] != ["planned"]:  # as a library that remembers the call before
            timer.run("plan", 5.0)
        seen.append("planned")
        timer.run("scan", 40.0)

    def other() -> None:
        seen.append("other")
        timer.run("prepare", 10.0)
        timer.run("scan", 30.0)

    first, second = timer.measure_all([planned, other])
    assert timer.traces == 2, "a trace that lost an event is taken again"
    assert (first.device_ms, second.device_ms) == (pytest.approx(40e-3), pytest.approx(40e-3))
    assert (len(first.samples), first.kernels) == (3, {"scan": pytest.approx(40e-3)})
    assert first.wall_ms == 2.0
    with pytest.raises(TimerError):
        Recorded(lost=3).measure_all([planned, other])


@pytest.mark.gpu
def test_device_time_of_a_known_kernel() -> None:
    timer = DeviceTimer(10)
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    timing = timer.measure(lambda: y.copy_(x))
    assert len(timing.kernels) == 1
    # A copy that the wall clock sees as well: back to back, a queue of them is kernels and nothing else.
    assert timing.device_ms == pytest.approx(timing.wall_ms, rel=0.1)
    both = timer.measure(lambda: (y.copy_(x), y.zero_()))
    assert timing.device_ms < both.device_ms < 2 * timing.device_ms
    together = timer.measure_all([lambda: y.copy_(x), lambda: y.zero_()])
    assert together[0].device_ms == pytest.approx(timing.device_ms, rel=0.1)
    assert together[1].device_ms < together[0].device_ms
    # Events see the launch as well, and little else of a call this long.
    events = EventTimer(10).measure(lambda: y.copy_(x))
    assert events.device_ms == pytest.approx(timing.device_ms, rel=0.1)
    assert timer.block(lambda: y.copy_(x)) == pytest.approx(timing.device_ms, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1 << 24, 1 << 28])
def test_a_planted_slowdown_is_as_large_as_asked_for(size: int) -> None:
    timer = EventTimer(10)
    x = torch.randn(size, device="cuda")
    y = torch.empty_like(x)
    longer = slowed(lambda: y.copy_(x), 1.05, timer)
    plain, planted = (statistics.median(timer.times(f, 50)) for f in (lambda: y.copy_(x), longer))
    assert planted / plain == pytest.approx(1.05, abs=0.02)
