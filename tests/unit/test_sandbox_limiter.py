"""verl_ext.sandbox.limiter: who may start a sandbox, when, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from verl_ext.errors import SandboxUnavailableError
from verl_ext.sandbox import limiter
from verl_ext.sandbox.limiter import LeaseBook, Limits

FAST = Limits(max_alive=100, max_starting=100)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter, "REFUSED_BASE_S", 0.02)
    monkeypatch.setattr(limiter, "REFUSED_CAP_S", 0.08)


async def ask(book: LeaseBook, *leases: str, owner: str = "") -> list[asyncio.Task[None]]:
    """A waiting task for each lease, in order."""
    tasks = [asyncio.create_task(book.acquire_start(lease, owner)) for lease in leases]
    await asyncio.sleep(0)
    return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_alive_counts_until_release_and_starting_until_done():
    book = LeaseBook(Limits(max_alive=2, max_starting=1))
    a, b, c = await ask(book, "a", "b", "c")
    await settle()
    assert (a.done(), b.done(), c.done()) == (True, False, False), "one start at a time"
    book.start_done("a")
    await settle()
    assert (b.done(), c.done()) == (True, False)
    book.start_done("b")
    await settle()
    assert not c.done(), "two are alive"
    book.release("a")
    await asyncio.wait_for(c, 1)
    assert set(book.held) == {"b", "c"}


async def test_first_come_first_served_within_an_owner_and_least_served_first_between_them():
    book = LeaseBook(Limits(max_alive=3, max_starting=3))
    order: list[str] = []

    async def one(lease: str, owner: str) -> None:
        await book.acquire_start(lease, owner)
        book.start_done(lease)
        order.append(lease)

    tasks = [asyncio.create_task(one(f"a{n}", "a")) for n in range(6)]
    await settle()
    tasks += [asyncio.create_task(one(f"b{n}", "b")) for n in range(3)]
    await settle()
    assert order == ["a0", "a1", "a2"]
    for lease in ("a0", "a1", "a2", "b0"):
        book.release(lease)
        await settle()
    assert order[3:] == ["b0", "a3", "a4", "b1"], "b had none; then both had one, and a3 came first; ..."
    for lease in list(order[3:]):
        book.release(lease)
        await settle()
    await asyncio.gather(*tasks)
    assert [lease for lease in order if lease[0] == "a"] == [f"a{n}" for n in range(6)]


async def test_a_retry_keeps_its_place_and_goes_before_those_who_wait_for_one():
    book = LeaseBook(Limits(max_alive=2, max_starting=1))
    await book.acquire_start("a")
    (waiting,) = await ask(book, "b")
    book.start_done("a", succeeded=False)
    await settle()
    assert waiting.done()
    (again,) = await ask(book, "a")
    (later,) = await ask(book, "c")
    book.start_done("b")
    await asyncio.wait_for(again, 1)
    assert not later.done()
    later.cancel()


async def test_with_reserved_places_the_first_owner_cannot_take_all():
    book = LeaseBook(Limits(max_alive=5, max_starting=5, reserved_for=2))
    early = await ask(book, *(f"a{n}" for n in range(5)), owner="a")
    await settle()
    assert sum(task.done() for task in early) == 3, "two of its own, and the one that nobody can count on"
    late = await ask(book, "b0", "b1", "b2", owner="b")
    await settle()
    assert [task.done() for task in late] == [True, True, False]
    book.release("a0")
    await settle()
    assert sum(task.done() for task in early) == 4, "beyond what is reserved: who came first"
    for lease in ("a1", "a2"):
        book.release(lease)
        await settle()
    assert all(task.done() for task in [*early, *late]), "what is not needed for the share is everybody's"
    for task in [*early, *late]:
        task.cancel()


async def test_the_create_rate_spaces_starts_evenly():
    book = LeaseBook(Limits(max_alive=100, max_starting=100, create_rate_per_s=200))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.gather(*(book.acquire_start(str(n)) for n in range(21)))
    assert loop.time() - began_s >= 0.1


async def test_after_a_refusal_one_alone_tries_and_a_success_opens_the_gate():
    book = LeaseBook(FAST)
    await book.acquire_start("a")
    book.start_done("a", refused=True)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    tasks = await ask(book, "a", "b", "c", "d")
    await settle()
    assert not any(task.done() for task in tasks), "nothing starts during the pause"
    await asyncio.wait_for(tasks[0], 2)
    assert loop.time() - began_s >= 0.009
    await settle()
    assert [task.done() for task in tasks] == [True, False, False, False], "one alone tries"
    book.start_done("a")
    await asyncio.wait_for(asyncio.gather(*tasks), 2)


async def test_refusals_in_a_row_lengthen_the_pause_up_to_a_cap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limiter.random, "uniform", lambda low, high: high)
    book = LeaseBook(FAST)
    loop = asyncio.get_running_loop()
    pauses = []
    await book.acquire_start("a")
    for _ in range(5):
        book.start_done("a", refused=True)
        pauses.append(round(book._paused_until_s - loop.time(), 2))
        await book.acquire_start("a")
    assert pauses == [0.02, 0.04, 0.08, 0.08, 0.08]


async def test_a_place_given_back_counts_as_long_as_the_account_counts_it():
    book = LeaseBook(Limits(max_alive=1, max_starting=1, quota_release_s=0.05))
    await book.acquire_start("a")
    book.start_done("a")
    book.release("a")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.wait_for(book.acquire_start("b"), 2)
    assert loop.time() - began_s >= 0.045


async def test_nothing_is_tried_ahead_of_those_who_wait():
    book = LeaseBook(Limits(max_alive=2, max_starting=1))
    assert book.try_start("a")
    assert not book.try_start("b"), "one start at a time"
    (waiting,) = await ask(book, "c")
    book.start_done("a")
    await settle()
    assert waiting.done()
    assert not book.try_start("d"), "no place"
    assert set(book.held) == {"a", "c"}


async def test_a_lease_released_while_it_waits_is_told_and_takes_nothing():
    book = LeaseBook(Limits(max_alive=1, max_starting=1))
    await book.acquire_start("a")
    (waiting,) = await ask(book, "b")
    book.release("b")
    with pytest.raises(SandboxUnavailableError, match="given back"):
        await waiting
    book.release("a")
    assert (book.held, book.waiting) == ({}, 0)


async def test_an_owner_that_is_gone_holds_and_waits_no_more():
    book = LeaseBook(Limits(max_alive=2, max_starting=2))
    await book.acquire_start("a0", "a")
    await book.acquire_start("b0", "b")
    (dead,) = await ask(book, "a1", owner="a")
    (alive,) = await ask(book, "b1", owner="b")
    assert book.release_owner("a") == ["a0"]
    with pytest.raises(SandboxUnavailableError):
        await dead
    await asyncio.wait_for(alive, 1)
    assert set(book.held.values()) == {"b"}


async def test_asking_twice_for_one_start_is_one_start():
    book = LeaseBook(Limits(max_alive=1, max_starting=1))
    await book.acquire_start("a")
    await asyncio.wait_for(book.acquire_start("a"), 1)
    assert set(book.starting) == {"a"}


async def test_random_lives_never_break_the_limits():
    """Many leases come, wait, are cancelled, start, fail and end in an order that nobody planned."""
    import random

    chance = random.Random(7)
    book = LeaseBook(Limits(max_alive=5, max_starting=2))
    worst = [0, 0]

    async def life(number: int) -> None:
        lease = f"l{number}"
        try:
            async with asyncio.timeout(chance.choice([0.001, 1.0, 1.0])):
                for _ in range(chance.randint(1, 3)):
                    await book.acquire_start(lease, f"w{number % 3}")
                    worst[0] = max(worst[0], len(book.held))
                    worst[1] = max(worst[1], len(book.starting))
                    await asyncio.sleep(0)
                    book.start_done(lease, refused=chance.random() < 0.02)
        except TimeoutError:
            pass
        finally:
            book.release(lease)

    await asyncio.gather(*(life(number) for number in range(300)))
    assert worst[0] <= 5
    assert worst[1] <= 2
    assert (book.held, book.starting, book.waiting) == ({}, set(), 0)
