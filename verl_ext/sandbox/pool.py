"""A session for each trajectory, within the account's limits, and nothing left behind.

    async with pool.session(trajectory_id) as session:
        execution = await session.run("1 + 1")

Who is to blame decides what the caller gets:

- The *code* fails, or runs past the call deadline: data. `run` returns an `Execution` with an error; after a
  deadline that error says how many seconds were allowed and that the state is lost (`timed_out` is True),
  the interpreter is ended, and the next run of the session gets a fresh one.
- The *service* fails: `SandboxError`. The session is over, its interpreter is ended, every later run raises
  again, and the caller masks the trajectory. A run that is cancelled ends the session as well, for nobody
  knows what its interpreter does now. A create that may work later is retried within a wall budget; `run_code`
  never is (the backend repeats only requests that the service surely did not act on).

An interpreter (`seats.Seat`) is had at the first run, so a trajectory that calls no tool costs none. It is never
given to another trajectory, and ends when the session does, whatever ends it. What it is, a sandbox or a
context in a shared one, is the pool's `mode`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from verl_ext.errors import SandboxError, SandboxUnavailableError
from verl_ext.sandbox.interface import Execution, ExecutionError, SandboxBackend, deadline_error
from verl_ext.sandbox.ledger import SandboxLedger
from verl_ext.sandbox.lifecycle import SandboxLifecycle
from verl_ext.sandbox.limiter import Limiter, Limits, LocalLimiter
from verl_ext.sandbox.metrics import PoolMetrics
from verl_ext.sandbox.seats import MODES, OwnSandboxes, Seat, Seating
from verl_ext.sandbox.shared import SharedSandboxes


class SessionPool:
    """Sessions over one backend. Cheap to build; binds to an event loop only when used.

    Args:
        backend: makes the sandboxes; the pool does not close it.
        mode: `sandbox` or `context`; see verl_ext.sandbox.seats.
        contexts: code contexts of one sandbox at once, in mode `context`.
        ahead: sandboxes to have ready before they are asked for, in mode `sandbox`.
        max_alive: sandboxes alive at once, those starting and closing included.
        max_starting: creates in flight at once; `max_alive` if None.
        create_rate_per_s: creates begun per second; None for no limit.
        ttl_s: seconds after which the service ends a sandbox that we failed to end.
        call_timeout_s: seconds that one run may take, unless it says otherwise.
        acquire_timeout_s: wall budget in seconds for a sandbox once it is its turn: creating, retrying.
        wait_timeout_s: seconds to wait for a turn; None for as long as the caller does.
        kill_timeout_s: seconds to wait for one kill.
        run_labels: labels of every sandbox, for example {RUN_LABEL: run_id, WORKER_LABEL: worker}.
        ledger: notes creates and kills on disk.
        limiter: replaces the limits above, for example by a broker across processes.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        mode: str = "sandbox",
        contexts: int = 8,
        ahead: int = 0,
        max_alive: int = 10,
        max_starting: int | None = None,
        create_rate_per_s: float | None = None,
        ttl_s: int = 300,
        call_timeout_s: float = 30.0,
        acquire_timeout_s: float = 300.0,
        wait_timeout_s: float | None = None,
        kill_timeout_s: float = 15.0,
        run_labels: Mapping[str, str] | None = None,
        ledger: SandboxLedger | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"session mode {mode!r} is unknown: one of {', '.join(MODES)}")
        self._call_timeout_s = call_timeout_s
        self.metrics = PoolMetrics()
        self.lifecycle = SandboxLifecycle(
            backend,
            limiter or LocalLimiter(Limits(max_alive, max_starting or max_alive, create_rate_per_s)),
            self.metrics,
            ttl_s=ttl_s,
            acquire_timeout_s=acquire_timeout_s,
            wait_timeout_s=wait_timeout_s,
            kill_timeout_s=kill_timeout_s,
            run_labels=run_labels or {},
            ledger=ledger,
        )
        self._seating: Seating = (
            SharedSandboxes(self.lifecycle, contexts=contexts)
            if mode == "context"
            else OwnSandboxes(self.lifecycle, ahead=ahead)
        )
        self._sessions: set[SandboxSession] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def session(self, trajectory_id: str) -> AsyncIterator[SandboxSession]:
        """A session for one trajectory; its interpreter is ended with it, also when the task is cancelled.

        Raises:
            SandboxUnavailableError: the pool is closed.
        """
        if self._closed:
            raise SandboxUnavailableError("the sandbox pool is closed: open a new one for more sessions")
        session = SandboxSession(self, trajectory_id)
        self._sessions.add(session)
        self._seating.enter(session.name)
        started_s = time.monotonic()
        try:
            yield session
        finally:
            self.metrics.lasted("session_s", time.monotonic() - started_s)
            # A cancelled trajectory must not skip its end: that goes on by itself, and aclose() waits for it.
            await asyncio.shield(self._begin_end(session))

    async def aclose(self) -> None:
        """End every sandbox of this pool and refuse new sessions. Harmless when repeated."""
        self._closed = True
        for session in list(self._sessions):
            self._begin_end(session)
        if self._closing:
            await asyncio.wait(list(self._closing))
        await self._seating.aclose()

    def _begin_end(self, session: SandboxSession) -> asyncio.Task[None]:
        if session.end_task is None:
            session.end_task = self._keep(session._end())
            self._sessions.discard(session)
        return session.end_task

    def _keep(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that lives until done whatever happens to its caller, and that `aclose` waits for."""
        task = asyncio.create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task


class SandboxSession:
    """The interpreter of one trajectory. Made by `SessionPool.session`; runs wait for each other.

    Attributes:
        trajectory_id: the trajectory.
        name: unique in the pool.
        runs: how many runs were asked for.
        restarts: how often the interpreter was replaced after a deadline.
        waited_s: seconds that went into getting an interpreter.
    """

    def __init__(self, pool: SessionPool, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.name = f"{trajectory_id}-{uuid.uuid4().hex[:12]}"
        self.runs = 0
        self.restarts = 0
        self.waited_s = 0.0
        self.end_task: asyncio.Task[None] | None = None
        self._pool = pool
        self._seat: Seat | None = None
        self._failure: SandboxError | None = None
        self._turn = asyncio.Lock()
        self._run_task: asyncio.Task[Execution] | None = None

    @property
    def sandbox_id(self) -> str | None:
        """Id of the live sandbox, None before the first run and after a deadline."""
        return self._seat.sandbox_id if self._seat else None

    async def run(self, code: str, *, timeout_s: float | None = None) -> Execution:
        """What running `code` gives, with all that earlier runs of this session defined.

        Args:
            code: Python source, as in a notebook cell.
            timeout_s: seconds for this run; the pool's `call_timeout_s` if None. Waiting for a sandbox does
                not count.

        Returns:
            The execution. Code that ran past its deadline is an execution whose error is named
            TimeoutError, and the state is lost.

        Raises:
            SandboxError: the service failed; the session is over and the trajectory is to be masked.
        """
        async with self._turn:
            if self._failure is not None:
                raise type(self._failure)(f"this session failed before: {self._failure}")
            if self.end_task is not None:
                raise SandboxUnavailableError(f"the session of {self.trajectory_id} has ended: open a new one")
            self.runs += 1
            # A task of its own, so that the end of the pool can stop it without touching the caller's task.
            allowed_s = self._pool._call_timeout_s if timeout_s is None else timeout_s
            self._run_task = asyncio.create_task(self._run(code, allowed_s))
            try:
                return await self._run_task
            except asyncio.CancelledError:
                self._fail(SandboxUnavailableError("a run of it was cancelled: what its sandbox does is unknown"))
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                raise SandboxUnavailableError("the sandbox pool was closed under a run: the run is void") from None
            except SandboxError as error:
                self._pool.metrics.count(f"failures/{type(error).__name__}")
                self._fail(error)
                raise

    def _fail(self, error: SandboxError) -> None:
        # The interpreter goes now, in the background: its place is worth more to others than to this session.
        if self._seat is not None:
            self._pool.metrics.count("tainted")
        self._failure = error
        self._pool._begin_end(self)

    async def _run(self, code: str, timeout_s: float) -> Execution:
        if self._seat is None:
            await self._sit_down()
        assert self._seat is not None  # noqa: S101 - _sit_down gives one or raises
        began_s = time.monotonic()
        execution = await self._seat.run_code(code, timeout_s=timeout_s)
        if not execution.timed_out:
            self._pool.metrics.lasted("execute_s", time.monotonic() - began_s)
            return execution
        self._pool.metrics.count("timeouts")
        self._pool.metrics.count("tainted")
        self.restarts += 1
        # The place is kept: the trajectory has waited for it and goes on in it.
        seat, self._seat = self._seat, None
        await asyncio.shield(self._pool._keep(self._pool._seating.leave(seat, broken=False, again=True)))
        return dataclasses.replace(execution, error=_deadline_error(timeout_s))

    async def _sit_down(self) -> None:
        began_s = time.monotonic()
        try:
            await self._pool._seating.take(self.name, self.trajectory_id, self._hold)
        finally:
            self.waited_s += time.monotonic() - began_s

    def _hold(self, seat: Seat) -> None:
        self._seat = seat

    async def _end(self) -> None:
        if self._run_task is not None and not self._run_task.done():
            self._run_task.cancel()
            await asyncio.wait([self._run_task])
        if self._seat is not None:
            seat, self._seat = self._seat, None
            await self._pool._seating.leave(seat, broken=self._failure is not None, again=False)
        else:
            await self._pool._seating.give_up(self.name)


def _deadline_error(timeout_s: float) -> ExecutionError:
    value = (
        f"{deadline_error(timeout_s).value}; the interpreter was restarted: all variables, imports and files are lost"
    )
    return ExecutionError(name="TimeoutError", value=value, traceback=f"TimeoutError: {value}")
