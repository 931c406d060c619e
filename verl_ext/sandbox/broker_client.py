"""The broker's client in each worker: a `Limiter` that asks across processes and survives the broker's death."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from verl_ext.errors import SandboxUnavailableError

REPORT_S = 5.0
GIVE_UP_S = 120.0  # without any broker
_RETRY_S = (0.5, 1.0, 2.0, 4.0)


class BrokerGoneError(Exception):
    """The broker does not answer; it may come back."""


class BrokerCalls(Protocol):
    """The broker's methods from afar. Each may raise BrokerGoneError."""

    async def acquire_start(self, owner: str, lease_id: str) -> None: ...
    async def try_start(self, owner: str, lease_id: str) -> bool: ...
    async def start_done(self, owner: str, lease_id: str, sandbox_id: str, refused: bool) -> None: ...
    async def release(self, owner: str, lease_id: str) -> None: ...
    async def report(self, owner: str, held: dict[str, str]) -> None: ...


class BrokerClient:
    """A `Limiter` that asks the broker, and reports to it as long as its event loop runs.

    Args:
        calls: the broker.
        owner: name of this process, the value of its sandboxes' WORKER_LABEL.
    """

    def __init__(self, calls: BrokerCalls, owner: str) -> None:
        self._calls = calls
        self._owner = owner
        self._held: dict[str, str] = {}  # lease to sandbox, "" while it starts
        self._reporting: asyncio.Task[None] | None = None
        self._report_now = asyncio.Event()

    async def acquire_start(self, lease_id: str) -> None:
        """See `Limiter.acquire_start`.

        Raises:
            SandboxUnavailableError: there has been no broker for GIVE_UP_S seconds.
        """
        self._keep_reporting()
        await self._call(lambda: self._calls.acquire_start(self._owner, lease_id))
        self._held.setdefault(lease_id, "")

    async def try_start(self, lease_id: str) -> bool:
        """See `Limiter.try_start`; False where there is no broker."""
        self._keep_reporting()
        try:
            granted = await self._calls.try_start(self._owner, lease_id)
        except BrokerGoneError:
            return False
        if granted:
            self._held.setdefault(lease_id, "")
        return granted

    async def start_done(self, lease_id: str, *, sandbox_id: str = "", refused: bool = False) -> None:
        """See `Limiter.start_done`; a broker that misses it learns it from the next report."""
        if lease_id in self._held:
            self._held[lease_id] = sandbox_id
        with contextlib.suppress(BrokerGoneError):
            await self._calls.start_done(self._owner, lease_id, sandbox_id, refused)

    async def release(self, lease_id: str) -> None:
        """See `Limiter.release`; a broker that misses it learns it from the next reports."""
        self._held.pop(lease_id, None)
        with contextlib.suppress(BrokerGoneError):
            await self._calls.release(self._owner, lease_id)

    async def aclose(self) -> None:
        """Stop to report; the broker then takes this process for dead, so call it when nothing is held."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait([self._reporting])

    async def _call(self, call: Callable[[], Awaitable[None]]) -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        for pause_s in itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1])):
            try:
                return await call()
            except BrokerGoneError as error:
                if time.monotonic() > deadline_s:
                    raise SandboxUnavailableError(
                        f"the run's sandbox broker has been gone for {GIVE_UP_S:g} s: {error}"
                    ) from error
            self._report_now.set()
            await asyncio.sleep(pause_s)

    def _keep_reporting(self) -> None:
        task = self._reporting
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            self._report_now = asyncio.Event()
            self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        while True:
            with contextlib.suppress(BrokerGoneError):
                await self._calls.report(self._owner, dict(self._held))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._report_now.wait()
            self._report_now.clear()
