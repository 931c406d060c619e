"""Whether Ray's control store (the head's gcs_server) still answers, and when a run that lost it ends.

Ray 2.49.2 aborts a process that has asked its control store in vain for 60 s (gcs_rpc_server_reconnect_timeout_s), with
SIGABRT: its last words would be Ray's, and nothing would be put away. So the run ends before, in order.

Covered: nobody listens at the store's address, or the way there is cut. Not covered: a store that hangs, whose port the
system still answers for; there Ray's own limit holds.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from verl_ext.errors import TrainingDiedError

# The name is Ray's own, with which every one of its processes can be told another limit. KubeRay gives its workers
# 600 where Redis keeps the store's content: a head may be away for so long there, and a run must bear it as Ray does.
RAYS_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAYS_LIMIT_S = 60.0  # ray 2.49.2 src/ray/common/ray_config_def.h
# Of Ray's limit, 40 s of 60: leaving Ray took 1 to 4 s without a store, after which nothing aborts any more.
PATIENCE = 2 / 3
SAID_AFTER_S = 5.0
CONNECT_TIMEOUT_S = 1.0
CURE = (
    "the head, or its process gcs_server, is dead or cut off. On a cluster start Ray anew (`invoke cluster-head`, then "
    "`invoke cluster-join` on the other nodes); `invoke train --resume`, on a cluster `invoke launch --resume=RUN`, "
    "goes on with a training"
)


class Beside[T]:
    """A question asked in a thread of its own, since it may block for longer than the asker can wait.

    Args:
        ask: the question. It is never under way twice.
    """

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._under_way: Future[T] | None = None

    def answer(self, within_s: float) -> T | None:
        """What it gives or raises, once; None while there is no answer, for which the next call waits on."""
        if self._under_way is None:
            self._under_way = Future()
            # Not a pool's thread: the interpreter would wait for it in the end.
            threading.Thread(target=self._work, args=(self._under_way,), name="beside", daemon=True).start()
        done, _ = wait([self._under_way], within_s)
        if not done:
            return None
        answered, self._under_way = self._under_way, None
        return answered.result()

    def _work(self, told: Future[T]) -> None:
        try:
            told.set_result(self._ask())
        except BaseException as error:  # noqa: BLE001 - handed to the asker
            told.set_exception(error)


def answers(address: str) -> bool:
    """Whether somebody accepts connections there; within `CONNECT_TIMEOUT_S`, but for the resolving of a name.

    Args:
        address: host:port.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
        return True
    return False


def patience_s(rays_limit: str | None) -> float:
    """Seconds of silence after which a run ends.

    Args:
        rays_limit: what `RAYS_LIMIT` says in this process's environment, None if nothing.
    """
    with contextlib.suppress(ValueError):
        return PATIENCE * float(rays_limit or RAYS_LIMIT_S)
    return PATIENCE * RAYS_LIMIT_S


class ControlStore:
    """The store of one run, looked at again and again.

    Args:
        address: host:port.
        say: takes a line when the store has gone silent, and when it is back.
        limit_s: see `patience_s`.
        clock: monotonic seconds.
    """

    def __init__(
        self, address: str, say: Callable[[str], None], limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = address
        self._say = say
        self._limit_s = limit_s
        self._clock = clock
        self._connects = Beside(lambda: answers(address))
        self._silent_since_s: float | None = None
        self._said = False

    @property
    def silence(self) -> str:
        """How long it has been silent, in words; "" if it is not."""
        if self._silent_since_s is None:
            return ""
        return (
            f"Ray's control store at {self.address} has not answered for {self._clock() - self._silent_since_s:.0f} s"
        )

    def look(self) -> bool:
        """Whether it answers now.

        Raises:
            TrainingDiedError: it has not for `limit_s`.
        """
        asked_s = self._clock()
        if self._connects.answer(CONNECT_TIMEOUT_S + 0.5):
            if self._said and self._silent_since_s is not None:
                self._say(f"Ray's control store answers again, after {self._clock() - self._silent_since_s:.0f} s")
            self._silent_since_s, self._said = None, False
            return True
        self._silent_since_s = asked_s if self._silent_since_s is None else self._silent_since_s
        silent_s = self._clock() - self._silent_since_s
        if silent_s >= self._limit_s:
            raise TrainingDiedError(f"{self.silence}: {CURE}")
        if silent_s >= SAID_AFTER_S and not self._said:
            self._said = True
            self._say(f"{self.silence}; the run waits for it, and ends after {self._limit_s:.0f} s")
        return False
