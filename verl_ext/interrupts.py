"""SIGTERM and Ctrl-C as an exception, so that every `finally` runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived; `signum` says which. Not an Exception, so nothing swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


_armed = False
_deferred = False
_arrived: int | None = None


def _interrupt(signum: int, _: FrameType | None) -> None:
    global _arrived
    # A second Ctrl-C must not break the cleaning up that the first one began.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    _arrived = signum
    if not _deferred:
        raise Interrupted(signum)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal is only noted, for `check` to raise: Ray's compiled calls turn an exception into a crash."""
    global _deferred
    _deferred = True
    try:
        yield
    finally:
        _deferred = False
    check()


def check() -> None:
    """Raise `Interrupted` if a signal has arrived."""
    global _arrived
    if _arrived is not None:
        signum, _arrived = _arrived, None
        raise Interrupted(signum)


def rearm() -> None:
    """Take the signals back from a library that took them; `ray.init` does. Nothing outside `interruptible`."""
    if _armed and _arrived is None:
        for each in SIGNALS:
            signal.signal(each, _interrupt)


async def until_signal[T](work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; the first SIGTERM or SIGINT cancels it, lets it clean up, and raises `Interrupted`.

    For event loops: an exception out of a signal handler would end up in whichever task or callback runs.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    arrived: list[int] = []

    def stop(signum: int) -> None:
        if not arrived:  # a second Ctrl-C must not break the cleaning up that the first one began
            arrived.append(signum)
            task.cancel()

    for each in SIGNALS:
        loop.add_signal_handler(each, stop, each)
    try:
        return await task
    except asyncio.CancelledError:
        if arrived:
            raise Interrupted(arrived[0]) from None
        raise
    finally:
        for each in SIGNALS:
            loop.remove_signal_handler(each)
        rearm()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first SIGTERM or SIGINT raises `Interrupted`; further ones change nothing."""
    global _armed, _arrived
    before = {each: signal.getsignal(each) for each in SIGNALS}
    _armed, _arrived = True, None
    rearm()
    try:
        yield
    finally:
        _armed = False
        for each, handler in before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
