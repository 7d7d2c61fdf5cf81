"""Calls made longer on purpose, to see whether a comparison finds them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from qla.bench.timing import EventTimer, Timer

__all__ = ["slowed"]

_CYCLES = 1_000_000  # of a kernel that does nothing, some half a millisecond: long enough to tell its clock by
_STEPS = 3


def slowed(call: Callable[[], Any], factor: float, timer: Timer) -> Callable[[], Any]:
    """A call that takes `factor` times as long.

    Parameters
    ----------
    call : has run before.
    factor : more than 1.
    timer : that the call will be timed by: events on a GPU, else processor time.
    """
    return _idle_device(call, factor, timer) if isinstance(timer, EventTimer) else _busy_thread(call, factor)


def _busy_thread(call: Callable[[], Any], factor: float) -> Callable[[], Any]:
    def run() -> Any:
        began = time.thread_time_ns()
        result = call()
        until = began + factor * (time.thread_time_ns() - began)
        while time.thread_time_ns() < until:
            pass
        return result

    return run


def _idle_device(call: Callable[[], Any], factor: float, timer: EventTimer) -> Callable[[], Any]:
    """Behind the call goes a kernel that waits; how long is found by trying, since its launch takes time as well."""
    sleep: Callable[[int], None] = torch.cuda._sleep

    def median(function: Callable[[], Any]) -> float:
        return statistics.median(timer.times(function, 15))

    per_ms = _CYCLES / (median(lambda: sleep(2 * _CYCLES)) - median(lambda: sleep(_CYCLES)))
    wanted = factor * median(call)
    cycles = 0

    def run() -> Any:
        result = call()
        sleep(cycles)
        return result

    for _ in range(_STEPS):
        cycles = max(0, cycles + int((wanted - median(run)) * per_ms))
    return run
