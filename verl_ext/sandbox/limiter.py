"""How many sandboxes may live and start at once, and how fast.

`Limiter` is the seam. `LocalLimiter` counts within one process; `BrokerClient` (verl_ext.sandbox.broker_client) asks
the run's one broker. Both stand on `LeaseBook`, which knows nothing of processes.

Who goes next: a lease that has its place and tries again; then the waiter whose owner (a worker of the run)
holds least; then the one who came first. So one worker's storm cannot starve another, and within a worker it
is first come first served.

After a refusal for quota nothing starts for a while, longer after each further one, and then one start alone
is tried. An account that frees its places late is so asked once in a while instead of by everybody at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from verl_ext.errors import SandboxUnavailableError

REFUSED_BASE_S = 0.5
REFUSED_CAP_S = 15.0


@dataclass(frozen=True)
class Limits:
    """What one run may take of an account.

    Attributes:
        max_alive: sandboxes starting, in use and closing, together.
        max_starting: creates in flight.
        create_rate_per_s: creates begun per second, evenly spaced; None for no limit.
        quota_release_s: seconds for which the service counts a sandbox that is gone.
        reserved_for: owners of whom each may count on max_alive // reserved_for places; 0 for none. For
            sandboxes that are held long, where whoever came first would keep all.
    """

    max_alive: int
    max_starting: int
    create_rate_per_s: float | None = None
    quota_release_s: float = 0.0
    reserved_for: int = 0

    def __post_init__(self) -> None:
        for name in ("max_alive", "max_starting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of {getattr(self, name)} admits no sandbox: give at least 1")


class Limiter(Protocol):
    """Grants the right to have one sandbox. The caller names the lease, so that it can give back one whose
    grant it never got to hear of.
    """

    async def acquire_start(self, lease_id: str) -> None:
        """Wait until `lease_id` may start a sandbox now.

        The first call takes a place among the living, kept until `release`. Every call takes a place among
        the starting, kept until `start_done`, and a turn of the create rate; so a retry is the same call.
        A cancelled wait leaves the caller to call `release`.
        """
        ...

    async def try_start(self, lease_id: str) -> bool:
        """`acquire_start` if that needs no wait and nobody waits; whether it did."""
        ...

    async def start_done(self, lease_id: str, *, sandbox_id: str = "", refused: bool = False) -> None:
        """The create ended, well (`sandbox_id`) or not; the lease goes on. `refused`: for quota."""
        ...

    async def release(self, lease_id: str) -> None:
        """The sandbox is closed, or was never made. Harmless when repeated or unknown."""
        ...


@dataclass(frozen=True, eq=False)
class _Waiter:
    number: int
    lease_id: str
    owner: str
    turn: asyncio.Future[bool]  # False: the lease was given back meanwhile


class LeaseBook:
    """The leases of one event loop: who holds one, who starts, who waits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held: dict[str, str] = {}  # lease to owner
        self.starting: set[str] = set()
        self.is_open = True
        self._of_owner: Counter[str] = Counter()
        self._retrying: deque[_Waiter] = deque()  # they hold their place already
        self._waiting: dict[str, deque[_Waiter]] = {}  # by owner
        self._numbers = itertools.count()
        self._lagging: deque[float] = deque()  # when places given back will count no more
        self._next_start_s = 0.0
        self._refusals = 0
        self._paused_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Leases that wait for a place or a turn."""
        return len(self._retrying) + sum(map(len, self._waiting.values()))

    async def acquire_start(self, lease_id: str, owner: str = "") -> None:
        """See `Limiter.acquire_start`; asking again for a start that was granted is harmless.

        Raises:
            SandboxUnavailableError: the lease was released meanwhile.
        """
        if lease_id in self.starting:
            return
        self._forget_waiters(lease_id)  # asked before by a caller that lost its line and asks again
        waiter = _Waiter(next(self._numbers), lease_id, owner, asyncio.get_running_loop().create_future())
        queue = self._retrying if lease_id in self.held else self._waiting.setdefault(owner, deque())
        queue.append(waiter)
        self._dispatch()
        try:
            granted = await waiter.turn
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
            else:  # granted and cancelled in the same moment
                self.release(lease_id)
            raise
        if not granted:
            raise SandboxUnavailableError(f"the lease {lease_id} was given back while it waited for a sandbox")

    def try_start(self, lease_id: str, owner: str = "") -> bool:
        """See `Limiter.try_start`."""
        if self.waiting or not self._may_start() or not self._has_place(owner):
            return False
        self._grant(lease_id, owner)
        return True

    def start_done(self, lease_id: str, *, refused: bool = False, succeeded: bool = True) -> None:
        """See `Limiter.start_done`; a success ends the caution after refusals."""
        self.starting.discard(lease_id)
        if refused:
            self._refusals += 1
            cap_s = min(REFUSED_CAP_S, REFUSED_BASE_S * 2.0 ** (self._refusals - 1))
            self._paused_until_s = _now_s() + random.uniform(0.5, 1.0) * cap_s
        elif succeeded:
            self._refusals = 0
        self._dispatch()

    def release(self, lease_id: str) -> None:
        """See `Limiter.release`; whoever waits under this lease is told to give up."""
        self._forget_waiters(lease_id)
        if self._disown(lease_id) and self.limits.quota_release_s:
            self._lagging.append(_now_s() + self.limits.quota_release_s)
        self._dispatch()

    def rename(self, lease_id: str, new_id: str, owner: str) -> None:
        """Let a place go on under another name, the old one's if it has one."""
        self._disown(lease_id)
        self.adopt(new_id, owner)

    def release_owner(self, owner: str) -> list[str]:
        """Release all that an owner holds and waits for; the leases that it held."""
        leases = [lease_id for lease_id, name in self.held.items() if name == owner]
        for waiter in [*self._waiting.get(owner, ()), *(w for w in self._retrying if w.owner == owner)]:
            self._forget_waiters(waiter.lease_id)
        for lease_id in leases:
            self.release(lease_id)
        return leases

    def _disown(self, lease_id: str) -> bool:
        self.starting.discard(lease_id)
        owner = self.held.pop(lease_id, None)
        if owner is not None:
            self._of_owner[owner] -= 1
        return owner is not None

    def adopt(self, lease_id: str, owner: str) -> None:
        """Count a lease that another book granted, whatever the limits say."""
        if lease_id not in self.held:
            self.held[lease_id] = owner
            self._of_owner[owner] += 1

    def open(self) -> None:
        """Grant from now on, if `is_open` was set to False."""
        self.is_open = True
        self._dispatch()

    def _forget_waiters(self, lease_id: str) -> None:
        for queue in [self._retrying, *self._waiting.values()]:
            for waiter in [waiter for waiter in queue if waiter.lease_id == lease_id]:
                queue.remove(waiter)
                if not waiter.turn.done():
                    waiter.turn.set_result(False)

    def _has_place(self, owner: str) -> bool:
        limits, now_s = self.limits, _now_s()
        while self._lagging and self._lagging[0] <= now_s:
            self._lagging.popleft()
        free = limits.max_alive - len(self.held) - len(self._lagging)
        if not limits.reserved_for:
            return free > 0
        share = limits.max_alive // limits.reserved_for
        if self._of_owner[owner] < share:
            return free > 0
        others = [count for name, count in self._of_owner.items() if name != owner]
        unseen = max(0, limits.reserved_for - 1 - len(others))
        return free > sum(max(0, share - count) for count in others) + unseen * share

    def _may_start(self) -> bool:
        now_s = _now_s()
        if not self.is_open or now_s < self._paused_until_s or now_s < self._next_start_s:
            return False
        return len(self.starting) < (1 if self._refusals else self.limits.max_starting)

    def _grant(self, lease_id: str, owner: str) -> None:
        self.adopt(lease_id, owner)
        self.starting.add(lease_id)
        if self.limits.create_rate_per_s:
            self._next_start_s = max(_now_s(), self._next_start_s) + 1.0 / self.limits.create_rate_per_s

    def _dispatch(self) -> None:
        while self._may_start() and (waiter := self._next()) is not None:
            if not waiter.turn.done():
                self._grant(waiter.lease_id, waiter.owner)
                waiter.turn.set_result(True)
        self._wake_later()

    def _next(self) -> _Waiter | None:
        if self._retrying:
            return self._retrying.popleft()
        ready = [queue for owner, queue in self._waiting.items() if queue and self._has_place(owner)]
        if not ready:
            return None
        return min(ready, key=lambda queue: (self._of_owner[queue[0].owner], queue[0].number)).popleft()

    def _wake_later(self) -> None:
        """Look again when time alone will have changed something."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.waiting:
            return
        now_s = _now_s()
        moments = [self._paused_until_s, self._next_start_s, *list(self._lagging)[:1]]
        if later := [moment_s for moment_s in moments if moment_s > now_s]:
            self._timer = asyncio.get_running_loop().call_at(min(later), self._dispatch)


class LocalLimiter:
    """Limits within one process and one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.book = LeaseBook(limits)

    async def acquire_start(self, lease_id: str) -> None:
        """See `Limiter.acquire_start`."""
        await self.book.acquire_start(lease_id)

    async def try_start(self, lease_id: str) -> bool:
        """See `Limiter.try_start`."""
        return self.book.try_start(lease_id)

    async def start_done(self, lease_id: str, *, sandbox_id: str = "", refused: bool = False) -> None:
        """See `Limiter.start_done`."""
        self.book.start_done(lease_id, refused=refused, succeeded=bool(sandbox_id))

    async def release(self, lease_id: str) -> None:
        """See `Limiter.release`."""
        self.book.release(lease_id)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
