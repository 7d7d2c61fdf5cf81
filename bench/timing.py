"""How long a call takes: on a GPU by the intervals of its kernels, on a CPU by its clock or by processor time.

Device time is the median over repetitions of the union of kernel intervals, as CUPTI (or roctracer) reports them to
torch.profiler: time in which the device does nothing does not count, kernels that overlap count once. Before each
repetition a memset of twice the L2 and more flushes it, and that memset also marks where a repetition begins. Which
event it is, is not guessed from names: the flush is profiled alone first. Where the profiler sees nothing, events
around each call stand in, and the timer says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = [
    "ClockTimer", "DeviceTimer", "Event", "EventTimer", "ProcessorTimer", "Timer", "TimerError", "Timing", "busy",
    "repetitions", "summarize", "timer_for",
]  # fmt: skip

WARM_UP = 3
_ATTEMPTS = 3
_PATIENCE = 0.25  # seconds after which a slow call is repeated no more often than _LEAST
_LEAST = 3
_BLOCK_MS = 20.0


class TimerError(RuntimeError):
    """The profiler's events do not add up to the repetitions that ran."""


@dataclass(frozen=True)
class Event:
    """One kernel, copy or memset; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """Times of one call in milliseconds.

    Parameters
    ----------
    device_ms, q1_ms, q3_ms : median and quartiles over repetitions.
    wall_ms : of one of many calls back to back, what they cost the host included.
    kernels : median time of each kernel of a call, summed over launches of one name.
    samples : of each repetition, in the order they ran.
    """

    device_ms: float
    q1_ms: float
    q3_ms: float
    wall_ms: float
    kernels: dict[str, float]
    samples: tuple[float, ...]


class Timer(Protocol):
    """Measures a call; `description` says how."""

    description: str

    def measure(self, call: Callable[[], object]) -> Timing:
        """Time a call that has run before."""
        ...

    def measure_all(self, calls: Sequence[Callable[[], object]]) -> list[Timing]:
        """Time several, for less than each alone costs where setting a measurement up takes long."""
        ...

    def block(self, call: Callable[[], object]) -> float:
        """Milliseconds of a warm call, from a few tens of milliseconds of work: one of many such numbers."""
        ...


def _affordable(count: int, seconds: float) -> int:
    """How often to repeat a call that takes so many seconds."""
    return min(count, max(_LEAST, int(_PATIENCE / max(seconds, 1e-9))))


def busy(events: Sequence[Event]) -> float:
    """Length of the union of the events' intervals."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        if event.end > reached:
            total += event.end - max(event.start, reached)
            reached = event.end
    return total


def repetitions(events: Sequence[Event], flush: Event, counts: Sequence[int]) -> list[list[list[Event]]]:
    """Split the events of a profile at its flushes: for each call, the events of each of its repetitions.

    Parameters
    ----------
    events : of the whole profile.
    flush : a flush profiled alone; an event of that name that takes at least half as long is one.
    counts : how many repetitions ran of each call, one call after the other, and one more before them. That one is
        left out: what a library remembers from the call before is then that call's own, as where it runs alone.

    Raises
    ------
    TimerError
        The flushes are not as many as the repetitions, or those of a call do not all have the same number of kernels:
        the profiler has lost some, or the call does something else each time.
    """
    least = 0.5 * (flush.end - flush.start)
    groups: list[list[Event]] = []
    for event in sorted(events, key=lambda e: e.start):
        if event.name == flush.name and event.end - event.start >= least:
            groups.append([])
        elif groups:
            groups[-1].append(event)
        else:
            raise TimerError(f"{event.name} ran before the first flush")
    ends = list(accumulate(count + 1 for count in counts))
    if [len(groups)] != ends[-1:]:
        raise TimerError(f"{ends[-1]} repetitions gave {len(groups)} flushes")
    calls = [groups[end - count : end] for count, end in zip(counts, ends, strict=True)]
    for count, call in zip(counts, calls, strict=True):
        sizes = sorted({len(group) for group in call})
        if len(sizes) != 1 or not sizes[0]:
            raise TimerError(f"{count} repetitions of a call gave {sizes} kernels after one flush")
    return calls


