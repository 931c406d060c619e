"""What goes wrong in a worker of the engine reaches the engine, and its words reach the user.

A worker is asked for these by its trainer; it imports this module for them, so it is light.
"""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace
from typing import Any

WORKER_MODULE = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd"


def answer_every_error(_: Any) -> None:
    """Let a worker tell the engine also of an error that does not pickle, by its text, and remember what it told.

    verl 0.6.1's worker answers the engine with the error itself (vllm_rollout_spmd.py, _loop_forever). Torch's when it
    compiles hold a frame, which no pickle takes: the worker's loop ends without an answer, and the engine waits for
    ever.
    """
    module: Any = sys.modules.get(WORKER_MODULE)
    if module is None or isinstance(module.pickle, SimpleNamespace):
        return
    theirs = module.pickle

    def dumps(answer: Any) -> bytes:
        if not isinstance(answer, Exception):
            return theirs.dumps(answer)
        first, *_ = [*str(answer).strip().splitlines(), "no message"]
        module.last_error = f"{type(answer).__name__}: {first}"
        try:
            return theirs.dumps(answer)
        except Exception:  # noqa: BLE001 - whatever pickling says
            return theirs.dumps(RuntimeError("".join(traceback.format_exception(answer))))

    module.pickle = SimpleNamespace(dumps=dumps, loads=theirs.loads)


def last_error(_: Any) -> str:
    """What a worker last answered the engine with as an error, or ""."""
    return getattr(sys.modules.get(WORKER_MODULE), "last_error", "")
