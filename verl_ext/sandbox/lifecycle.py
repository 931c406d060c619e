"""Starting a sandbox within limits and a wall budget, and ending it for sure.

What a pool needs of a backend, with retries, counters and the ledger in one place.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping

from verl_ext.errors import (
    SandboxDiedError,
    SandboxError,
    SandboxQuotaError,
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
        acquire_timeout_s: wall budget in seconds of one start: waiting, creating, retrying.
        kill_timeout_s: seconds for one try to kill.
        run_labels: labels of every sandbox.
        ledger: notes creates and kills on disk.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        limiter: Limiter,
        metrics: PoolMetrics,
        *,
        ttl_s: int,
        acquire_timeout_s: float,
        kill_timeout_s: float,
        run_labels: Mapping[str, str],
        ledger: SandboxLedger | None,
    ) -> None:
        self._backend = backend
        self._limiter = limiter
        self._metrics = metrics
        self._ttl_s = ttl_s
        self._acquire_timeout_s = acquire_timeout_s
        self._kill_timeout_s = kill_timeout_s
        self._run_labels = dict(run_labels)
        self._ledger = ledger
        self._kills = asyncio.Semaphore(_KILLS_AT_ONCE)

    async def start(self, lease_id: str, trajectory_id: str, hold: Callable[[Sandbox], None]) -> None:
        """Make a sandbox and give it to `hold` at once, so that whatever is cancelled later can end it.

        The lease is taken if it is not held yet, and stays with the caller whatever happens.

        Raises:
            SandboxAuthError, SandboxRequestError: at once.
            SandboxQuotaError, SandboxUnavailableError, SandboxTimeoutError: after the wall budget.
        """
        began_s = time.monotonic()
        deadline_s = began_s + self._acquire_timeout_s
        cause: SandboxError = SandboxTimeoutError("the budget is zero")
        attempt = 0
        while (left_s := deadline_s - time.monotonic()) > 0:
            attempt += 1
            asked_s, granted = time.monotonic(), False
            try:
                async with asyncio.timeout(left_s):
                    await self._limiter.acquire_start(lease_id)
                    granted = True
                    self._metrics.wait_s.append(time.monotonic() - asked_s)
                    hold(await self._create(trajectory_id, attempt))
                self._metrics.acquire_s.append(time.monotonic() - began_s)
                return
            except _RETRYABLE as error:
                cause = error
            except TimeoutError:
                if not granted:
                    self._metrics.wait_s.append(time.monotonic() - asked_s)
                    cause = SandboxTimeoutError(
                        "all places stayed taken: fewer trajectories at once, more sandboxes or a longer budget"
                    )
                elif attempt == 1:
                    cause = SandboxTimeoutError("the create was not answered: the service is slow or unreachable")
                break
            finally:
                await self._limiter.start_done(lease_id)
            self._metrics.retries[type(cause).__name__] += 1
            # Full jitter: the sessions that a full account turned away together must not come back together.
            pause_s = random.uniform(0.0, min(_BACKOFF_CAP_S, _BACKOFF_BASE_S * 2.0 ** (attempt - 1)))
            logger.info("create %d for %s failed, next in %.1f s: %s", attempt, trajectory_id, pause_s, cause)
            await asyncio.sleep(max(0.0, min(pause_s, deadline_s - time.monotonic())))
        raise type(cause)(f"no sandbox within {self._acquire_timeout_s:g} s, {attempt} tries: {cause}") from cause

    async def _create(self, trajectory_id: str, attempt: int) -> Sandbox:
        labels = {
            **self._run_labels,
            TRAJECTORY_LABEL: trajectory_id,
            ATTEMPT_LABEL: f"{attempt}-{uuid.uuid4().hex[:12]}",
        }
        began_s = time.monotonic()
        sandbox = await self._backend.create(labels=labels, ttl_s=self._ttl_s)
        # No await between here and `hold`: a cancellation cannot fall in between.
        self._metrics.create_s.append(time.monotonic() - began_s)
        self._metrics.created += 1
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

    async def end(self, sandbox: Sandbox) -> None:
        """Kill a sandbox, with a few tries. A kill that fails is counted and noted, never raised."""
        sandbox_id = sandbox.sandbox_id
        for left in reversed(range(_KILL_TRIES)):
            try:
                async with self._kills, asyncio.timeout(self._kill_timeout_s):
                    await self._backend.kill(sandbox_id)
            except (SandboxError, TimeoutError) as error:
                if left:
                    await asyncio.sleep(random.uniform(0.0, _BACKOFF_BASE_S))
                    continue
                self._metrics.kill_failed += 1
                if self._ledger:
                    self._ledger.kill_failed(sandbox_id, str(error) or "no answer")
                logger.warning("sandbox %s is left to its %d s to live: %s", sandbox_id, self._ttl_s, error)
            else:
                self._metrics.killed += 1
                if self._ledger:
                    self._ledger.killed(sandbox_id)
                return
