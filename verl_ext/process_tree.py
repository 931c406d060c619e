"""Every process of a run ends with it, also those whose own parent died first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE_S = 5.0
_LOOK_EVERY_S = 1.0


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies.

    vLLM's engine is a child of a Ray worker; when Ray kills that worker, the engine would live on under init,
    where nobody finds it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(pid: int) -> None:
    """Let this process be killed when another one ends, whatever ends that.

    For vLLM's engine, whose parent is a fork server: when the server that it works for is killed, it would go on
    holding the GPU's memory, on another node of a cluster for good.
    """

    def wait() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            other = psutil.Process(pid)
            while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name=f"end with {pid}", daemon=True).start()


def end_descendants(spare: int = 0) -> int:
    """End every descendant of this process: first asked, then killed; returns how many there were.

    Args:
        spare: process id of a child to leave alone, with its own descendants.
    """
    spared = {spare}
    with contextlib.suppress(psutil.NoSuchProcess):
        if spare:
            spared |= {child.pid for child in psutil.Process(spare).children(recursive=True)}
    found = [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]
    for child in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, alive = psutil.wait_procs(found, timeout=GRACE_S)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return len(found)
