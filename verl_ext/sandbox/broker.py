"""One set of limits for a whole run: a broker that grants leases to the workers.

    worker ── BrokerClient ──┐   acquire, start_done, release: one call each
    worker ── BrokerClient ──┼── Broker ── LeaseBook        every REPORT_S: report(held leases)
    worker ── BrokerClient ──┘      └───── the service      every SWEEP_S: sweep()

Nothing here knows Ray: verl_ext.agent_loop.broker_process makes an actor of it, and broker_client asks it. A broker
that dies is started anew by Ray and knows nothing; it counts what the service and the ledgers name for the run, waits
until the workers have reported what they hold, and only then grants. A worker that dies stops to report; what it left
is ended and its places are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from verl_ext.errors import SandboxError
from verl_ext.sandbox.interface import SandboxBackend
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL, read_left_ids
from verl_ext.sandbox.limiter import LeaseBook, Limits

logger = logging.getLogger(__name__)

SWEEP_S = 60.0
SILENT_S = 60.0  # after which a worker counts as dead
RECOVERY_S = 15.0  # that a broker started anew waits for workers that do not report
_LIST_AGAIN_S = 4.0


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
                await asyncio.sleep(_LIST_AGAIN_S)
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
