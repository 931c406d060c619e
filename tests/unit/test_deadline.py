"""verl_ext.agent_loop.deadline: the trajectory's clock stands still while it waits, the step's never does."""

from __future__ import annotations

import asyncio
import time

import pytest

from verl_ext.agent_loop.deadline import Deadline

NEVER = float("inf")


async def test_without_deadlines_nothing_happens():
    async with Deadline(NEVER, NEVER) as deadline:
        await asyncio.sleep(0.01)
    assert not deadline.expired


async def test_the_trajectorys_passes():
    deadline = Deadline(0.02, NEVER)
    with pytest.raises(TimeoutError):
        async with deadline:
            await asyncio.sleep(5)
    assert deadline.expired
    assert deadline.passed == "the trajectory"


async def test_the_steps_passes():
    deadline = Deadline(100, time.monotonic() + 0.02)
    with pytest.raises(TimeoutError):
        async with deadline:
            await asyncio.sleep(5)
    assert deadline.passed == "the step"


async def test_a_call_is_not_cut_by_the_trajectorys_deadline_and_its_wait_does_not_count():
    async with Deadline(0.05, NEVER) as deadline:
        with deadline.only_the_steps():
            await asyncio.sleep(0.1)
        deadline.put_off(0.1)  # all of it was waiting
        await asyncio.sleep(0.01)


async def test_the_time_of_a_call_that_did_not_wait_counts_once_it_is_over():
    deadline = Deadline(0.05, NEVER)

    async def call_and_go_on() -> None:
        async with deadline:
            with deadline.only_the_steps():
                await asyncio.sleep(0.1)
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await call_and_go_on()


async def test_a_call_is_cut_by_the_steps_deadline():
    deadline = Deadline(100, time.monotonic() + 0.03)

    async def call() -> None:
        async with deadline, asyncio.timeout(100):
            with deadline.only_the_steps():
                await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await call()
    assert deadline.passed == "the step"


async def test_a_time_out_of_something_else_is_not_the_deadlines():
    deadline = Deadline(100, NEVER)
    with pytest.raises(TimeoutError):
        async with deadline:
            raise TimeoutError
    assert not deadline.expired
