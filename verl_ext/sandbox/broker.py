"""One set of limits for a whole run: a broker that grants leases, and its client in each worker.

    worker ── BrokerClient ──┐   acquire, start_done, release: one call each
    worker ── BrokerClient ──┼── Broker ── LeaseBook        every REPORT_S: report(held leases)
    worker ── BrokerClient ──┘      └───── the service      every SWEEP_S: sweep()

Nothing here knows Ray: the calls go through `BrokerCalls`, which verl_ext.agent_loop.broker_process makes of an
actor. A broker that dies is started anew by Ray and knows nothing; it counts what the service lists for the run,
waits until the workers have reported what they hold, and only then grants. A worker that dies stops to report;
what it left is ended and its places are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from verl_ext.errors import SandboxError, SandboxUnavailableError
from verl_ext.sandbox.interface import SandboxBackend
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL, read_left_ids
from verl_ext.sandbox.limiter import LeaseBook, Limits

logger = logging.getLogger(__name__)

REPORT_S = 5.0
SWEEP_S = 60.0
SILENT_S = 60.0  # after which a worker counts as dead
RECOVERY_S = 15.0  # that a broker started anew waits for workers that do not report
_RETRY_S = (0.5, 1.0, 2.0, 4.0)
GIVE_UP_S = 120.0  # without any broker


class BrokerGoneError(Exception):
    """The broker does not answer; it may come back."""


class BrokerCalls(Protocol):
    """The broker's methods from afar. Each may raise BrokerGoneError."""

    async def acquire_start(self, owner: str, lease_id: str) -> None: ...
    async def try_start(self, owner: str, lease_id: str) -> bool: ...
    async def start_done(self, owner: str, lease_id: str, sandbox_id: str, refused: bool) -> None: ...
    async def release(self, owner: str, lease_id: str) -> None: ...
    async def report(self, owner: str, held: dict[str, str]) -> None: ...


@dataclass
class _Owner:
    heard_s: float = 0.0
    has_reported: bool = False
    missing: set[str] = field(default_factory=set)  # leases that its last report lacked


