"""What a pool counts: sandboxes made and ended, faults by cause, and where the time went."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_KEPT = 20_000  # durations kept of each kind: enough for p95 of several steps, bounded for long runs


def _durations() -> deque[float]:
    return deque(maxlen=_KEPT)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed; 0.0 for none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


@dataclass
class PoolMetrics:
    """Counters since the pool was made, and the latest durations in seconds.

    Attributes:
        created: creates that gave a sandbox.
        killed: sandboxes that are surely gone.
        kill_failed: sandboxes that could not be ended; their time to live ends them.
        timeouts: runs whose code went past its deadline (data, not a fault).
        retries: creates tried again, by name of the error.
        failures: sessions ended by the service's fault, by name of the error.
        wait_s: waiting for a place and a turn, per sandbox.
        create_s: the successful create call alone.
        acquire_s: all of it: wait, tries, pauses.
        execute_s: runs that came back.
        session_s: sessions from open to the start of their end.
    """

    created: int = 0
    killed: int = 0
    kill_failed: int = 0
    timeouts: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    wait_s: deque[float] = field(default_factory=_durations)
    create_s: deque[float] = field(default_factory=_durations)
    acquire_s: deque[float] = field(default_factory=_durations)
    execute_s: deque[float] = field(default_factory=_durations)
    session_s: deque[float] = field(default_factory=_durations)

    @property
    def left(self) -> int:
        """Sandboxes not surely gone: those in use now and those whose kill failed."""
        return self.created - self.killed

    @property
    def waiting_share(self) -> float:
        """Share of the sessions' time spent waiting for a place, 0 to 1."""
        total_s = sum(self.session_s)
        return min(1.0, sum(self.wait_s) / total_s) if total_s else 0.0

    def summary(self) -> dict[str, float]:
        """Flat numbers for a logger; keys carry their unit."""
        numbers: dict[str, float] = {
            "created": self.created,
            "killed": self.killed,
            "kill_failed": self.kill_failed,
            "left": self.left,
            "timeouts": self.timeouts,
            "retries": self.retries.total(),
            "failures": self.failures.total(),
            "waiting_share": self.waiting_share,
        }
        numbers |= {f"retries/{name}": count for name, count in self.retries.items()}
        numbers |= {f"failures/{name}": count for name, count in self.failures.items()}
        for name in ("wait_s", "create_s", "acquire_s", "execute_s"):
            values = getattr(self, name)
            numbers[f"{name}/p50"] = percentile(values, 0.50)
            numbers[f"{name}/p95"] = percentile(values, 0.95)
        return {name: float(value) for name, value in numbers.items()}
