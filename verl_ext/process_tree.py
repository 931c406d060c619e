"""Every process of a run ends with it, also those whose own parent died first."""

from __future__ import annotations

import contextlib
import ctypes

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE_S = 5.0


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies.

    vLLM's engine is a child of a Ray worker; when Ray kills that worker, the engine would live on under init,
    where nobody finds it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
