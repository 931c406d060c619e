"""Many trajectories to a sandbox, each in a code context of its own: the session mode `context`.

So an account with ten sandboxes serves a thousand trajectories. What that costs in isolation is in the table
of verl_ext.sandbox.seats: variables and working directory are a trajectory's own, nothing else is.

A sandbox that failed in any way takes no new contexts and ends with its last one. One that nobody uses ends
after a few seconds, so that every step begins with clean ones and places are not kept from other workers.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from verl_ext.errors import SandboxDiedError, SandboxError
from verl_ext.sandbox.interface import Execution, Sandbox
from verl_ext.sandbox.lifecycle import SandboxLifecycle
from verl_ext.sandbox.seats import Seat

logger = logging.getLogger(__name__)
IDLE_S = 5.0


@dataclass(eq=False)
class _Shared:
    """A sandbox with its contexts."""

    sandbox: Sandbox
    lease_id: str
    keep_alive: asyncio.Task[None]
    taken: int = 0  # contexts in use, or on their way in or out
    draining: bool = False  # takes no new contexts
    gone: bool = False
    idle: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _ContextSeat:
    shared: _Shared
    context_id: str
    session: str

    @property
    def sandbox_id(self) -> str:
        return self.shared.sandbox.sandbox_id

    async def run_code(self, code: str, *, timeout_s: float) -> Execution:
        try:
            return await self.shared.sandbox.run_code(code, timeout_s=timeout_s, context_id=self.context_id)
        except SandboxError as error:
            self.shared.draining = True
            self.shared.gone |= isinstance(error, SandboxDiedError)
            raise


@dataclass(eq=False)
class _Opening:
    """A sandbox on its way."""

    task: asyncio.Task[None]
    has_turn: bool = False


class SharedSandboxes:
    """Seats in shared sandboxes; see `Seating`.

    Args:
        lifecycle: starts and ends the sandboxes.
        contexts: code contexts of one sandbox at once.
        idle_s: seconds after which a sandbox that nobody uses is ended.
    """

    def __init__(self, lifecycle: SandboxLifecycle, *, contexts: int, idle_s: float = IDLE_S) -> None:
        if contexts < 1:
            raise ValueError(f"{contexts} contexts to a sandbox serve nobody: give at least 1")
        self._lifecycle = lifecycle
        self._contexts = contexts
        self._idle_s = idle_s
        self._open: list[_Shared] = []
        self._opening: dict[str, _Opening] = {}  # by lease
        self._waiting: deque[asyncio.Future[_Shared]] = deque()
        self._kept: dict[str, _Shared] = {}  # room of sessions between two contexts
        self._ending: set[asyncio.Task[None]] = set()

    def enter(self, session: str) -> None:
        """See `Seating.enter`; a shared sandbox is opened when somebody asks for a seat."""

    async def take(self, session: str, trajectory_id: str, hold: Callable[[Seat], None]) -> None:
        """See `Seating.take`."""
        shared = self._kept.pop(session, None) or await self._room()
        try:
            context_id = await shared.sandbox.open_context()
            # No await between here and `hold`: a cancellation cannot fall in between.
            self._lifecycle.metrics.count("contexts")
            hold(_ContextSeat(shared, context_id, session))
        except BaseException as error:
            # A context may have been made all the same; it ends with its sandbox.
            shared.gone |= isinstance(error, SandboxDiedError)
            self._vacate(shared, broken=True)
            raise

    async def _room(self) -> _Shared:
        """A sandbox with room, with the room taken; first come first served."""
        metrics, loop = self._lifecycle.metrics, asyncio.get_running_loop()
        ready: asyncio.Future[_Shared] = loop.create_future()
        self._waiting.append(ready)
        began_s = loop.time()
        metrics.change("waiting", +1)
        try:
            self._arrange()
            return await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self._vacate(ready.result(), broken=False)
            raise
        finally:
            if ready in self._waiting:
                self._waiting.remove(ready)
                self._arrange()
            metrics.change("waiting", -1)
            metrics.lasted("wait_s", loop.time() - began_s)

    def _arrange(self) -> None:
        """Give what room there is to those who wait, and have as many sandboxes on their way as the rest needs."""
        while self._waiting and (roomy := self._roomiest()) is not None:
            ready = self._waiting.popleft()
            if not ready.done():
                roomy.taken += 1
                self._stay(roomy)
                ready.set_result(roomy)
        wanted = ceil(len(self._waiting) / self._contexts)
        while len(self._opening) < wanted:
            lease_id = f"shared-{uuid.uuid4().hex[:12]}"
            self._opening[lease_id] = _Opening(asyncio.create_task(self._open_one(lease_id)))
        idle = [opening for opening in self._opening.values() if not opening.has_turn]
        for opening in idle[: max(0, len(self._opening) - wanted)]:
            opening.task.cancel()

    def _roomiest(self) -> _Shared | None:
        roomy = [shared for shared in self._open if not shared.draining and shared.taken < self._contexts]
        return min(roomy, key=lambda shared: shared.taken, default=None)

    async def _open_one(self, lease_id: str) -> None:
        made: list[_Shared] = []

        def hold(sandbox: Sandbox) -> None:
            made.append(_Shared(sandbox, lease_id, asyncio.create_task(self._lifecycle.keep_alive(sandbox))))

        error: SandboxError | None = None
        try:
            await self._lifecycle.start(lease_id, "shared", hold, on_turn=lambda: self._has_turn(lease_id))
        except SandboxError as failed:
            error = failed
        finally:
            del self._opening[lease_id]
            self._open += made
            for shared in made:
                self._leave_idle(shared)
            if not made:
                await asyncio.shield(self._lifecycle.limiter.release(lease_id))
        if error is not None:
            # The sessions that it was for have waited for its budget; the others wait for theirs.
            for _ in range(min(self._contexts, len(self._waiting))):
                ready = self._waiting.popleft()
                if not ready.done():
                    ready.set_exception(type(error)(str(error)))
        self._arrange()

    def _has_turn(self, lease_id: str) -> None:
        self._opening[lease_id].has_turn = True

    async def leave(self, seat: Seat, *, broken: bool, again: bool) -> None:
        """See `Seating.leave`: the context is removed, and its room is free once it is."""
        assert isinstance(seat, _ContextSeat)  # noqa: S101 - from take
        shared = seat.shared
        if not broken:
            try:
                await shared.sandbox.close_context(seat.context_id)
            except SandboxError as error:
                broken = True
                logger.info("sandbox %s takes no more contexts: %s", shared.sandbox.sandbox_id, error)
        if again and not shared.draining and not broken:
            self._kept[seat.session] = shared
        else:
            self._vacate(shared, broken=broken)

    def _vacate(self, shared: _Shared, *, broken: bool) -> None:
        shared.taken -= 1
        shared.draining |= broken
        self._leave_idle(shared)
        self._arrange()

    def _stay(self, shared: _Shared) -> None:
        if shared.idle is not None:
            shared.idle.cancel()
            shared.idle = None

    def _leave_idle(self, shared: _Shared) -> None:
        """End it now or soon if nobody is in it; at once if it is gone, for its place is worth more to others."""
        if shared.gone:
            self._begin_end(shared)
        elif shared.taken or shared not in self._open:
            return
        elif shared.draining:
            self._begin_end(shared)
        elif shared.idle is None:
            shared.idle = asyncio.get_running_loop().call_later(self._idle_s, self._begin_end, shared)

    def _begin_end(self, shared: _Shared) -> None:
        if shared not in self._open:
            return
        self._stay(shared)
        self._open.remove(shared)
        shared.keep_alive.cancel()
        task = asyncio.create_task(self._lifecycle.end_and_release(shared.sandbox, shared.lease_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def give_up(self, session: str) -> None:
        """See `Seating.give_up`."""
        if (shared := self._kept.pop(session, None)) is not None:
            self._vacate(shared, broken=False)

    async def aclose(self) -> None:
        """See `Seating.aclose`."""
        opening = [opening.task for opening in self._opening.values()]
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening)
        for shared in list(self._open):
            self._begin_end(shared)
        if self._ending:
            await asyncio.wait(list(self._ending))
