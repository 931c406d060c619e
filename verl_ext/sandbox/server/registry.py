"""All sandboxes of one server: creating, the warm pool, time to live, quota, counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from datetime import UTC, datetime
from typing import Any

from .forkserver import ForkServer
from .options import Options
from .sandbox import RefusedError, Sandbox, SandboxGoneError

log = logging.getLogger(__name__)
_TICK_S = 0.1
_STARTING_AT_ONCE = 4


class LimitedError(Exception):
    """Too many sandboxes or too many creates a second."""


class Registry:
    """The live sandboxes and the counts of those that were."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.fork_server = ForkServer(options, self._on_gone)
        self.live: dict[str, Sandbox] = {}
        self.counts: Counter[str] = Counter()
        self._label_counts: dict[tuple[str, str], Counter[str]] = {}
        self._warm: deque[Sandbox] = deque()
        self._all: dict[str, Sandbox] = {}
        self._starting = asyncio.Semaphore(_STARTING_AT_ONCE)
        self._claims = 0
        self._held: deque[float] = deque()
        self._create_times: deque[float] = deque()
        self._request_times: deque[float] = deque()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def start(self) -> None:
        """Start the fork server and the tasks that keep time and warmth."""
        await self.fork_server.start()
        self._tasks = [asyncio.create_task(self._expire()), asyncio.create_task(self._keep_warm())]

    async def create(self, *, template: str, metadata: dict[str, str], env: dict[str, str], ttl_s: int) -> Sandbox:
        """A sandbox, from the warm pool if one is ready.

        Raises:
            LimitedError: the bound on sandboxes or on creates was met.
            RefusedError, SandboxGoneError: it could not be started.
        """
        self._check_limits()
        self._claims += 1
        try:
            if self.options.create_delay_s:
                await asyncio.sleep(self.options.create_delay_s)
            sandbox = await self._take()
        finally:
            self._claims -= 1
        sandbox.template, sandbox.metadata, sandbox.env = template, metadata, env
        sandbox.started_at, sandbox.end_at = datetime.now(UTC), time.time() + ttl_s
        self.live[sandbox.id] = sandbox
        self._count(sandbox, "created")
        self._wake.set()
        if env:
            await sandbox.ask({"op": "env", "env": env})
        return sandbox

    async def _take(self) -> Sandbox:
        while self._warm:
            sandbox = self._warm.popleft()
            if not sandbox.gone.is_set():
                return sandbox
        return await self._start_one()

    async def _start_one(self) -> Sandbox:
        async with self._starting:
            sandbox = Sandbox("i" + secrets.token_hex(10))
            self._all[sandbox.id] = sandbox
            try:
                self.fork_server.spawn(sandbox.id, sandbox.agent_end)
                await sandbox.open()
            except BaseException:
                with contextlib.suppress(ConnectionError):
                    self.fork_server.kill(sandbox.id)
                raise
            return sandbox

    def _check_limits(self) -> None:
        options, now = self.options, time.monotonic()
        while self._held and self._held[0] <= now:
            self._held.popleft()
        if options.max_alive is not None and len(self.live) + self._claims + len(self._held) >= options.max_alive:
            self.counts["refused"] += 1
            raise LimitedError(f"maximum number of concurrent sandboxes ({options.max_alive}) reached")
        while self._create_times and self._create_times[0] <= now - 1.0:
            self._create_times.popleft()
        if options.create_rate is not None and len(self._create_times) >= options.create_rate:
            self.counts["refused"] += 1
            raise LimitedError(f"more than {options.create_rate:g} creates per second")
        self._create_times.append(now)

    def may_request(self) -> bool:
        """Whether one more request to the control plane is within its rate; counts it if so."""
        rate, now = self.options.request_rate, time.monotonic()
        if rate is None:
            return True
        while self._request_times and self._request_times[0] <= now - 1.0:
            self._request_times.popleft()
        if len(self._request_times) >= rate:
            self.counts["refused"] += 1
            return False
        self._request_times.append(now)
        return True

    async def kill(self, sandbox_id: str, *, cause: str = "killed", reason: str = "it was killed") -> bool:
        """End a sandbox; False if there is none of that name."""
        sandbox = self.live.pop(sandbox_id, None)
        if sandbox is None:
            return False
        self._count(sandbox, cause)
        self._held.append(time.monotonic() + self.options.quota_release_s)
        sandbox.mark_gone(reason)
        with contextlib.suppress(ConnectionError):
            self.fork_server.kill(sandbox_id)
        return True

    def _on_gone(self, sandbox_id: str, reason: str | None) -> None:
        """The fork server says that every process of a sandbox has ended."""
        if sandbox_id == "*":
            for one in list(self._all):
                self._on_gone(one, reason)
            return
        sandbox = self._all.pop(sandbox_id, None)
        if sandbox is None:
            return
        if self.live.pop(sandbox_id, None) is not None:
            log.warning("sandbox %s ended by itself: %s", sandbox_id, reason)
            self._count(sandbox, "died")
            self._held.append(time.monotonic() + self.options.quota_release_s)
        sandbox.mark_gone(reason)
        sandbox.close()
        self._wake.set()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.time()
            for sandbox in list(self.live.values()):
                if sandbox.end_at <= now:
                    await self.kill(sandbox.id, cause="expired", reason="it reached the end of its time to live")

    async def _keep_warm(self) -> None:
        await self.fork_server.loaded.wait()
        while True:
            self._wake.clear()
            self._warm = deque(one for one in self._warm if not one.gone.is_set())
            if len(self._warm) < self.options.warm and not self._claims:
                try:
                    self._warm.append(await self._start_one())
                except (RefusedError, SandboxGoneError, OSError, TimeoutError) as exc:
                    log.error("a warm sandbox could not be started: %s", exc)
                    await asyncio.sleep(1.0)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 1.0)

    def _count(self, sandbox: Sandbox, what: str) -> None:
        self.counts[what] += 1
        for label in sandbox.metadata.items():
            self._label_counts.setdefault(label, Counter())[what] += 1

    def count_execution(self, sandbox: Sandbox) -> None:
        """One more execution began."""
        sandbox.executions += 1
        self._count(sandbox, "executions")

    def stats(self, label: tuple[str, str] | None) -> dict[str, Any]:
        """Counts of all sandboxes, or of those that carry one label."""
        counts = self.counts if label is None else self._label_counts.get(label, Counter())
        alive = [one for one in self.live.values() if label is None or one.metadata.get(label[0]) == label[1]]
        names = ("created", "killed", "expired", "died", "executions")
        answer: dict[str, Any] = {name: counts[name] for name in names} | {"alive": len(alive)}
        if label is None:
            processes = len(self._all)
            answer |= {"warm": len(self._warm), "ending": processes - len(self.live) - len(self._warm)}
            answer["refused"] = self.counts["refused"]
            answer["isolation"] = str(self.fork_server.tier)
        return answer

    async def close(self) -> None:
        """End everything."""
        if self._is_closing:
            return
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sandbox_id in list(self.live):
            await self.kill(sandbox_id, reason="the server is stopping")
        for sandbox in list(self._all.values()):
            sandbox.mark_gone("the server is stopping")
        await self.fork_server.close()
        for sandbox in self._all.values():
            sandbox.close()