class Broker:
    """Grants the leases of one run to its workers.

    Args:
        limits: of the run.
        backend: the service, to see and end what no worker owns; None for tests of the rest.
        run_id: the run.
        again: whether this is a broker started anew, with workers that hold leases of the one before.
        workers: how many are expected to report after that.
        ledgers: folder with the workers' ledgers, which may know of sandboxes that the service does not list yet.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        backend: SandboxBackend | None,
        run_id: str,
        again: bool = False,
        workers: int = 0,
        ledgers: Path | None = None,
    ) -> None:
        self.book = LeaseBook(limits)
        self.swept = 0
        self._backend = backend
        self._labels = {RUN_LABEL: run_id}
        self._workers = workers
        self._ledgers = ledgers
        self._reported = asyncio.Event()
        self._sandbox_of: dict[str, str] = {}  # lease to sandbox, "" while it starts
        self._owners: dict[str, _Owner] = {}
        self._unowned: set[str] = set()  # sandboxes that the last sweep could not place
        self.book.is_open = False
        self._again = again
        self._recovered: asyncio.Task[None] | None = None

    async def acquire_start(self, owner: str, lease_id: str) -> None:
        """See `Limiter.acquire_start`; the owner is alive, since it asks."""
        self._begin()
        self._heard(owner)
        await self.book.acquire_start(lease_id, owner)
        self._sandbox_of.setdefault(lease_id, "")

    async def try_start(self, owner: str, lease_id: str) -> bool:
        """See `Limiter.try_start`."""
        self._begin()
        self._heard(owner)
        granted = self.book.try_start(lease_id, owner)
        if granted:
            self._sandbox_of.setdefault(lease_id, "")
        return granted

    async def start_done(self, owner: str, lease_id: str, sandbox_id: str, refused: bool) -> None:
        """See `Limiter.start_done`."""
        self._heard(owner)
        if lease_id in self.book.held:
            self._sandbox_of[lease_id] = sandbox_id
        self.book.start_done(lease_id, refused=refused, succeeded=bool(sandbox_id))

    async def release(self, owner: str, lease_id: str) -> None:
        """See `Limiter.release`."""
        self._heard(owner)
        self._drop(lease_id)

    async def report(self, owner: str, held: dict[str, str]) -> None:
        """What a worker holds: its leases, each with its sandbox's id, "" while it starts.

        Leases that this broker does not know are counted from now on. Those that two reports in a row lack are
        dropped: their release was lost.
        """
        self._begin()
        entry = self._heard(owner)
        for lease_id, sandbox_id in held.items():
            self.book.rename(_placeholder(sandbox_id), lease_id, owner)
            self._sandbox_of[lease_id] = sandbox_id
        missing = {lease for lease, name in self.book.held.items() if name == owner and lease not in held}
        for lease_id in missing & entry.missing:
            self._drop(lease_id)
        entry.missing = missing
        entry.has_reported = True
        self._reported.set()

    async def sweep(self) -> None:
        """End what the service lists for this run and nobody owns; free the places of what it lists no more.

        A sandbox is unowned when no lease names it in two sweeps in a row, or at once when its worker is dead.

        Raises:
            SandboxError: the service cannot list.
        """
        if self._backend is None:
            return
        dead = [name for name, entry in self._owners.items() if time.monotonic() - entry.heard_s > SILENT_S]
        listed = await self._backend.list_labels(labels=self._labels)
        owned = {sandbox for lease, sandbox in self._sandbox_of.items() if self.book.held.get(lease) not in dead}
        unowned = set(listed) - owned
        doomed = {name for name in unowned if name in self._unowned or listed[name].get(WORKER_LABEL) in dead}
        self._unowned = unowned - doomed
        failed = set()
        for sandbox_id in sorted(doomed):
            try:
                self.swept += await self._backend.kill(sandbox_id)
            except SandboxError as error:
                failed.add(sandbox_id)
                logger.warning("sandbox %s, which nobody owns, could not be ended: %s", sandbox_id, error)
        alive = (set(listed) - doomed) | failed
        for lease_id in self._placeholders():
            if lease_id.removeprefix(_PREFIX) not in alive:
                self._drop(lease_id)
        for name in dead:
            logger.warning("worker %s has been silent for %g s: its places are given back", name, SILENT_S)
            for lease_id in self.book.release_owner(name):
                self._sandbox_of.pop(lease_id, None)
            del self._owners[name]

    def numbers(self) -> dict[str, float]:
        """What is held now, for a logger."""
        book = self.book
        return {
            "alive": float(len(book.held)),
            "starting": float(len(book.starting)),
            "waiting": float(book.waiting),
            "swept": float(self.swept),
        }

    def _begin(self) -> None:
        """Recover, if this is the first call: here an event loop runs for sure."""
        if self._recovered is None:
            self._recovered = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        if self._again:
            for sandbox_id, worker in (await self._seen()).items():
                if sandbox_id not in self._sandbox_of.values():
                    self.book.adopt(_placeholder(sandbox_id), worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_S):
                    while sum(entry.has_reported for entry in self._owners.values()) < self._workers:
                        self._reported.clear()
                        await self._reported.wait()
        self.book.open()

    async def _seen(self) -> dict[str, str]:
        """Sandboxes of this run that may be alive, with the worker of each where it is known."""
        seen = dict.fromkeys(read_left_ids(self._ledgers), "") if self._ledgers else {}
        while self._backend is not None:
            try:
                listed = await self._backend.list_labels(labels=self._labels)
            except SandboxError as error:
                logger.warning("the new broker cannot see what is alive and grants nothing yet: %s", error)
                await asyncio.sleep(_RETRY_S[-1])
                continue
            return seen | {name: labels.get(WORKER_LABEL, "") for name, labels in listed.items()}
        return seen

    def _heard(self, owner: str) -> _Owner:
        entry = self._owners.setdefault(owner, _Owner())
        entry.heard_s = time.monotonic()
        return entry

    def _placeholders(self) -> list[str]:
        return [lease_id for lease_id in self.book.held if lease_id.startswith(_PREFIX)]

    def _drop(self, lease_id: str) -> None:
        self._sandbox_of.pop(lease_id, None)
        self.book.release(lease_id)


_PREFIX = "recovered:"


def _placeholder(sandbox_id: str) -> str:
    return f"{_PREFIX}{sandbox_id}"


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
