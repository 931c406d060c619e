"""The two deadlines of a trajectory: its own, whose clock stands still while it waits, and its step's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from types import TracebackType


class Deadline:
    """An asynchronous context that raises TimeoutError when one of its deadlines passes.

    Args:
        timeout_s: the trajectory's, in seconds from entering; infinity for none.
        step_ends_s: the step's, as `time.monotonic` has it; infinity for none.

    Attributes:
        passed: "the trajectory" or "the step", once one has passed.
    """

    def __init__(self, timeout_s: float, step_ends_s: float) -> None:
        self._step_ends_s = step_ends_s
        self._ends_s = time.monotonic() + timeout_s
        self._timeout = asyncio.timeout(None)
        self.passed = ""

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        self._set(min(self._ends_s, self._step_ends_s))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.passed = "the step" if time.monotonic() >= self._step_ends_s else "the trajectory"
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        """Whether one has passed and ended the block."""
        return self._timeout.expired()

    @contextlib.contextmanager
    def only_the_steps(self) -> Iterator[None]:
        """Let the trajectory's own deadline rest: a call has a deadline itself, and may have to wait before it."""
        self._set(self._step_ends_s)
        try:
            yield
        finally:
            self._set(min(self._ends_s, self._step_ends_s))

    def put_off(self, seconds: float) -> None:
        """Move the trajectory's own deadline, by what was spent waiting."""
        self._ends_s += seconds
        self._set(min(self._ends_s, self._step_ends_s))

    def _set(self, when_s: float) -> None:
        if self._timeout.expired():
            return
        loop = asyncio.get_running_loop()
        left_s = when_s - time.monotonic()
        self._timeout.reschedule(None if left_s == float("inf") else loop.time() + left_s)
