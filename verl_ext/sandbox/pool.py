"""One sandbox for each trajectory, within the account's limits, and none left behind.

    async with pool.session(trajectory_id) as session:
        execution = await session.run("1 + 1")

Who is to blame decides what the caller gets:

- The *code* fails, or runs past the call deadline: data. `run` returns an `Execution` with an error; after a
  deadline that error says how many seconds were allowed and that the state is lost, the sandbox is killed,
  and the next run of the session gets a fresh one.
- The *service* fails: `SandboxError`. The session is over, every later run raises again, and the caller
  masks the trajectory. A create that may work later is retried within a wall budget; `run_code` never is
  (the backend repeats only requests that the service surely did not act on).

A sandbox is made at the first run, so a trajectory that calls no tool costs none. It is never shared nor
reused, and is killed when the session ends, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from verl_ext.errors import (
    SandboxCodeTimeoutError,
    SandboxError,
    SandboxQuotaError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.sandbox.interface import Execution, ExecutionError, Sandbox, SandboxBackend
from verl_ext.sandbox.ledger import ATTEMPT_LABEL, TRAJECTORY_LABEL, SandboxLedger
from verl_ext.sandbox.limiter import Limiter, LocalLimiter
from verl_ext.sandbox.metrics import PoolMetrics

logger = logging.getLogger(__name__)

_RETRYABLE = (SandboxQuotaError, SandboxUnavailableError, SandboxTimeoutError)
_BACKOFF_BASE_S = 0.5
_BACKOFF_CAP_S = 15.0
_KILL_TRIES = 3


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
        self._backend = backend
        self._ttl_s = ttl_s
        self._call_timeout_s = call_timeout_s
        self._acquire_timeout_s = acquire_timeout_s
        self._kill_timeout_s = kill_timeout_s
        self._run_labels = dict(run_labels or {})
        self._ledger = ledger
        self._limiter = limiter or LocalLimiter(
            max_alive=max_alive, max_starting=max_starting or max_alive, create_rate_per_s=create_rate_per_s
        )
        self._sessions: set[SandboxSession] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self.metrics = PoolMetrics()

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

    async def _start(self, session: SandboxSession) -> None:
        """Give the session a fresh sandbox, within the wall budget."""
        began_s = time.monotonic()
        deadline_s = began_s + self._acquire_timeout_s
        cause: SandboxError | None = None
        attempt = 0
        while (left_s := deadline_s - time.monotonic()) > 0:
            attempt += 1
            asked_s = time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    await self._limiter.acquire_start(session._lease_id)
                    self.metrics.wait_s.append(time.monotonic() - asked_s)
                    # Held by the session at once: whatever is cancelled from here on, its end kills it.
                    session._sandbox = await self._create_once(session.trajectory_id, attempt)
                self.metrics.acquire_s.append(time.monotonic() - began_s)
                return
            except _RETRYABLE as error:
                cause = error
            except TimeoutError:
                cause = cause or SandboxTimeoutError(
                    "no place became free or no create was answered: raise max_alive or the acquire time-out"
                )
                break
            finally:
                await self._limiter.start_done(session._lease_id)
            self.metrics.retries[type(cause).__name__] += 1
            # Full jitter: the sessions that a full account turned away together must not come back together.
            pause_s = random.uniform(0.0, min(_BACKOFF_CAP_S, _BACKOFF_BASE_S * 2.0 ** (attempt - 1)))
            logger.info("create %d of %s failed, next in %.1f s: %s", attempt, session.trajectory_id, pause_s, cause)
            await asyncio.sleep(max(0.0, min(pause_s, deadline_s - time.monotonic())))
        assert cause is not None  # noqa: S101 - the budget is positive, so one try was made
        raise type(cause)(f"no sandbox within {self._acquire_timeout_s:g} s, {attempt} tries: {cause}") from cause

    async def _create_once(self, trajectory_id: str, attempt: int) -> Sandbox:
        labels = {
            **self._run_labels,
            TRAJECTORY_LABEL: trajectory_id,
            ATTEMPT_LABEL: f"{attempt}-{uuid.uuid4().hex[:12]}",
        }
        began_s = time.monotonic()
        sandbox = await self._backend.create(labels=labels, ttl_s=self._ttl_s)
        # No await from here to the ledger: a cancellation cannot fall in between.
        self.metrics.create_s.append(time.monotonic() - began_s)
        self.metrics.created += 1
        if self._ledger:
            self._ledger.created(sandbox.sandbox_id, labels)
        logger.debug("created sandbox %s for %s", sandbox.sandbox_id, trajectory_id)
        return sandbox

    async def _kill(self, sandbox: Sandbox) -> None:
        """End a sandbox, with a few tries; never raises a SandboxError."""
        for left in reversed(range(_KILL_TRIES)):
            try:
                async with asyncio.timeout(self._kill_timeout_s):
                    await self._backend.kill(sandbox.sandbox_id)
            except (SandboxError, TimeoutError) as error:
                if left:
                    await asyncio.sleep(random.uniform(0.0, _BACKOFF_BASE_S))
                    continue
                self.metrics.kill_failed += 1
                if self._ledger:
                    self._ledger.kill_failed(sandbox.sandbox_id, str(error))
                logger.warning(
                    "sandbox %s could not be ended, left to its %d s: %s", sandbox.sandbox_id, self._ttl_s, error
                )
            else:
                self.metrics.killed += 1
                if self._ledger:
                    self._ledger.killed(sandbox.sandbox_id)
                return


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
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                raise SandboxUnavailableError("the sandbox pool was closed under a run: the run is void") from None
            except SandboxError as error:
                self._failure = error
                self._pool.metrics.failures[type(error).__name__] += 1
                raise

    async def _run(self, code: str, timeout_s: float) -> Execution:
        if self._sandbox is None:
            await self._pool._start(self)
        assert self._sandbox is not None  # noqa: S101 - _start gives one or raises
        began_s = time.monotonic()
        try:
            execution = await self._sandbox.run_code(code, timeout_s=timeout_s)
        except SandboxCodeTimeoutError:
            elapsed_s = time.monotonic() - began_s
            self._pool.metrics.timeouts += 1
            self.restarts += 1
            # The lease is kept: the trajectory has waited for its place and goes on in it.
            sandbox, self._sandbox = self._sandbox, None
            await asyncio.shield(self._pool._keep(self._pool._kill(sandbox)))
            return Execution(error=_deadline_error(timeout_s), elapsed_s=elapsed_s)
        self._pool.metrics.execute_s.append(time.monotonic() - began_s)
        return execution

    async def _end(self) -> None:
        try:
            if self._run_task is not None and not self._run_task.done():
                self._run_task.cancel()
                await asyncio.wait([self._run_task])
            if self._sandbox is not None:
                sandbox, self._sandbox = self._sandbox, None
                await self._pool._kill(sandbox)
        finally:
            await self._pool._limiter.release(self._lease_id)


def _deadline_error(timeout_s: float) -> ExecutionError:
    value = (
        f"the code ran longer than {timeout_s:g} s and was stopped; "
        "the interpreter was restarted: all variables, imports and files are lost"
    )
    return ExecutionError(name="TimeoutError", value=value, traceback=f"TimeoutError: {value}")
