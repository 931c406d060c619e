"""How many sandboxes may live and start at once, and how fast.

`Limiter` is the seam: `LocalLimiter` counts within one process; a broker that counts across the workers of a
run (a Ray actor) can take its place, since every call is a coroutine over plain strings and `release` may be
repeated. The caller names the lease, so it can give back a lease whose grant it never got to hear of.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class Limiter(Protocol):
    """Grants the right to have one sandbox, first come first served."""

    async def acquire_start(self, lease_id: str) -> None:
        """Wait until `lease_id` may start a sandbox now.

        The first call takes a place among the living, kept until `release`. Every call takes a place among
        the starting, kept until `start_done`, and a turn of the create rate; so a retry is the same call.
        A cancelled wait leaves the caller to call `release`.
        """
        ...

    async def start_done(self, lease_id: str) -> None:
        """The create ended, well or not; the lease itself goes on."""
        ...

    async def release(self, lease_id: str) -> None:
        """The sandbox is closed, or was never made. Harmless when repeated or unknown."""
        ...


class LocalLimiter:
    """Limits within one process and one event loop.

    Args:
        max_alive: sandboxes starting, in use and closing, together.
        max_starting: creates in flight.
        create_rate_per_s: creates begun per second, evenly spaced; None for no limit.
    """

    def __init__(self, *, max_alive: int, max_starting: int, create_rate_per_s: float | None = None) -> None:
        self._alive = _Places(max_alive)
        self._starting = _Places(max_starting)
        self._interval_s = 1.0 / create_rate_per_s if create_rate_per_s else 0.0
        self._next_start_s = 0.0

    async def acquire_start(self, lease_id: str) -> None:
        """See `Limiter.acquire_start`."""
        await self._alive.take(lease_id)
        await self._starting.take(lease_id)
        if self._interval_s:
            now_s = asyncio.get_running_loop().time()
            turn_s = max(now_s, self._next_start_s)
            self._next_start_s = turn_s + self._interval_s
            await asyncio.sleep(turn_s - now_s)

    async def start_done(self, lease_id: str) -> None:
        """See `Limiter.start_done`."""
        self._starting.give(lease_id)

    async def release(self, lease_id: str) -> None:
        """See `Limiter.release`."""
        self._starting.give(lease_id)
        self._alive.give(lease_id)

    @property
    def alive(self) -> int:
        """Leases held."""
        return len(self._alive.holders)


class _Places:
    """A counted semaphore whose places have owners, with a strict queue."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a limit of {limit} sandboxes admits none: give at least 1")
        self._limit = limit
        self.holders: set[str] = set()
        self._queue: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def take(self, lease_id: str) -> None:
        if lease_id in self.holders:
            return
        if len(self.holders) < self._limit and not self._queue:
            self.holders.add(lease_id)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((lease_id, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if (lease_id, turn) in self._queue:
                self._queue.remove((lease_id, turn))
            else:  # granted and cancelled in the same moment
                self.give(lease_id)
            raise

    def give(self, lease_id: str) -> None:
        self.holders.discard(lease_id)
        while self._queue and len(self.holders) < self._limit:
            waiting_id, turn = self._queue.popleft()
            if not turn.done():
                self.holders.add(waiting_id)
                turn.set_result(None)
