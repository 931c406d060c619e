"""What an alarm's rule measures at each step: one number out of the step's metrics and what came before.

A gauge gives None where the step does not have what it needs: a key that is missing, no number, too few calls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any, Protocol

Step = Mapping[str, Any]  # metrics by name, as verl's logger gets them or as metrics.jsonl has them
Signal = Callable[[Step], float | None]


class Gauge(Protocol):
    """One number a step. Holds what it needs of the steps before, so each run has its own."""

    def read(self, step: Step) -> float | None:
        """The number of this step, None if there is none."""
        ...

    def settle(self, *, normal: bool) -> None:
        """Told after each number whether the rule takes the step for normal."""
        ...


def number(step: Step, key: str) -> float | None:
    """A finite number, None if it is missing or is none."""
    value = step.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def of(key: str) -> Signal:
    """The metric itself."""
    return lambda step: number(step, key)


def share(part: str, whole: str) -> Signal:
    """One metric as a share of another, None where that is 0."""

    def signal(step: Step) -> float | None:
        top, bottom = number(step, part), number(step, whole)
        return None if top is None or not bottom else top / bottom

    return signal


def counted(key: str, by: str, least: int) -> Signal:
    """A ratio, None where it is of fewer than `least`: one call that fails is no ratio."""

    def signal(step: Step) -> float | None:
        count = number(step, by)
        return number(step, key) if count is not None and count >= least else None

    return signal


def tokens_per_s(step: Step) -> float | None:
    """Tokens of the step by its seconds; verl's `timing_s/step` ends before a validation or a checkpoint begins."""
    tokens, seconds = number(step, "perf/total_num_tokens"), number(step, "timing_s/step")
    return tokens / seconds if tokens is not None and seconds else None


def not_finite(*keys: str) -> Signal:
    """How many of the metrics are there and are NaN or infinite; metrics.jsonl has null for these."""

    def signal(step: Step) -> float | None:
        there = [key for key in keys if key in step]
        return float(sum(number(step, key) is None for key in there)) if there else None

    return signal


class Level:
    """The signal itself."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal

    def read(self, step: Step) -> float | None:
        """The signal."""
        return self._signal(step)

    def settle(self, *, normal: bool) -> None:
        """Nothing to remember."""


class ToNormal:
    """The signal over the median of the last normal steps: 2.0 is twice what it used to be.

    Steps that the rule does not take for normal stay out of the median, so that what goes wrong for long does not
    become the measure.

    Args:
        signal: above 0.
        window: steps that the median is of at most.
        least: steps that it takes at least; before that there is no number.
    """

    def __init__(self, signal: Signal, window: int = 20, least: int = 5) -> None:
        self._signal = signal
        self._normal: deque[float] = deque(maxlen=window)
        self._least = least
        self._now: float | None = None

    def read(self, step: Step) -> float | None:
        """The ratio."""
        self._now = self._signal(step)
        if self._now is None:
            return None
        if len(self._normal) < self._least:
            self.settle(normal=True)
            return None
        usual = median(self._normal)
        return self._now / usual if usual > 0 else None

    def settle(self, *, normal: bool) -> None:
        """A normal step is measured by from now on."""
        if normal and self._now is not None:
            self._normal.append(self._now)
            self._now = None


class ToStart:
    """The signal over its median of the run's first steps.

    Args:
        signal: above 0.
        floor: stands for a start below it.
        first: steps that count as the start.
    """

    def __init__(self, signal: Signal, floor: float, first: int = 3) -> None:
        self._signal = signal
        self._floor = floor
        self._first = first
        self._start: list[float] = []

    def read(self, step: Step) -> float | None:
        """The ratio."""
        now = self._signal(step)
        if now is None:
            return None
        if len(self._start) < self._first:
            self._start.append(now)
            return None
        return now / max(self._floor, median(self._start))

    def settle(self, *, normal: bool) -> None:
        """Nothing to remember."""


class _Smoothed:
    """Means over the last steps, and the best of them so far."""

    def __init__(self, signal: Signal, window: int) -> None:
        self._signal = signal
        self._recent: deque[float] = deque(maxlen=window)
        self._best: float | None = None

    def _mean(self, step: Step) -> float | None:
        now = self._signal(step)
        if now is None:
            return None
        self._recent.append(now)
        return fmean(self._recent) if len(self._recent) == self._recent.maxlen else None

    def settle(self, *, normal: bool) -> None:
        """Nothing to remember."""


class BelowBest(_Smoothed):
    """How far the mean of the last steps is below the best such mean, as a share of `scale`.

    Args:
        signal: the reward.
        low, high: the metrics that hold its least and greatest value; the widest span seen is the scale.
        window: steps of a mean.
    """

    def __init__(self, signal: Signal, low: str, high: str, window: int = 5) -> None:
        super().__init__(signal, window)
        self._low, self._high = low, high
        self._least, self._greatest = math.inf, -math.inf

    def read(self, step: Step) -> float | None:
        """The share, 0 to 1."""
        mean = self._mean(step)
        least, greatest = number(step, self._low), number(step, self._high)
        self._least = min(self._least, math.inf if least is None else least)
        self._greatest = max(self._greatest, -math.inf if greatest is None else greatest)
        if mean is None:
            return None
        self._best = mean if self._best is None else max(self._best, mean)
        span = self._greatest - self._least
        return (self._best - mean) / span if 0 < span < math.inf else None


class SinceBest(_Smoothed):
    """Steps since the mean of the last steps was last better than the best before, by more than `gain`.

    Args:
        signal: the reward.
        gain: less than this is noise.
        done: 0 wherever this signal is at least `enough`: what is learned does not rise.
        enough: see `done`.
        window: steps of a mean.
    """

    def __init__(self, signal: Signal, gain: float, done: Signal, enough: float, window: int = 5) -> None:
        super().__init__(signal, window)
        self._gain, self._done, self._enough = gain, done, enough
        self._since = 0

    def read(self, step: Step) -> float | None:
        """The count."""
        mean = self._mean(step)
        if mean is None:
            return None
        better = self._best is None or mean > self._best + self._gain
        if better:
            self._best = mean
        learned = (self._done(step) or 0.0) >= self._enough
        self._since = 0 if better or learned else self._since + 1
        return float(self._since)
