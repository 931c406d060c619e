"""verl_ext.sandbox.pool over the fake: limits, blame, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_ext.errors import (
    SandboxAuthError,
    SandboxDiedError,
    SandboxQuotaError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.sandbox import lifecycle, limiter
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.interface import Execution
from verl_ext.sandbox.ledger import ATTEMPT_LABEL, RUN_LABEL, TRAJECTORY_LABEL, SandboxLedger, read_left_ids
from verl_ext.sandbox.limiter import Limits, LocalLimiter
from verl_ext.sandbox.metrics import percentile
from verl_ext.sandbox.pool import SessionPool


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr(limiter, "REFUSED_BASE_S", 0.01)
    monkeypatch.setattr(limiter, "REFUSED_CAP_S", 0.05)


def ok(code: str) -> Execution:
    return Execution(stdout=code)


async def slow(pool: SessionPool, name: str, seconds: float = 0.05) -> None:
    async with pool.session(name) as session:
        await session.run("1")
        await asyncio.sleep(seconds)


async def test_one_sandbox_a_trajectory_made_at_the_first_run():
    backend = FakeBackend()
    pool = SessionPool(backend, run_labels={RUN_LABEL: "r1"})
    async with pool.session("t0"):
        assert backend.creates == 0
    async with pool.session("t1") as session:
        assert session.sandbox_id is None
        await session.run("x = 41")
        assert (await session.run("x + 1")).results == ("42",)
        assert session.runs == 2
        assert list(backend.alive) == [session.sandbox_id]
    assert backend.creates == 1
    assert not backend.alive
    labels = backend.created_labels[0]
    assert labels[RUN_LABEL] == "r1"
    assert labels[TRAJECTORY_LABEL] == "t1"
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in labels.items())
    assert labels[ATTEMPT_LABEL].startswith("1-")
    assert pool.metrics.left == 0


async def test_the_limits_hold_under_a_storm():
    backend = FakeBackend(FaultScript(create_delay_s=0.005, answer=ok, max_alive=10))
    pool = SessionPool(backend, max_alive=10, max_starting=3)
    await asyncio.gather(*(slow(pool, f"t{n}", 0.001) for n in range(300)))
    assert backend.peak_alive <= 10
    report = pool.metrics.report()
    assert report.summary()["retries"] == 0  # not one create was refused
    assert 0.0 < report.waiting_share <= 1.0
    assert report.peaks["alive"] <= 10
    assert report.peaks["starting"] <= 3
    assert pool.metrics.counts["created"] == pool.metrics.counts["killed"] == 300


async def test_waiting_is_first_come_first_served():
    pool = SessionPool(FakeBackend(FaultScript(answer=ok)), max_alive=1)
    order: list[int] = []

    async def one(number: int) -> None:
        async with pool.session(f"t{number}") as session:
            await session.run("1")
            order.append(number)
            await asyncio.sleep(0.001)

    await asyncio.gather(*(one(number) for number in range(20)))
    assert order == list(range(20))


async def test_the_create_rate_is_kept():
    backend = FakeBackend(FaultScript(answer=ok))
    pool = SessionPool(backend, max_alive=20, create_rate_per_s=100)
    began_s = time.monotonic()
    await asyncio.gather(*(slow(pool, f"t{n}", 0.0) for n in range(11)))
    assert time.monotonic() - began_s >= 0.1


async def test_code_past_its_deadline_is_data_and_costs_the_state():
    backend = FakeBackend()
    pool = SessionPool(backend, call_timeout_s=0.2, max_alive=1)
    async with pool.session("t") as session:
        await session.run("x = 1")
        first = session.sandbox_id
        execution = await session.run("print('so far')\nwhile True: pass")
        assert execution.timed_out
        assert execution.stdout == "so far\n"
        assert execution.error is not None
        assert execution.error.name == "TimeoutError"
        assert "0.2 s" in execution.error.value
        assert "lost" in execution.error.value
        assert first not in backend.alive
        again = await session.run("x", timeout_s=5)
        assert again.error is not None
        assert again.error.name == "NameError"
        assert session.restarts == 1
    assert backend.creates == 2
    assert not backend.alive
    assert pool.metrics.counts["timeouts"] == pool.metrics.counts["tainted"] == 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (FaultScript(die_after_runs=1), SandboxDiedError),
        (FaultScript(run_errors={2: SandboxUnavailableError("502")}), SandboxUnavailableError),
        (FaultScript(run_hangs=frozenset({2})), SandboxTimeoutError),
    ],
)
async def test_a_fault_of_the_service_ends_the_session_at_once(script: FaultScript, expected: type[Exception]):
    backend = FakeBackend(script)
    pool = SessionPool(backend, call_timeout_s=0.2, max_alive=1)
    async with pool.session("t") as session:
        await session.run("1")
        with pytest.raises(expected):
            await session.run("2")
        with pytest.raises(expected, match="failed before"):
            await session.run("3")
        assert backend.runs == 2  # never repeated
        await slow(pool, "another")  # the place is free though this session is still open
    assert not backend.alive
    assert pool.metrics.counts[f"failures/{expected.__name__}"] == 1
    assert pool.metrics.report().summary()["failures"] == 1


async def test_creates_that_may_work_later_are_tried_again():
    faults = {1: SandboxQuotaError("full"), 2: SandboxUnavailableError("502"), 3: SandboxTimeoutError("slow")}
    backend = FakeBackend(FaultScript(create_errors=faults))
    pool = SessionPool(backend)
    async with pool.session("t") as session:
        assert (await session.run("1")).results == ("1",)
    assert backend.creates == 4
    retries = {name: count for name, count in pool.metrics.counts.items() if name.startswith("retries/")}
    assert retries == {
        f"retries/{name}": 1 for name in ("SandboxQuotaError", "SandboxUnavailableError", "SandboxTimeoutError")
    }


async def test_creates_that_cannot_work_are_not():
    backend = FakeBackend(FaultScript(create_errors={1: SandboxAuthError("key")}))
    async with SessionPool(backend).session("t") as session:
        with pytest.raises(SandboxAuthError):
            await session.run("1")
    assert backend.creates == 1


async def test_the_wall_budget_ends_the_tries_with_the_last_cause():
    endless = {number: SandboxQuotaError("account full") for number in range(1, 1000)}
    pool = SessionPool(FakeBackend(FaultScript(create_errors=endless)), acquire_timeout_s=0.1)
    began_s = time.monotonic()
    async with pool.session("t") as session:
        with pytest.raises(SandboxQuotaError, match=r"within 0\.1 s.*account full"):
            await session.run("1")
    assert time.monotonic() - began_s < 1.0


async def test_the_wall_budget_bounds_a_create_that_hangs_and_a_queue_that_does_not_move():
    backend = FakeBackend(FaultScript(create_hangs=frozenset({1})))
    pool = SessionPool(backend, acquire_timeout_s=0.1, wait_timeout_s=0.1, max_alive=1)
    async with pool.session("t") as session:
        with pytest.raises(SandboxTimeoutError, match="not answered"):
            await session.run("1")
    async with pool.session("holder") as holder:
        await holder.run("1")
        async with pool.session("waiter") as waiter:
            with pytest.raises(SandboxTimeoutError, match="all places"):
                await waiter.run("1")
    await slow(pool, "after")  # neither took a place with it
    assert not backend.alive


@pytest.mark.parametrize("when_s", [0.0, 0.02, 0.06])
async def test_a_cancelled_trajectory_leaves_nothing(when_s: float):
    backend = FakeBackend(FaultScript(create_delay_s=0.04))
    pool = SessionPool(backend, max_alive=1)

    async def trajectory() -> None:
        async with pool.session("t") as session:
            await session.run("import time; time.sleep(0.05)")
            await asyncio.sleep(5)

    task = asyncio.create_task(trajectory())
    await asyncio.sleep(when_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not backend.alive
    await asyncio.wait_for(slow(pool, "next"), 2)
    await pool.aclose()


async def test_a_kill_survives_the_second_cancellation():
    backend = FakeBackend()
    original = backend.kill

    async def slow_kill(sandbox_id: str) -> bool:
        await asyncio.sleep(0.1)
        return await original(sandbox_id)

    backend.kill = slow_kill
    pool = SessionPool(backend)
    task = asyncio.create_task(slow(pool, "t", 5))
    while not backend.alive:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.alive  # the kill is still on its way
    await pool.aclose()
    assert not backend.alive


async def test_a_run_given_up_by_its_caller_ends_the_session():
    backend = FakeBackend()
    pool = SessionPool(backend)
    async with pool.session("t") as session:
        await session.run("x = 1")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run("while True: pass"), 0.05)
        with pytest.raises(SandboxUnavailableError, match="unknown"):
            await session.run("x")
    assert not backend.alive


async def test_runs_of_one_session_wait_for_each_other():
    async with SessionPool(FakeBackend()).session("t") as session:
        await session.run("log = []")
        code = "import time; log.append({0}); time.sleep(0.01); log.append({0})"
        await asyncio.gather(*(session.run(code.format(n)) for n in range(3)))
        assert (await session.run("log")).results == ("[0, 0, 1, 1, 2, 2]",)


async def test_aclose_kills_everything_and_voids_what_runs():
    backend = FakeBackend(FaultScript(create_delay_s=0.02))
    pool = SessionPool(backend, max_alive=8)
    results = []

    async def one(number: int) -> None:
        async with pool.session(f"t{number}") as session:
            try:
                await session.run("1")
                await session.run("import time; time.sleep(0.3)")
            except SandboxUnavailableError as error:
                results.append(str(error))

    tasks = [asyncio.create_task(one(number)) for number in range(12)]
    await asyncio.sleep(0.06)
    await pool.aclose()
    await pool.aclose()
    assert not backend.alive
    await asyncio.gather(*tasks)
    assert len(results) == 12
    with pytest.raises(SandboxUnavailableError, match="closed"):
        async with pool.session("late"):
            pass


async def test_a_kill_that_fails_is_tried_again_then_counted_and_noted(tmp_path: Path):
    faults = {number: SandboxUnavailableError("502") for number in (1, 3, 4, 5)}
    backend = FakeBackend(FaultScript(kill_errors=faults))
    ledger = SandboxLedger(tmp_path)
    pool = SessionPool(backend, ledger=ledger)
    await slow(pool, "a", 0)  # fails once, then works
    await slow(pool, "b", 0)  # fails three times
    totals = pool.metrics.totals()
    assert (totals["killed"], totals["kill_failed"], totals["left"]) == (1, 1, 1)
    ledger.close()
    assert read_left_ids(tmp_path) == list(backend.alive)
    noted = [json.loads(line)["event"] for line in ledger.path.read_text().splitlines()]
    assert noted == ["created", "killed", "created", "kill_failed"]


async def test_a_long_session_keeps_its_sandbox_alive():
    backend = FakeBackend()
    pool = SessionPool(backend, ttl_s=0.03)  # type: ignore[arg-type]
    async with pool.session("t") as session:
        await session.run("1")
        sandbox = backend.alive[session.sandbox_id or ""]
        await asyncio.sleep(0.08)
        assert sandbox.extended >= 2
    extended = sandbox.extended
    await asyncio.sleep(0.03)
    assert sandbox.extended == extended


# --- sandboxes made before they are asked for


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_sandbox_is_ready_when_the_first_call_comes_and_belongs_to_one_trajectory():
    backend = FakeBackend(FaultScript(create_delay_s=0.02))
    pool = SessionPool(backend, ahead=2, max_alive=5)
    async with pool.session("a") as a, pool.session("b") as b:
        await until(lambda: len(backend.alive) == 2)
        await a.run("x = 1")
        await b.run("x = 2")
        assert a.sandbox_id != b.sandbox_id
        assert (await a.run("x")).results == ("1",)
    assert (backend.creates, len(backend.alive)) == (2, 0), "two trajectories, two sandboxes"
    assert max(pool.metrics.report().durations["acquire_s"]) < 1


async def test_no_more_is_ready_than_there_are_trajectories_without_a_sandbox():
    backend = FakeBackend(FaultScript(answer=ok))
    pool = SessionPool(backend, ahead=5, max_alive=10)
    async with pool.session("a") as a:
        await until(lambda: backend.alive)
        await a.run("1")
        await asyncio.sleep(0.02)
        assert backend.creates == 1
    assert not backend.alive


async def test_what_was_made_for_a_trajectory_without_a_call_is_ended_with_it():
    backend = FakeBackend()
    pool = SessionPool(backend, ahead=1)
    async with pool.session("a"):
        await until(lambda: backend.alive)
    assert not backend.alive
    assert pool.metrics.left == 0


async def test_nothing_is_made_ahead_while_somebody_waits():
    backend = FakeBackend(FaultScript(answer=ok, max_alive=2))
    pool = SessionPool(backend, ahead=2, max_alive=2)
    await asyncio.gather(*(slow(pool, f"t{n}", 0.001) for n in range(40)))
    assert backend.creates == 40
    assert pool.metrics.report().summary()["retries"] == 0
    await pool.aclose()
    assert not backend.alive


async def test_a_create_ahead_that_fails_costs_nobody():
    backend = FakeBackend(FaultScript(create_errors={1: SandboxUnavailableError("502")}, answer=ok))
    pool = SessionPool(backend, ahead=1, max_alive=2, acquire_timeout_s=0.001)
    async with pool.session("a") as a:
        await until(lambda: backend.creates)
        await asyncio.sleep(0.01)
        assert (await a.run("fine")).stdout == "fine"
    await pool.aclose()
    assert not backend.alive


async def test_the_summary_is_flat_numbers():
    pool = SessionPool(FakeBackend())
    await slow(pool, "t", 0)
    summary = pool.metrics.report().summary()
    assert summary["created"] == summary["killed"] == 1.0
    assert all(type(value) is float for value in summary.values())
    assert summary["execute_s/p95"] > 0


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.95, 4.0), (0.0, 1.0), (1.0, 4.0), (0.25, 1.0)])
def test_percentile(share: float, value: float):
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value
    assert percentile([], share) == 0.0


async def test_a_pool_can_be_built_where_no_event_loop_runs():
    pool = await asyncio.to_thread(SessionPool, FakeBackend(), create_rate_per_s=5)
    await slow(pool, "t", 0)


async def test_limiter_leases_survive_cancellation_and_repeated_release():
    limiter = LocalLimiter(Limits(max_alive=1, max_starting=1))
    await limiter.acquire_start("a")
    waiting = asyncio.create_task(limiter.acquire_start("b"))
    also = asyncio.create_task(limiter.acquire_start("c"))
    await asyncio.sleep(0)
    await limiter.release("a")  # grants b ...
    waiting.cancel()  # ... in the moment in which b gives up
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await limiter.release("b")
    await asyncio.wait_for(also, 1)
    assert len(limiter.book.held) == 1
    await limiter.release("c")
    await limiter.release("c")
    await limiter.release("never held")
    assert len(limiter.book.held) == 0


async def test_a_lease_may_start_again_without_queueing_for_a_place():
    limiter = LocalLimiter(Limits(max_alive=1, max_starting=1))
    await limiter.acquire_start("a")
    await limiter.start_done("a")
    waiting = asyncio.create_task(limiter.acquire_start("b"))
    await asyncio.sleep(0)
    await asyncio.wait_for(limiter.acquire_start("a"), 1)
    assert not waiting.done()
    await limiter.release("a")
    await asyncio.wait_for(waiting, 1)


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Limits(max_alive=0, max_starting=1)


async def test_random_faults_leave_nothing():
    """Many trajectories over a service that fails at every turn: all end, and nothing lives on."""
    ticks = itertools.count(1)
    kinds: tuple[Callable[[str], Exception], ...] = (SandboxQuotaError, SandboxUnavailableError, SandboxTimeoutError)
    script = FaultScript(
        create_delay_s=0.001,
        create_errors={n: kinds[n % 3]("scripted") for n in range(1, 2000) if n % 4 == 3},
        run_errors={n: kinds[n % 3]("scripted") for n in range(1, 2000) if n % 5 == 0},
        kill_errors={n: SandboxUnavailableError("scripted") for n in range(1, 2000) if n % 7 == 0},
        answer=ok,
        max_alive=6,
    )
    backend = FakeBackend(script)
    pool = SessionPool(backend, max_alive=6, max_starting=2, acquire_timeout_s=10)

    async def one(number: int) -> str:
        async with pool.session(f"t{number}") as session:
            try:
                for _ in range(3):
                    await session.run(str(next(ticks)))
            except SandboxUnavailableError:
                return "masked"
            except (SandboxQuotaError, SandboxTimeoutError):
                return "masked"
            return "done"

    outcomes = await asyncio.gather(*(one(number) for number in range(60)))
    await pool.aclose()
    assert set(outcomes) == {"masked", "done"}
    assert not backend.alive
    assert backend.peak_alive <= 6
