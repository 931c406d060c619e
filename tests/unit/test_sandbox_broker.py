"""verl_ext.sandbox.broker without Ray: several workers on one account, and what the death of each part costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from verl_ext.errors import SandboxUnavailableError
from verl_ext.sandbox import broker as under_test
from verl_ext.sandbox import broker_client
from verl_ext.sandbox.broker import Broker
from verl_ext.sandbox.broker_client import BrokerClient, BrokerGoneError
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.interface import Execution
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL, SandboxLedger
from verl_ext.sandbox.limiter import Limits
from verl_ext.sandbox.pool import SessionPool


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_client, "REPORT_S", 0.02)
    monkeypatch.setattr(under_test, "RECOVERY_S", 0.3)
    monkeypatch.setattr(under_test, "SILENT_S", 0.15)
    monkeypatch.setattr(broker_client, "_RETRY_S", (0.01,))


class Line:
    """`BrokerCalls` to a broker that can die: calls under way then fail, as Ray's do."""

    def __init__(self, make: Callable[[bool], Broker]) -> None:
        self._make = make
        self.broker: Broker | None = make(False)
        self._under_way: set[asyncio.Task] = set()

    def kill(self) -> None:
        self.broker = None
        for task in self._under_way:
            task.cancel()

    def start_anew(self) -> None:
        self.broker = self._make(True)

    def __getattr__(self, name: str):
        async def call(*arguments):
            if self.broker is None:
                raise BrokerGoneError("no broker")
            task = asyncio.create_task(getattr(self.broker, name)(*arguments))
            self._under_way.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if task.cancelled() and self.broker is not None and not asyncio.current_task().cancelling():
                    raise
                if asyncio.current_task().cancelling():
                    raise
                raise BrokerGoneError("it died") from None
            finally:
                self._under_way.discard(task)

        return call


class Run:
    """A few workers of one run over one fake account."""

    def __init__(self, tmp_path: Path) -> None:
        self.backend = FakeBackend(FaultScript(max_alive=4, create_delay_s=0.002, answer=lambda code: Execution(code)))
        self.folder = tmp_path
        self.limits = Limits(max_alive=4, max_starting=2)
        self.line = Line(self.make)
        self.clients: dict[str, BrokerClient] = {}
        self.pools: dict[str, SessionPool] = {}

    def make(self, again: bool) -> Broker:
        workers = len(self.clients) if again else 0
        return Broker(self.limits, backend=self.backend, run_id="r", again=again, workers=workers, ledgers=self.folder)

    def worker(self, name: str) -> SessionPool:
        self.clients[name] = BrokerClient(self.line, name)
        labels = {RUN_LABEL: "r", WORKER_LABEL: name}
        ledger = SandboxLedger(self.folder, name)
        pool = SessionPool(self.backend, limiter=self.clients[name], run_labels=labels, ledger=ledger)
        self.pools[name] = pool
        return pool

    @property
    def broker(self) -> Broker:
        assert self.line.broker is not None
        return self.line.broker

    async def close(self) -> None:
        for pool in self.pools.values():
            await pool.aclose()
        for client in self.clients.values():
            await client.aclose()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(tmp_path)
    yield made
    await made.close()


async def trajectories(pool: SessionPool, count: int, calls: int = 2) -> int:
    async def one(number: int) -> None:
        async with pool.session(f"t{number}") as session:
            for _ in range(calls):
                await session.run("1")
                await asyncio.sleep(0.001)

    await asyncio.gather(*(one(number) for number in range(count)))
    return count


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_workers_together_stay_within_the_runs_limits(run: Run):
    pools = [run.worker(f"w{number}") for number in range(3)]
    await asyncio.gather(*(trajectories(pool, 30) for pool in pools))
    assert run.backend.peak_alive <= 4
    assert all(pool.metrics.report().summary()["retries"] == 0 for pool in pools), "not one create was refused"
    assert run.broker.numbers() == {"alive": 0, "starting": 0, "waiting": 0, "swept": 0}


async def test_two_runs_with_half_the_account_each_are_never_refused(tmp_path: Path):
    runs = [Run(tmp_path / name) for name in ("a", "b")]
    backend = FakeBackend(FaultScript(max_alive=4, create_delay_s=0.002, answer=lambda code: Execution(code)))
    for one in runs:
        one.backend, one.limits = backend, Limits(max_alive=2, max_starting=2)
        one.line = Line(one.make)
    await asyncio.gather(*(trajectories(one.worker("w"), 40) for one in runs))
    for one in runs:
        assert one.pools["w"].metrics.report().summary()["retries"] == 0
        await one.close()
    assert backend.peak_alive <= 4


