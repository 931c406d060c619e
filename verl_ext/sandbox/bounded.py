"""Calls with a deadline that holds whatever the called code does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class BoundedCalls:
    """Runs calls as tasks of their own and looks after those that are given up.

    `asyncio.wait_for` waits until a cancelled call has taken its cancellation; a library that swallows it, or
    closes a connection at leisure, would stretch every deadline. Here the caller goes on at once.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def within(self, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Result of `call`.

        Raises:
            TimeoutError: `timeout_s` passed; the call is cancelled and left to itself.
        """
        task = self.start(call)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise TimeoutError
        return task.result()

    def start(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """`call` as a task that is kept until it is done; its error, if nobody asks, goes to the debug log."""
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Not its text: a service may echo a key, and only the caller knows the key to blank it.
            logger.debug("a call ended with %s", type(error).__name__)

    async def settle(self, timeout_s: float) -> None:
        """Wait for all calls, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
