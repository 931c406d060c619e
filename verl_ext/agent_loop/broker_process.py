"""The run's broker as a Ray actor. Its process imports neither torch nor verl, so it is up in about a second."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_ext.errors import SandboxError
from verl_ext.sandbox import broker as pure
from verl_ext.sandbox.broker import Broker
from verl_ext.sandbox.broker_client import BrokerGoneError
from verl_ext.sandbox.connect import run_limits
from verl_ext.sandbox.e2b import E2BBackend
from verl_ext.sandbox.ledger import LEDGERS
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext.sandbox.broker")
# One call is open for each trajectory that waits.
_MAX_CALLS = 100_000


class BrokerProcess:
    """Holds the `Broker`; its methods are the broker's."""

    def __init__(self, run_dir: Path, run_id: str, workers: int) -> None:
        settings = Settings.load()
        self._is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._broker = Broker(
            run_limits(settings, workers),
            backend=E2BBackend.from_settings(settings),
            run_id=run_id,
            again=self._is_again,
            workers=workers,
            ledgers=run_dir / LEDGERS,
        )
        self._sweeping: asyncio.Task[None] | None = None

    async def acquire_start(self, owner: str, lease_id: str) -> None:
        """See `Broker`."""
        self._keep_sweeping()
        await self._broker.acquire_start(owner, lease_id)

    async def try_start(self, owner: str, lease_id: str) -> bool:
        """See `Broker`."""
        return await self._broker.try_start(owner, lease_id)

    async def start_done(self, owner: str, lease_id: str, sandbox_id: str, refused: bool) -> None:
        """See `Broker`."""
        await self._broker.start_done(owner, lease_id, sandbox_id, refused)

    async def release(self, owner: str, lease_id: str) -> None:
        """See `Broker`."""
        await self._broker.release(owner, lease_id)

    async def report(self, owner: str, held: dict[str, str]) -> None:
        """See `Broker`."""
        self._keep_sweeping()
        await self._broker.report(owner, held)

    async def numbers(self) -> dict[str, float]:
        """See `Broker`."""
        return self._broker.numbers()

    async def process(self) -> tuple[int, bool, list[str]]:
        """Its process id, whether it was started anew, and the packages in it, to see that it stays light."""
        return os.getpid(), self._is_again, sorted({name.partition(".")[0] for name in sys.modules})

    def _keep_sweeping(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(pure.SWEEP_S)
            try:
                await self._broker.sweep()
            except SandboxError as error:
                logger.warning("no sweep this time: %s", error)


class RayBroker:
    """`BrokerCalls` over the actor's handle. Picklable, as the handle is."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def acquire_start(self, owner: str, lease_id: str) -> None:
        """See `Broker`."""
        await self._call(self.handle.acquire_start, owner, lease_id)

    async def try_start(self, owner: str, lease_id: str) -> bool:
        """See `Broker`."""
        return await self._call(self.handle.try_start, owner, lease_id)

    async def start_done(self, owner: str, lease_id: str, sandbox_id: str, refused: bool) -> None:
        """See `Broker`."""
        await self._call(self.handle.start_done, owner, lease_id, sandbox_id, refused)

    async def release(self, owner: str, lease_id: str) -> None:
        """See `Broker`."""
        await self._call(self.handle.release, owner, lease_id)

    async def report(self, owner: str, held: dict[str, str]) -> None:
        """See `Broker`."""
        await self._call(self.handle.report, owner, held)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except RayActorError as error:
            raise BrokerGoneError(str(error).strip().splitlines()[0]) from error


def start(run_dir: Path, run_id: str, workers: int) -> RayBroker:
    """Start the broker of a run. It ends with the process that calls this, and is started anew if it dies."""
    actor = ray.remote(BrokerProcess).options(num_cpus=0, max_restarts=-1, max_concurrency=_MAX_CALLS)
    return RayBroker(actor.remote(run_dir, run_id, workers))
