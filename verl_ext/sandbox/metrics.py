"""What a pool counts: sandboxes made and ended, faults by cause, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_KEPT = 100_000  # durations kept of each kind until the next report: more than a step has, bounded all the same
DURATIONS = ("wait_s", "create_s", "acquire_s", "execute_s", "session_s")


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed; 0.0 for none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


@dataclass
class PoolReport:
    """Counts and durations of one pool over a while, or of several pools together. Picklable.

    Attributes:
        counts: see `PoolMetrics`; a name like retries/SandboxQuotaError has its cause behind the slash.
        durations: lists of seconds by the names in `DURATIONS`.
        peaks: most sandboxes alive, starting and trajectories waiting at once. Summed over pools, so with
            several workers they are an upper bound of what was at once.
    """

    counts: Counter[str] = field(default_factory=Counter)
    durations: dict[str, list[float]] = field(default_factory=dict)
    peaks: Counter[str] = field(default_factory=Counter)

    @classmethod
    def merged(cls, reports: Iterable[PoolReport]) -> PoolReport:
        """The reports of several pools as one."""
        whole = cls()
        for report in reports:
            whole.counts.update(report.counts)
            whole.peaks.update(report.peaks)
            for name, values in report.durations.items():
                whole.durations.setdefault(name, []).extend(values)
        return whole

    @property
    def waiting_share(self) -> float:
        """Share of the sessions' time spent waiting for a place, 0 to 1."""
        total_s = sum(self.durations.get("session_s", ()))
        return min(1.0, sum(self.durations.get("wait_s", ())) / total_s) if total_s else 0.0

    def summary(self) -> dict[str, float]:
        """Flat numbers for a logger; keys carry their unit."""
        numbers: dict[str, float] = {name: float(count) for name, count in self.counts.items()}
        for kind in ("retries", "failures"):
            numbers[kind] = float(sum(n for name, n in self.counts.items() if name.startswith(f"{kind}/")))
        numbers |= {f"{name}/peak": float(value) for name, value in self.peaks.items()}
        numbers["waiting_share"] = self.waiting_share
        for name in DURATIONS[:-1]:
            values = self.durations.get(name, [])
            numbers[f"{name}/p50"] = percentile(values, 0.50)
            numbers[f"{name}/p95"] = percentile(values, 0.95)
            numbers[f"{name}/max"] = max(values, default=0.0)
        return numbers


class PoolMetrics:
    """Counts since the pool was made, and durations since the last report.

    Counts: created (creates that gave a sandbox), killed (sandboxes that are surely gone), kill_failed (their
    time to live ends them), contexts (opened in shared sandboxes), timeouts (runs whose code went past its
    deadline: data, not a fault), tainted (interpreters given up after a deadline or a fault), retries/CAUSE
    (creates tried again), failures/CAUSE (sessions ended by the service's fault).

    Durations: wait_s (for a place and a turn, per trajectory or sandbox), create_s (the successful create call
    alone), acquire_s (all of it: wait, tries, pauses), execute_s (runs that came back), session_s (from open to
    the start of the end).
    """

    def __init__(self) -> None:
        # Named though nothing happened yet: a curve that is 0 says more than one that is missing.
        self.counts: Counter[str] = Counter(created=0, killed=0, kill_failed=0, contexts=0, timeouts=0, tainted=0)
        self._durations: dict[str, list[float]] = {name: [] for name in DURATIONS}
        self._now: Counter[str] = Counter(alive=0, starting=0, waiting=0)
        self._peaks: Counter[str] = Counter(self._now)
        self._reported: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """One more of `name`."""
        self.counts[name] += 1

    def lasted(self, name: str, seconds: float) -> None:
        """Note a duration."""
        values = self._durations[name]
        if len(values) < _KEPT:
            values.append(seconds)

    def change(self, name: str, by: int) -> None:
        """`alive`, `starting` or `waiting` went up or down."""
        self._now[name] += by
        self._peaks[name] = max(self._peaks[name], self._now[name])

    @property
    def left(self) -> int:
        """Sandboxes not surely gone: those in use now and those whose kill failed."""
        return self.counts["created"] - self.counts["killed"]

    def report(self) -> PoolReport:
        """What happened since the last report; a duration is in one report only."""
        report = PoolReport(
            Counter({name: count - self._reported[name] for name, count in self.counts.items()}),
            self._durations,
            Counter(self._peaks),
        )
        self._reported = Counter(self.counts)
        self._durations = {name: [] for name in DURATIONS}
        self._peaks = Counter(self._now)
        return report

    def totals(self) -> dict[str, float]:
        """The counts since the pool was made, and `left`."""
        return {name: float(count) for name, count in self.counts.items()} | {"left": float(self.left)}