def summarize(groups: Sequence[Sequence[Event]], wall_ms: float) -> Timing:
    """Median and quartiles over repetitions, and the share of each kernel."""
    times = [busy(group) / 1e3 for group in groups]
    names = dict.fromkeys(event.name for group in groups for event in group)
    kernels = {
        name: statistics.median(sum(e.end - e.start for e in group if e.name == name) for group in groups) / 1e3
        for name in names
    }
    return _timing(times, wall_ms, kernels)


def _timing(times: Sequence[float], wall_ms: float, kernels: dict[str, float]) -> Timing:
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else list(times) * 3
    return Timing(median, q1, q3, wall_ms, kernels, tuple(times))


def _wall_ms(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of one of many calls back to back, by events before the first and after the last."""
    mark: Any = torch.cuda.Event
    first, last = mark(enable_timing=True), mark(enable_timing=True)
    call()
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / calls


def _warm(call: Callable[[], object]) -> float:
    """Warm a call up; returns the seconds it takes then."""
    seconds = 0.0
    for _ in range(WARM_UP):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if seconds > _PATIENCE:
            break
    return seconds


class _Flush:
    """A write that is more than the L2 holds."""

    def __init__(self) -> None:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        least = 512 << 20 if torch.version.hip else 256 << 20
        self.size = max(least, 2 * int(properties.L2_cache_size))
        self._buffer = torch.empty(self.size, dtype=torch.int8, device="cuda")
        self.description = f"L2 flushed by a write of {self.size >> 20} MiB"

    def __call__(self) -> None:
        self._buffer.zero_()


class DeviceTimer:
    """Kernel intervals from torch.profiler, on the current GPU.

    Parameters
    ----------
    count : repetitions.
    calls : back to back, for the wall time.
    """

    def __init__(self, count: int = 10, calls: int = 10) -> None:
        self.count, self.calls = count, calls
        self._flush = _Flush()
        self._mark = self._calibrate()
        tracer = "roctracer" if torch.version.hip else "CUPTI"
        self.description = f"kernel intervals ({tracer}), {self._flush.description}"

    def _profile(self, run: Callable[[], object]) -> list[Event]:
        """Events on the device while `run` runs."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            run()
            torch.cuda.synchronize()
        return [
            Event(e.name, e.time_range.start, e.time_range.end)
            for e in trace.events() or ()
            if e.device_type == DeviceType.CUDA
        ]

    def _calibrate(self) -> Event:
        """Name and duration of a flush; also the first trace, which the tracer needs to set itself up."""
        events: list[Event] = []

        def flushes() -> None:
            for _ in range(3):
                self._flush()

        for _ in range(_ATTEMPTS):
            events = self._profile(flushes)
            if len(events) == 3 and len({e.name for e in events}) == 1:
                return min(events, key=lambda e: e.end - e.start)
        names = [e.name for e in events]
        raise TimerError(f"3 flushes gave the events {names}: torch.profiler cannot trace this device")

    def _groups(self, calls: Sequence[Callable[[], object]], counts: Sequence[int]) -> list[list[list[Event]]]:
        """Events of each repetition of each call; what the profiler lost is measured again."""

        def all_of_them() -> None:
            for call, count in zip(calls, counts, strict=True):
                for _ in range(count + 1):
                    self._flush()
                    call()

        for _ in range(_ATTEMPTS - 1):
            try:
                return repetitions(self._profile(all_of_them), self._mark, counts)
            except TimerError:
                continue
        return repetitions(self._profile(all_of_them), self._mark, counts)

    def measure(self, call: Callable[[], object]) -> Timing:
        """Time a call."""
        (timing,) = self.measure_all([call])
        return timing

    def measure_all(self, calls: Sequence[Callable[[], object]]) -> list[Timing]:
        """Time several calls in one trace: starting and reading one takes longer than most calls."""
        seconds = [_warm(call) for call in calls]
        walls = [_wall_ms(call, _affordable(self.calls, s)) for call, s in zip(calls, seconds, strict=True)]
        found = self._groups(calls, [_affordable(self.count, s) for s in seconds])
        return [summarize(groups, wall) for groups, wall in zip(found, walls, strict=True)]

    def block(self, call: Callable[[], object]) -> float:
        """Median device time of a few flushed calls."""
        return summarize(self._groups([call], [self.count])[0], 0.0).device_ms


class EventTimer:
    """Events around single calls, on the current GPU: gaps between kernels count too.

    Each goes behind two flushes: while these run, the launches of the call are queued, and nothing waits for the host.

    Parameters
    ----------
    count : repetitions.
    calls : back to back, for the wall time.
    """

    def __init__(self, count: int = 10, calls: int = 10) -> None:
        self.count, self.calls = count, calls
        self._flush = _Flush()
        self.description = f"events around each call, gaps included; {self._flush.description}, twice"

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        """Milliseconds of each of so many calls."""
        mark: Any = torch.cuda.Event
        pairs = [(mark(enable_timing=True), mark(enable_timing=True)) for _ in range(count)]
        for first, last in pairs:
            self._flush()
            self._flush()
            first.record()
            call()
            last.record()
        torch.cuda.synchronize()
        return [float(first.elapsed_time(last)) for first, last in pairs]

    def measure(self, call: Callable[[], object]) -> Timing:
        """Time a call."""
        seconds = _warm(call)
        wall_ms = _wall_ms(call, _affordable(self.calls, seconds))
        return _timing(self.times(call, _affordable(self.count, seconds)), wall_ms, {})

    def measure_all(self, calls: Sequence[Callable[[], object]]) -> list[Timing]:
        """Time several, one after the other."""
        return [self.measure(call) for call in calls]

    def block(self, call: Callable[[], object]) -> float:
        """Median of a few flushed calls, fewer where they are slow."""
        times = self.times(call, _LEAST)
        rest = min(self.count - _LEAST, int(_BLOCK_MS / statistics.median(times)))
        return statistics.median(times + self.times(call, max(rest, 0)))


class ClockTimer:
    """Wall clock around single calls on the CPU; caches stay warm."""

    description = "wall clock around each call, caches warm"

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def _times(self, call: Callable[[], object], count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def measure(self, call: Callable[[], object]) -> Timing:
        """Time a call; the wall time is the mean over all calls."""
        (warm,) = self._times(call, 1)
        began, count = time.perf_counter(), _affordable(self.count, warm / 1e3)
        times = self._times(call, count)
        return _timing(times, 1e3 * (time.perf_counter() - began) / count, {})

    def measure_all(self, calls: Sequence[Callable[[], object]]) -> list[Timing]:
        """Time several, one after the other."""
        return [self.measure(call) for call in calls]

    def block(self, call: Callable[[], object]) -> float:
        """Least of a few calls."""
        return min(self._times(call, self.count))


class ProcessorTimer(ClockTimer):
    """Processor time of this thread, which other processes change little; for a process pinned to one core.

    There the driver of the CPU runs all blocks in the calling thread. What is left of the noise (caches, clocks) only
    ever adds, so the least of a block of calls is taken.

    Parameters
    ----------
    count : repetitions of `measure`.
    block_s : seconds that one block takes.
    """

    description = "processor time on one core, least of a block, caches warm"

    def __init__(self, count: int = 10, block_s: float = 0.03) -> None:
        super().__init__(count)
        self.block_s = block_s

    def _times(self, call: Callable[[], object], count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.thread_time_ns()
            call()
            times.append((time.thread_time_ns() - start) / 1e6)
        return times

    def block(self, call: Callable[[], object]) -> float:
        """Least of as many calls as fit in the block, three at least."""
        times = self._times(call, _LEAST)
        rest = int((1e3 * self.block_s - sum(times)) / min(times))
        return min(times + self._times(call, max(rest, 0)))


def timer_for(device: str, count: int, trace: bool = True) -> Timer:
    """The timer for calls on ``"cuda"`` or ``"cpu"``; without `trace`, one that needs no setting up."""
    if device == "cpu":
        return ClockTimer(count)
    if not trace:
        return EventTimer(count)
    try:
        return DeviceTimer(count)
    except TimerError:
        return EventTimer(count)
