"""The session mode `context` over the fake: room, fairness, and what one trajectory's fault costs the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from verl_ext.errors import SandboxDiedError, SandboxError, SandboxQuotaError, SandboxUnavailableError
from verl_ext.sandbox import lifecycle
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.pool import SessionPool


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_BACKOFF_BASE_S", 0.01)


def pool_over(backend: FakeBackend, **options: object) -> SessionPool:
    return SessionPool(backend, mode="context", **{"contexts": 4, "max_alive": 2, **options})  # type: ignore[arg-type]


async def trajectories(pool: SessionPool, count: int, code: Callable[[int], list[str]]) -> list[object]:
    """What the last run of each gave: its results, or the error of the service."""

    async def one(number: int) -> object:
        try:
            async with pool.session(f"t{number}") as session:
                for line in code(number):
                    execution = await session.run(line)
                return execution.results
        except SandboxError as error:
            return error

    return await asyncio.gather(*(one(number) for number in range(count)))


async def test_many_trajectories_on_few_sandboxes_each_with_its_own_variables():
    backend = FakeBackend()
    pool = pool_over(backend)
    found = await trajectories(pool, 100, lambda n: [f"x = {n}", "x * 2"])
    assert found == [(str(2 * n),) for n in range(100)]
    assert backend.peak_alive <= 2
    assert backend.peak_contexts <= 4
    assert backend.contexts == 100, "a context is never used again"
    assert pool.metrics.report().peaks["waiting"] >= 90
    await pool.aclose()
    assert not backend.alive
    assert pool.metrics.left == 0


async def test_no_more_sandboxes_are_made_than_are_needed():
    backend = FakeBackend()
    pool = pool_over(backend, max_alive=10)
    await trajectories(pool, 9, lambda n: ["import time; time.sleep(0.05)"])
    assert backend.creates == 3
    await pool.aclose()


async def test_a_trajectory_without_a_call_costs_nothing():
    backend = FakeBackend()
    pool = pool_over(backend)
    async with pool.session("t"):
        pass
    await pool.aclose()
    assert (backend.creates, backend.contexts) == (0, 0)


async def test_code_past_its_deadline_gets_a_new_context_in_the_room_that_it_had():
    backend = FakeBackend()
    pool = pool_over(backend, contexts=1, max_alive=1)
    async with pool.session("a") as a:
        await a.run("x = 1")
        sandbox = a.sandbox_id
        waiting = asyncio.create_task(trajectories(pool, 1, lambda n: ["'b'"]))
        await asyncio.sleep(0.01)
        execution = await a.run("while True: pass", timeout_s=0.1)
        assert execution.timed_out
        assert "lost" in (execution.error.value if execution.error else "")
        again = await a.run("x")
        assert again.error is not None
        assert again.error.name == "NameError"
        assert a.sandbox_id == sandbox
        assert not waiting.done(), "who waits does not overtake who had the room"
    assert await waiting == [("'b'",)]
    await pool.aclose()
    assert backend.creates == 1


async def test_a_sandbox_that_dies_costs_its_trajectories_and_nobody_else():
    backend = FakeBackend()
    pool = pool_over(backend, contexts=3, max_alive=2)
    ready = asyncio.Event()

    async def one(number: int) -> str:
        async with pool.session(f"t{number}") as session:
            await session.run("1")
            homes[number] = session.sandbox_id
            await ready.wait()
            try:
                await session.run("2")
            except SandboxDiedError:
                return "masked"
            return "done"

    homes: dict[int, str | None] = {}
    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    while len(homes) < 6:
        await asyncio.sleep(0.001)
    victim = homes[0]
    await backend.kill(victim or "")
    ready.set()
    outcomes = await asyncio.gather(*tasks)
    assert outcomes == ["masked" if homes[n] == victim else "done" for n in range(6)]
    assert outcomes.count("masked") == 3
    assert await trajectories(pool, 3, lambda n: ["'new'"]) == [("'new'",)] * 3
    await pool.aclose()
    assert not backend.alive


async def test_a_sandbox_that_failed_takes_no_new_trajectories():
    backend = FakeBackend(FaultScript(run_errors={2: SandboxUnavailableError("502")}))
    pool = pool_over(backend, contexts=2, max_alive=1)
    async with pool.session("a") as a:
        await a.run("1")
        with pytest.raises(SandboxUnavailableError):
            await a.run("2")
        first = next(iter(backend.alive))
        async with pool.session("b") as b:
            await b.run("3")
            assert b.sandbox_id != first
    await pool.aclose()
    assert (backend.creates, len(backend.alive)) == (2, 0)


async def test_a_context_that_cannot_be_opened_costs_one_trajectory():
    backend = FakeBackend(FaultScript(context_errors={1: SandboxUnavailableError("500")}))
    pool = pool_over(backend)
    found = await trajectories(pool, 3, lambda n: ["1"])
    assert [isinstance(one, SandboxUnavailableError) for one in found] == [True, False, False]
    await pool.aclose()
    assert not backend.alive


async def test_a_sandbox_that_cannot_be_had_fails_those_it_was_for_and_the_rest_goes_on():
    endless = {number: SandboxQuotaError("full") for number in range(1, 3)}
    backend = FakeBackend(FaultScript(create_errors=endless))
    pool = pool_over(backend, contexts=2, max_alive=1, acquire_timeout_s=0.001)
    found = await trajectories(pool, 6, lambda n: ["1"])
    assert [one if isinstance(one, tuple) else type(one) for one in found][:2] == [SandboxQuotaError] * 2
    assert ("1",) in found
    await pool.aclose()
    assert not backend.alive


async def test_a_sandbox_that_nobody_uses_ends_and_its_place_is_free():
    backend = FakeBackend()
    pool = pool_over(backend)
    pool._seating._idle_s = 0.02  # type: ignore[attr-defined]
    await trajectories(pool, 1, lambda n: ["1"])
    assert len(backend.alive) == 1, "the next may come at once"
    while backend.alive:
        await asyncio.sleep(0.005)
    assert await trajectories(pool, 1, lambda n: ["2"]) == [("2",)]
    await pool.aclose()


@pytest.mark.parametrize("when_s", [0.0, 0.005, 0.02])
async def test_cancelled_trajectories_leave_no_room_taken(when_s: float):
    backend = FakeBackend(FaultScript(create_delay_s=0.01))
    pool = pool_over(backend, contexts=1, max_alive=1)
    tasks = [asyncio.create_task(trajectories(pool, 4, lambda n: ["import time; time.sleep(0.01)"]))]
    await asyncio.sleep(when_s)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    found = await asyncio.wait_for(trajectories(pool, 2, lambda n: ["7"]), 5)
    assert found == [("7",)] * 2
    await pool.aclose()
    assert not backend.alive


async def test_closing_the_pool_ends_waiting_opening_and_idle_alike():
    backend = FakeBackend(FaultScript(create_delay_s=0.02))
    pool = pool_over(backend, contexts=1, max_alive=2)
    running = asyncio.create_task(trajectories(pool, 5, lambda n: ["import time; time.sleep(0.2)"]))
    await asyncio.sleep(0.03)
    await pool.aclose()
    assert all(isinstance(one, SandboxUnavailableError) for one in await running)
    assert not backend.alive
    assert pool.metrics.left == 0


def test_no_contexts_serve_nobody():
    with pytest.raises(ValueError, match="at least 1"):
        pool_over(FakeBackend(), contexts=0)
    with pytest.raises(ValueError, match="unknown"):
        SessionPool(FakeBackend(), mode="shared")