async def test_a_broker_that_dies_costs_no_trajectory_and_the_limits_hold(run: Run):
    pools = [run.worker(f"w{number}") for number in range(2)]
    working = [asyncio.create_task(trajectories(pool, 60, calls=4)) for pool in pools]
    for _ in range(3):
        await until(lambda: len(run.backend.alive) >= 3)
        run.line.kill()
        await asyncio.sleep(0.01)
        run.line.start_anew()
        await asyncio.sleep(0.05)
    assert await asyncio.gather(*working) == [60, 60]
    assert run.backend.peak_alive <= 4, "never more than the account allows, though each broker knew nothing at first"
    assert not run.backend.alive
    await until(lambda: not run.broker.book.held)


async def test_a_new_broker_counts_what_lives_before_anybody_reports(run: Run):
    pool = run.worker("w0")
    async with pool.session("t") as session:
        await session.run("1")
        await run.clients["w0"].aclose()
        run.line.kill()
        run.line.start_anew()
        asking = asyncio.create_task(run.broker.acquire_start("w1", "x"))
        await until(lambda: run.broker.book.held)
        assert list(run.broker.book.held) == [f"recovered:{session.sandbox_id}"]
        assert not asking.done(), "it grants nothing before it has heard of all"
        await run.broker.report("w0", {"lease": session.sandbox_id or ""})
        await asyncio.wait_for(asking, 2)
        assert set(run.broker.book.held) == {"lease", "x"}, "one place, under the name that its worker gives it"


async def test_a_new_broker_believes_the_ledger_too(run: Run):
    SandboxLedger(run.folder, "w9").created("not-listed", {})
    run.clients["w0"] = BrokerClient(run.line, "w0")
    run.line.start_anew()
    asking = asyncio.create_task(run.broker.acquire_start("w1", "x"))
    await until(lambda: run.broker.book.held)
    assert "recovered:not-listed" in run.broker.book.held
    await run.broker.report("w0", {})
    await asyncio.wait_for(asking, 2)
    await run.broker.sweep()
    assert "recovered:not-listed" not in run.broker.book.held, "the service does not know it, so it holds no place"


async def test_without_a_broker_a_waiting_trajectory_is_lost_in_the_end(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broker_client, "GIVE_UP_S", 0.05)
    pool = run.worker("w0")
    run.line.kill()
    async with pool.session("t") as session:
        with pytest.raises(SandboxUnavailableError, match="broker has been gone"):
            await session.run("1")
    run.line.start_anew()


async def test_a_release_that_was_lost_is_made_good_by_reports(run: Run):
    pool = run.worker("w0")
    async with pool.session("t") as session:
        await session.run("1")
        held, broker = list(run.broker.book.held), run.line.broker
        assert len(held) == 1
        run.line.broker = None  # deaf, not dead
    run.line.broker = broker
    assert run.broker.book.held
    await until(lambda: not run.broker.book.held)


async def test_a_worker_that_dies_has_its_sandboxes_ended_and_its_places_given_back(run: Run):
    dead, alive = run.worker("dead"), run.worker("alive")
    stack = [dead.session(f"t{number}") for number in range(4)]
    sessions = [await each.__aenter__() for each in stack]
    await asyncio.gather(*(session.run("1") for session in sessions))
    working = asyncio.create_task(trajectories(alive, 5))
    await run.clients["dead"].aclose()  # it reports no more
    await asyncio.sleep(0.2)
    assert not working.done()
    await run.broker.sweep()
    assert await asyncio.wait_for(working, 5) == 5
    assert run.broker.swept == 4
    for each in stack:
        await each.__aexit__(None, None, None)


async def test_a_sandbox_that_nobody_owns_is_ended_at_the_second_sight(run: Run):
    pool = run.worker("w0")
    lost = await run.backend.create(labels={RUN_LABEL: "r", WORKER_LABEL: "w0"}, ttl_s=60)
    other = await run.backend.create(labels={RUN_LABEL: "another run"}, ttl_s=60)
    async with pool.session("t") as session:
        await session.run("1")
        await run.broker.sweep()
        assert lost.sandbox_id in run.backend.alive, "its create may be on its way to its lease"
        await run.broker.sweep()
        assert set(run.backend.alive) == {other.sandbox_id, session.sandbox_id}
    await other.close()
