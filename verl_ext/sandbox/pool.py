"""One sandbox for each trajectory, within the account's limits, and none left behind.

    async with pool.session(trajectory_id) as session:
        execution = await session.run("1 + 1")

Who is to blame decides what the caller gets:

- The *code* fails, or runs past the call deadline: data. `run` returns an `Execution` with an error; after a
  deadline that error says how many seconds were allowed and that the state is lost (`timed_out` is True),
  the sandbox is killed, and the next run of the session gets a fresh one.
- The *service* fails: `SandboxError`. The session is over, its sandbox is killed, every later run raises
  again, and the caller masks the trajectory. A run that is cancelled ends the session as well, for nobody
  knows what its sandbox does now. A create that may work later is retried within a wall budget; `run_code` never is
  (the backend repeats only requests that the service surely did not act on).

A sandbox is made at the first run, so a trajectory that calls no tool costs none. It is never shared nor
reused, and is killed when the session ends, whatever ends it.
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
from verl_ext.sandbox.interface import Execution, ExecutionError, Sandbox, SandboxBackend, deadline_error
from verl_ext.sandbox.ledger import SandboxLedger
from verl_ext.sandbox.lifecycle import SandboxLifecycle
from verl_ext.sandbox.limiter import Limiter, LocalLimiter
from verl_ext.sandbox.metrics import PoolMetrics


class SessionPool:
    """Sessions over one backend. Cheap to build; binds to an event loop only when used.

    Args:
        backend: makes the sandboxes; the pool does not close it.
        max_alive: sandboxes alive at once, those starting and closing included.
        max_starting: creates in flight at once; `max_alive` if None.
        create_rate_per_s: creates begun per second; None for no limit.
        ttl_s: seconds after which the service ends a sandbox that we failed to end.
        call_timeout_s: seconds that one run may take, unless it says otherwise.
        acquire_timeout_s: wall budget in seconds for getting a sandbox: waiting, creating, retrying.
        kill_timeout_s: seconds to wait for one kill.
        run_labels: labels of every sandbox, for example {RUN_LABEL: run_id, WORKER_LABEL: worker}.
        ledger: notes creates and kills on disk.
        limiter: replaces the limits above, for example by a broker across processes.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        max_alive: int = 10,
        max_starting: int | None = None,
        create_rate_per_s: float | None = None,
        ttl_s: int = 300,
        call_timeout_s: float = 30.0,
        acquire_timeout_s: float = 300.0,
        kill_timeout_s: float = 15.0,
        run_labels: Mapping[str, str] | None = None,
        ledger: SandboxLedger | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        self._call_timeout_s = call_timeout_s
        self.metrics = PoolMetrics()
        self._limiter = limiter or LocalLimiter(
            max_alive=max_alive, max_starting=max_starting or max_alive, create_rate_per_s=create_rate_per_s
        )
        self._lifecycle = SandboxLifecycle(
            backend,
            self._limiter,
            self.metrics,
            ttl_s=ttl_s,
            acquire_timeout_s=acquire_timeout_s,
            kill_timeout_s=kill_timeout_s,
            run_labels=run_labels or {},
            ledger=ledger,
        )
        self._sessions: set[SandboxSession] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def session(self, trajectory_id: str) -> AsyncIterator[SandboxSession]:
        """A session for one trajectory; its sandbox is killed at the end, also when the task is cancelled.

        Raises:
            SandboxUnavailableError: the pool is closed.
        """
        if self._closed:
            raise SandboxUnavailableError("the sandbox pool is closed: open a new one for more sessions")
        session = SandboxSession(self, trajectory_id)
        self._sessions.add(session)
        started_s = time.monotonic()
        try:
            yield session
        finally:
            self.metrics.session_s.append(time.monotonic() - started_s)
            await self._end_shielded(session)

    async def aclose(self) -> None:
        """End every sandbox of this pool and refuse new sessions. Harmless when repeated."""
        self._closed = True
        for session in list(self._sessions):
            self._begin_end(session)
        if self._closing:
            await asyncio.wait(list(self._closing))

    async def _end_shielded(self, session: SandboxSession) -> None:
        # A cancelled trajectory must not skip its kill: the kill goes on by itself, and aclose() waits for it.
        await asyncio.shield(self._begin_end(session))

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
    """The sandbox of one trajectory. Made by `SessionPool.session`; runs wait for each other.

    Attributes:
        trajectory_id: the trajectory.
        runs: how many runs were asked for.
        restarts: how often the interpreter was replaced after a deadline.
    """

    def __init__(self, pool: SessionPool, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.runs = 0
        self.restarts = 0
        self.end_task: asyncio.Task[None] | None = None
        self._pool = pool
        self._lease_id = f"{trajectory_id}-{uuid.uuid4().hex[:12]}"
        self._sandbox: Sandbox | None = None
        self._failure: SandboxError | None = None
        self._keep_alive: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._run_task: asyncio.Task[Execution] | None = None

    @property
    def sandbox_id(self) -> str | None:
        """Id of the live sandbox, None before the first run and after a deadline."""
        return self._sandbox.sandbox_id if self._sandbox else None

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
                self._pool.metrics.failures[type(error).__name__] += 1
                self._fail(error)
                raise

    def _fail(self, error: SandboxError) -> None:
        # The sandbox goes now, in the background: its place is worth more to others than to this session.
        self._failure = error
        self._pool._begin_end(self)

    async def _run(self, code: str, timeout_s: float) -> Execution:
        if self._sandbox is None:
            await self._pool._lifecycle.start(self._lease_id, self.trajectory_id, self._hold)
        assert self._sandbox is not None  # noqa: S101 - start gives one or raises
        began_s = time.monotonic()
        execution = await self._sandbox.run_code(code, timeout_s=timeout_s)
        if not execution.timed_out:
            self._pool.metrics.execute_s.append(time.monotonic() - began_s)
            return execution
        self._pool.metrics.timeouts += 1
        self.restarts += 1
        # The lease is kept: the trajectory has waited for its place and goes on in it.
        await asyncio.shield(self._pool._keep(self._pool._lifecycle.end(self._let_go())))
        return dataclasses.replace(execution, error=_deadline_error(timeout_s))

    def _hold(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._keep_alive = asyncio.create_task(self._pool._lifecycle.keep_alive(sandbox))

    def _let_go(self) -> Sandbox:
        assert self._sandbox is not None  # noqa: S101 - callers looked
        sandbox, self._sandbox = self._sandbox, None
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        return sandbox

    async def _end(self) -> None:
        try:
            if self._run_task is not None and not self._run_task.done():
                self._run_task.cancel()
                await asyncio.wait([self._run_task])
            if self._sandbox is not None:
                await self._pool._lifecycle.end(self._let_go())
        finally:
            await self._pool._limiter.release(self._lease_id)


def _deadline_error(timeout_s: float) -> ExecutionError:
    value = (
        f"{deadline_error(timeout_s).value}; the interpreter was restarted: all variables, imports and files are lost"
    )
    return ExecutionError(name="TimeoutError", value=value, traceback=f"TimeoutError: {value}")
