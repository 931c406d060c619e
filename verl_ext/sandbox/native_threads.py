"""The SDK's transport ends its requests in threads of its own; a process must not end under one of them.

Symptom without this: a process that did all its work and printed its result ends with SIGABRT or SIGSEGV (exit
status 134 or 139), some three times in a hundred on a busy machine. A thread of pyqwest's runtime hands a result to
the event loop, the main thread takes it and ends, and the thread, which waits for the interpreter's lock meanwhile,
is thrown out by `pthread_exit` through frames of Rust. pyqwest mended its own part; what the interpreter does up to
Python 3.13 it cannot mend.

Upstream: github.com/curioswitch/pyqwest/issues/164, github.com/PyO3/pyo3/pull/4874. No longer needed on Python 3.14
(tests/contract/test_native_threads.py fails then).
"""

from __future__ import annotations

import atexit
import sys
import threading
import time

_WAIT_AT_MOST_S = 5.0
_LOOK_EVERY_S = 0.002
_QUIET_LOOKS = 3  # a thread that has no Python frame yet takes the lock in one of these pauses, and then it has one


def wait_for_native_threads() -> None:
    """Return once no thread that Python did not start runs Python code; after 5 s in any case.

    Takes 6 ms when there is none. Every pause gives up the interpreter's lock, which is what such a thread waits for.
    """
    until = time.monotonic() + _WAIT_AT_MOST_S
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        quiet = 0 if _native_threads_in_python() else quiet + 1


def _native_threads_in_python() -> set[int]:
    # `threading.current_thread()` in a thread of another runtime leaves a dummy entry behind: not one of Python's.
    started_by_python = {
        thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }
    return set(sys._current_frames()) - started_by_python


def wait_before_the_interpreter_ends() -> None:
    """Have `wait_for_native_threads` run when this process ends; calling it again changes nothing."""
    atexit.unregister(wait_for_native_threads)
    atexit.register(wait_for_native_threads)
