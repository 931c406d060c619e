"""Starting a sandbox within limits and a wall budget, and ending it for sure.

What a pool needs of a backend, with retries, counters and the ledger in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from verl_ext.errors import (
    SandboxAuthError,
    SandboxDiedError,
    SandboxError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.sandbox.interface import Sandbox, SandboxBackend
from verl_ext.sandbox.ledger import ATTEMPT_LABEL, TRAJECTORY_LABEL, SandboxLedger
from verl_ext.sandbox.limiter import Limiter
from verl_ext.sandbox.metrics import PoolMetrics

logger = logging.getLogger(__name__)

_RETRYABLE = (SandboxQuotaError, SandboxUnavailableError, SandboxTimeoutError)
_BACKOFF_BASE_S = 0.5
_BACKOFF_CAP_S = 15.0
_KILL_TRIES = 3
_KILLS_AT_ONCE = 16  # the end of a pool must not break the rate limit that its life kept


class SandboxLifecycle:
    """Starts and ends sandboxes of one backend.

    Args:
        backend: makes and ends them.
        limiter: grants the starts.
        metrics: what is counted.
        ttl_s: seconds after which the service ends a sandbox by itself.
        acquire_timeout_s: wall budget in seconds of one start from its first turn on: creating, being refused,
            trying again.
        wait_timeout_s: seconds to wait for the first turn; None for as long as the caller does.
        kill_timeout_s: seconds for one try to kill.
        run_labels: labels of every sandbox.
        ledger: notes creates and kills on disk.

    Attributes:
        fatal: set once the service refused the key, or the first request as wrong: no start can work any more.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        limiter: Limiter,
        metrics: PoolMetrics,
        *,
        ttl_s: int,
        acquire_timeout_s: float,
        wait_timeout_s: float | None,
        kill_timeout_s: float,
        run_labels: Mapping[str, str],
        ledger: SandboxLedger | None,
    ) -> None:
        self._backend = backend
        self.limiter = limiter
        self.metrics = metrics
        self._ttl_s = ttl_s
        self._acquire_timeout_s = acquire_timeout_s
        self._wait_timeout_s = wait_timeout_s
        self._kill_timeout_s = kill_timeout_s
        self._run_labels = dict(run_labels)
        self._ledger = ledger
        self._kills = asyncio.Semaphore(_KILLS_AT_ONCE)
        self._late: set[asyncio.Future[None]] = set()
        self._watchers: set[asyncio.Event] = set()
        self.fatal: SandboxError | None = None

    @contextlib.contextmanager
    def watching_fatal(self) -> Iterator[asyncio.Event]:
        """An event that is set once `fatal` is."""
        event = asyncio.Event()
        if self.fatal is not None:
            event.set()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)

    async def start(
        self,
        lease_id: str,
        trajectory_id: str,
        hold: Callable[[Sandbox], None],
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        """Make a sandbox and give it to `hold` at once, so that whatever is cancelled later can end it.

        The lease is taken if it is not held yet, and stays with the caller whatever happens. `on_turn` is called
        when the wait is over; with it the wait is the caller's to measure.

        Raises:
            SandboxAuthError, SandboxRequestError: at once, and from then on without asking the service.
            SandboxQuotaError, SandboxUnavailableError, SandboxTimeoutError: after the wall budget.
        """
        self._check_fatal()
        began_s = time.monotonic()
        measured = on_turn is None
        await self._wait_turn(lease_id, self._wait_timeout_s, measured)
        if on_turn is not None:
            on_turn()
        deadline_s = time.monotonic() + self._acquire_timeout_s
        attempt, cause = 1, None
        while True:
            sandbox, cause = await self._try(lease_id, trajectory_id, attempt, deadline_s, hold)
            if cause is None:
                self.metrics.lasted("acquire_s", time.monotonic() - began_s)
                await self.limiter.start_done(lease_id, sandbox_id=sandbox)
                return
            await self.limiter.start_done(lease_id, refused=isinstance(cause, SandboxQuotaError))
            self.metrics.count(f"retries/{type(cause).__name__}")
            # Full jitter: the sessions that a full account turned away together must not come back together.
            pause_s = random.uniform(0.0, min(_BACKOFF_CAP_S, _BACKOFF_BASE_S * 2.0 ** (attempt - 1)))
            if time.monotonic() + pause_s >= deadline_s:
                break
            logger.info("create %d for %s failed, next in %.1f s: %s", attempt, trajectory_id, pause_s, cause)
            await asyncio.sleep(pause_s)
            attempt += 1
            try:
                await self._wait_turn(lease_id, deadline_s - time.monotonic(), measured)
            except SandboxTimeoutError:
                break
            self._check_fatal()
        raise type(cause)(f"no sandbox within {self._acquire_timeout_s:g} s, {attempt} tries: {cause}") from cause

    async def _wait_turn(self, lease_id: str, timeout_s: float | None, measured: bool) -> None:
        asked_s = time.monotonic()
        self.metrics.change("waiting", int(measured))
        try:
            async with asyncio.timeout(timeout_s):
                await self.limiter.acquire_start(lease_id)
        except TimeoutError:
            raise SandboxTimeoutError(
                "all places stayed taken: fewer trajectories at once, more sandboxes or a longer budget"
            ) from None
        finally:
            self.metrics.change("waiting", -int(measured))
            if measured:
                self.metrics.lasted("wait_s", time.monotonic() - asked_s)

    async def _try(
        self, lease_id: str, trajectory_id: str, attempt: int, deadline_s: float, hold: Callable[[Sandbox], None]
    ) -> tuple[str, SandboxError | None]:
        """Id of the sandbox that `hold` got, or the error after which another try makes sense."""
        self.metrics.change("starting", +1)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                sandbox = await self._create(trajectory_id, attempt)
                hold(sandbox)
                return sandbox.sandbox_id, None
        except _RETRYABLE as error:
            return "", error
        except TimeoutError:
            return "", SandboxTimeoutError("the create was not answered: the service is slow or unreachable")
        except BaseException as error:
            if isinstance(error, SandboxAuthError) or (
                # A wrong template shows at the first create; later it is one request's fault, not the settings'.
                isinstance(error, SandboxRequestError) and not self.metrics.counts["created"]
            ):
                self._note_fatal(error)
            # Also for a cancellation; a broker far away must hear of it, whatever is cancelled next.
            await asyncio.shield(self.limiter.start_done(lease_id))
            raise
        finally:
            self.metrics.change("starting", -1)

    def _note_fatal(self, error: SandboxError) -> None:
        self.fatal = self.fatal or error
        for event in self._watchers:
            event.set()

    def _check_fatal(self) -> None:
        if self.fatal is not None:
            raise type(self.fatal)(str(self.fatal))

    async def _create(self, trajectory_id: str, attempt: int) -> Sandbox:
        labels = {
            **self._run_labels,
            TRAJECTORY_LABEL: trajectory_id,
            ATTEMPT_LABEL: f"{attempt}-{uuid.uuid4().hex[:12]}",
        }
        began_s = time.monotonic()
        sandbox = await self._backend.create(labels=labels, ttl_s=self._ttl_s)
        # No await between here and `hold`: a cancellation cannot fall in between.
        self.metrics.lasted("create_s", time.monotonic() - began_s)
        self.metrics.count("created")
        self.metrics.change("alive", +1)
        if self._ledger:
            self._ledger.created(sandbox.sandbox_id, labels)
        logger.debug("created sandbox %s for %s", sandbox.sandbox_id, trajectory_id)
        return sandbox

    async def keep_alive(self, sandbox: Sandbox) -> None:
        """Extend the sandbox's life, again and again, until cancelled or the sandbox is gone.

        So the time to live can be short, which is what a leak costs, and trajectories long.
        """
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await sandbox.extend(ttl_s=self._ttl_s)
            except SandboxDiedError:
                return  # the next run says so
            except SandboxError as error:
                logger.info("sandbox %s could not be extended, trying again: %s", sandbox.sandbox_id, error)

    async def end(self, sandbox: Sandbox) -> bool:
        """Kill a sandbox, with a few tries; whether it is gone. A failure is counted and noted, never raised."""
        sandbox_id = sandbox.sandbox_id
        try:
            for left in reversed(range(_KILL_TRIES)):
                try:
                    async with self._kills, asyncio.timeout(self._kill_timeout_s):
                        await self._backend.kill(sandbox_id)
                except (SandboxError, TimeoutError) as error:
                    if left:
                        await asyncio.sleep(random.uniform(0.0, _BACKOFF_BASE_S))
                        continue
                    self.metrics.count("kill_failed")
                    if self._ledger:
                        self._ledger.kill_failed(sandbox_id, str(error) or "no answer")
                    logger.warning("sandbox %s is left to its %d s to live: %s", sandbox_id, self._ttl_s, error)
                    return False
                self.metrics.count("killed")
                if self._ledger:
                    self._ledger.killed(sandbox_id)
                return True
            return False
        finally:
            self.metrics.change("alive", -1)

    async def end_and_release(self, sandbox: Sandbox, lease_id: str) -> None:
        """Kill a sandbox and give its place back; if it could not be killed, when it ends by itself."""
        if await self.end(sandbox):
            await self.limiter.release(lease_id)
        else:
            asyncio.get_running_loop().call_later(self._ttl_s, self._release_soon, lease_id)

    def _release_soon(self, lease_id: str) -> None:
        task = asyncio.ensure_future(self.limiter.release(lease_id))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
