"""The account's limits, probed gently: sandboxes at once, requests per second, and how late places come back.

Each probe has a bound that the user states, and stops at the first refusal. What lies above the bound is not
tried, since it would cost what the bound is there to bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_ext.check.findings import FAILED, OK, SKIPPED, WARNING, Finding
from verl_ext.errors import SandboxError, SandboxQuotaError
from verl_ext.sandbox.interface import Sandbox, SandboxBackend

TTL_S = 120
_CREATES_AT_ONCE = 4
_CREATES_PER_S = 4.0
_RETRY_S = 1.0


@dataclass
class Filled:
    """An account filled as far as it goes, or as far as was allowed.

    Attributes:
        alive: the sandboxes, to be looked at and then ended.
        create_s: seconds that each create took.
        refused: why there are no more; None at the bound.
    """

    alive: list[Sandbox] = field(default_factory=list)
    create_s: list[float] = field(default_factory=list)
    refused: SandboxError | None = None


async def fill(backend: SandboxBackend, labels: Mapping[str, str], bound: int) -> Filled:
    """Create up to `bound` sandboxes, a few at a time, until one is refused.

    Comes before anything is killed: what was killed a moment ago may still take places.
    """
    filled = Filled()
    gate = asyncio.Semaphore(_CREATES_AT_ONCE)

    async def create(number: int) -> None:
        await asyncio.sleep(number / _CREATES_PER_S)
        async with gate:
            if filled.refused is not None:
                return
            began_s = time.monotonic()
            try:
                filled.alive.append(await backend.create(labels=labels, ttl_s=TTL_S))
                filled.create_s.append(time.monotonic() - began_s)
            except SandboxError as error:
                filled.refused = filled.refused or error

    await asyncio.gather(*(create(number) for number in range(max(1, bound))))
    return filled


def check_concurrency(filled: Filled) -> Finding:
    """How many sandboxes were alive at once."""
    count, refused = len(filled.alive), filled.refused
    numbers = {"max_alive": float(count)}
    if refused is None:
        text = f"{count} at once, as many as were tried; --max-probe N tries more"
        return Finding("sandboxes at once", OK, text, numbers)
    if not isinstance(refused, SandboxQuotaError) or not count:
        return Finding("sandboxes at once", WARNING if count else FAILED, f"{count} at once, then: {refused}", numbers)
    return Finding("sandboxes at once", OK, f"{count} at once, the next is refused", numbers | {"is_cap": 1.0})


async def check_release(
    backend: SandboxBackend, labels: Mapping[str, str], filled: Filled, wait_s: float = 20.0
) -> Finding:
    """How soon a killed sandbox's place is free, on an account that is full."""
    if not isinstance(filled.refused, SandboxQuotaError):
        return Finding("places come back", SKIPPED, "the account was not full")
    return await _release(backend, labels, filled.alive, wait_s)


async def _release(backend: SandboxBackend, labels: Mapping[str, str], alive: list[Sandbox], wait_s: float) -> Finding:
    if not alive:
        return Finding("places come back", SKIPPED, "no sandbox could be made")
    await backend.kill(alive.pop().sandbox_id)
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < wait_s:
        try:
            alive.append(await backend.create(labels=labels, ttl_s=TTL_S))
        except SandboxError:
            await asyncio.sleep(_RETRY_S)
            continue
        text = (
            f"a killed sandbox's place is free within {waited_s + _RETRY_S:.0f} s" if waited_s > _RETRY_S else "at once"
        )
        return Finding("places come back", OK, text, {"quota_release_s": waited_s})
    text = f"not within {wait_s:.0f} s: set VERL_EXT_SANDBOX_QUOTA_RELEASE_S (AGS is reported to take up to 300 s)"
    return Finding("places come back", WARNING, text, {"quota_release_s": wait_s, "is_longer": 1.0})


async def check_rate(backend: SandboxBackend, labels: Mapping[str, str], bound: int, seconds: float = 2.0) -> Finding:
    """Whether `bound` requests a second are taken, by listing; nothing is created."""
    if bound < 1:
        return Finding("requests", SKIPPED, "not probed: --max-rate 0")
    taken = refused = 0

    async def one(number: int) -> None:
        nonlocal taken, refused
        await asyncio.sleep(number / bound)
        if refused:
            return
        try:
            await backend.list_ids(labels=labels)
            taken += 1
        except SandboxQuotaError:
            refused += 1
        except SandboxError:
            return

    began_s = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(int(bound * seconds))))
    rate = taken / max(seconds, time.monotonic() - began_s)
    if refused:
        return Finding(
            "requests", OK, f"about {rate:.0f} a second, then refused", {"requests_per_s": rate, "is_cap": 1.0}
        )
    return Finding("requests", OK, f"{rate:.0f} a second were taken; {bound} were tried", {"requests_per_s": rate})
