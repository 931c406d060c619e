"""Where a trajectory's code runs: the two session modes.

A seat is one interpreter with its state. In mode `sandbox` it is a sandbox of the trajectory's own
(`OwnSandboxes`), in mode `context` one of several code contexts of a shared one (`shared.SharedSandboxes`).

What a seat isolates from the other trajectories:

| | sandbox | context |
|---|---|---|
| variables, imports, working directory | yes | yes |
| files, processes, network | yes | no |
| CPU, memory, disk | yes, as far as the service does | no: one's exhaustion is the others' |
| the end of the sandbox | costs one trajectory | costs all that have a context in it |

tests/contract/test_session_modes.py holds the table to the local server.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verl_ext.errors import SandboxError
from verl_ext.sandbox.interface import Execution, Sandbox
from verl_ext.sandbox.lifecycle import SandboxLifecycle

logger = logging.getLogger(__name__)

MODES = ("sandbox", "context")


class Seat(Protocol):
    """One interpreter that one trajectory has to itself."""

    @property
    def sandbox_id(self) -> str:
        """The sandbox that it is in."""
        ...

    async def run_code(self, code: str, *, timeout_s: float) -> Execution:
        """See `Sandbox.run_code`."""
        ...


class Seating(Protocol):
    """Gives seats to sessions, which it knows by name."""

    def enter(self, session: str) -> None:
        """A session has begun and may want a seat soon."""
        ...

    async def take(self, session: str, trajectory_id: str, hold: Callable[[Seat], None]) -> None:
        """Get a seat and give it to `hold` at once; waits for it. What is raised: `SandboxLifecycle.start`."""
        ...

    async def leave(self, seat: Seat, *, broken: bool, again: bool) -> None:
        """Give a seat up; never raises for the service's faults.

        Args:
            seat: from `take`.
            broken: the service failed in it, so what it does now is unknown.
            again: the session takes another one at once, and keeps its place in the limits; if False it is over.
        """
        ...

    async def give_up(self, session: str) -> None:
        """A session without a seat is over; harmless when repeated."""
        ...

    async def aclose(self) -> None:
        """End what no session holds."""
        ...


@dataclass(eq=False)
class _OwnSeat:
    sandbox: Sandbox
    lease_id: str
    keep_alive: asyncio.Task[None]
    session: str = ""

    @property
    def sandbox_id(self) -> str:
        return self.sandbox.sandbox_id

    async def run_code(self, code: str, *, timeout_s: float) -> Execution:
        return await self.sandbox.run_code(code, timeout_s=timeout_s)


class OwnSandboxes:
    """A fresh sandbox for each trajectory, never used again.

    Args:
        lifecycle: starts and ends them.
        ahead: sandboxes to have ready before anybody asks, at most one for each session that has none yet. Only
            places that nobody waits for are used.
    """

    def __init__(self, lifecycle: SandboxLifecycle, *, ahead: int = 0) -> None:
        self._lifecycle = lifecycle
        self._ahead = ahead
        self._sessions: dict[str, str | None] = {}  # to the lease that each lives on, which may be a ready one's
        self._ready: list[_OwnSeat] = []
        self._making: asyncio.Task[None] | None = None

    def enter(self, session: str) -> None:
        """See `Seating.enter`."""
        self._sessions[session] = None
        self._make_ahead()

    async def take(self, session: str, trajectory_id: str, hold: Callable[[Seat], None]) -> None:
        """See `Seating.take`."""
        lease_id = self._sessions.get(session)
        if lease_id is None and self._ready:
            seat = self._ready.pop(0)
            seat.session, self._sessions[session] = session, seat.lease_id
            hold(seat)
        else:
            lease_id = self._sessions[session] = lease_id or session
            await self._lifecycle.start(
                lease_id, trajectory_id, lambda sandbox: hold(self._seat(sandbox, lease_id, session))
            )
        self._make_ahead()

    def _seat(self, sandbox: Sandbox, lease_id: str, session: str) -> _OwnSeat:
        return _OwnSeat(sandbox, lease_id, asyncio.create_task(self._lifecycle.keep_alive(sandbox)), session)

    @property
    def _wanted(self) -> int:
        return min(self._ahead, sum(lease is None for lease in self._sessions.values()))

    def _make_ahead(self) -> None:
        if self._making is None and len(self._ready) < self._wanted:
            self._making = asyncio.create_task(self._keep_ready())

    async def _keep_ready(self) -> None:
        try:
            while len(self._ready) < self._wanted and await self._make_one():
                continue
        except SandboxError as error:
            logger.debug("no sandbox ahead of time: %s", type(error).__name__)  # whoever needs one will say more
        finally:
            self._making = None

    async def _make_one(self) -> bool:
        lease_id = f"ahead-{uuid.uuid4().hex[:12]}"
        if not await self._lifecycle.limiter.try_start(lease_id):
            return False
        ready = len(self._ready)
        try:
            # Asking again for a turn that was granted is harmless, so this starts at once.
            await self._lifecycle.start(
                lease_id, "ahead", lambda sandbox: self._ready.append(self._seat(sandbox, lease_id, ""))
            )
        except BaseException:
            if len(self._ready) == ready:
                await asyncio.shield(self._lifecycle.limiter.release(lease_id))
            raise
        await self._end_surplus()
        return True

    async def leave(self, seat: Seat, *, broken: bool, again: bool) -> None:
        """See `Seating.leave`; the sandbox ends whatever happened in it."""
        assert isinstance(seat, _OwnSeat)  # noqa: S101 - from take
        seat.keep_alive.cancel()
        if again:
            await self._lifecycle.end(seat.sandbox)
            return
        self._sessions.pop(seat.session, None)
        await self._lifecycle.end_and_release(seat.sandbox, seat.lease_id)
        await self._end_surplus()

    async def give_up(self, session: str) -> None:
        """See `Seating.give_up`."""
        lease_id = self._sessions.pop(session, None)
        if lease_id is not None:
            await self._lifecycle.limiter.release(lease_id)
        await self._end_surplus()

    async def _end_surplus(self) -> None:
        surplus = [self._ready.pop() for _ in range(len(self._ready) - self._wanted)]
        await asyncio.gather(*(self.leave(seat, broken=False, again=False) for seat in surplus))

    async def aclose(self) -> None:
        """See `Seating.aclose`."""
        self._sessions.clear()
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])
        await self._end_surplus()
