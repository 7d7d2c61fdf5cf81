"""When one of two versions is slower: intervals of ratios, and what is concluded from them.

Times are compared as logarithms of ratios, above 0 where B takes longer. The interval is a bootstrap in two levels:
rounds (each has processes of its own, which differ in ways that no repetition inside a process shows), and pairs of
neighbouring measurements within a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

__all__ = ["Interval", "Verdict", "classify", "conclude", "paired", "unpaired"]

_DRAWS = 4000
_TAIL = 2.5  # percent, on each side


class Verdict(str, Enum):
    """What is concluded about B against A."""

    FAST = "FAST"
    SLOW = "SLOW"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True)
class Interval:
    """Estimate of a logarithm of a ratio, and the ends of its 95 % interval."""

    low: float
    middle: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance of the ends."""
        return (self.high - self.low) / 2


def _interval(middle: float, draws: np.ndarray) -> Interval:
    low, high = np.percentile(draws, [_TAIL, 100 - _TAIL])
    return Interval(float(low), middle, float(high))


def paired(rounds: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Interval of the mean over rounds of the median of a round's log-ratios.

    Parameters
    ----------
    rounds : for each round the log-ratios of its pairs.
    seed : of the resampling.
    """
    least = min(map(len, rounds))
    table = np.array([pairs[:least] for pairs in rounds])
    count = len(table)
    generator = np.random.default_rng(seed)
    drawn = table[generator.integers(count, size=(_DRAWS, count))]
    again = np.take_along_axis(drawn, generator.integers(least, size=drawn.shape), axis=2)
    return _interval(float(np.median(table, axis=1).mean()), np.median(again, axis=2).mean(axis=1))


def unpaired(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval:
    """Interval of the log-ratio of the medians of two independent sets of times."""
    generator = np.random.default_rng(seed)
    first, second = (
        np.median(generator.choice(np.log(x), size=(_DRAWS, len(x))), axis=1) for x in (np.asarray(a), np.asarray(b))
    )
    return _interval(float(np.median(np.log(b)) - np.median(np.log(a))), second - first)


def classify(ratio: Interval, margin: float) -> Verdict:
    """Verdict of one interval.

    SAME where all of it is within the margin. SLOW (FAST) where no change is outside it, and the estimate is beyond the
    margin.

    Parameters
    ----------
    ratio : of B to A.
    margin : relative change that matters, e.g. 0.03.
    """
    edge = math.log1p(margin)
    if -edge < ratio.low and ratio.high < edge:
        return Verdict.SAME
    if ratio.low > 0 and ratio.middle >= edge:
        return Verdict.SLOW
    if ratio.high < 0 and ratio.middle <= -edge:
        return Verdict.FAST
    return Verdict.AMBIGUOUS


_CHANGED = (Verdict.SLOW, Verdict.FAST)


def conclude(ratio: Interval, control: Interval | None, again: Interval | None, margin: float) -> Verdict:
    """Verdict that can be believed.

    Parameters
    ----------
    ratio : of B to A, from all rounds.
    control : of A to itself in the same rounds. Where that seems to have changed, nothing can be said about B.
    again : of B to A from the rerun alone; a change must be seen there too.
    margin : as for `classify`.
    """
    if control is not None and classify(control, margin) in _CHANGED:
        return Verdict.AMBIGUOUS
    verdict = classify(ratio, margin)
    if verdict in _CHANGED and again is not None and classify(again, margin) is not verdict:
        return Verdict.AMBIGUOUS
    return verdict
