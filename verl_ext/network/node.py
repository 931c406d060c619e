"""What runs on each node. Needs no Ray: the check of one machine uses it in this process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.gpus import visible_gpus
from verl_ext.network.interfaces import Interface, interfaces, variable
from verl_ext.settings import foreign

CONNECT_TIMEOUT_S = 5.0
ECHOES = 10
_BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself.

    Attributes:
        address: the one that the cluster knows it by.
        interfaces: all of them.
        variables: those that choose an interface, as they are set on this node.
        hostname_address: what the host's name resolves to here, "" if to nothing; gloo takes it if nothing is set.
        gpus: that its ranks may use and that are there.
    """

    address: str
    hostname: str
    interfaces: tuple[Interface, ...]
    variables: Mapping[str, str]
    hostname_address: str
    gpus: int

    def __str__(self) -> str:
        return self.address if self.hostname in ("", self.address) else f"{self.address} ({self.hostname})"


@dataclass(frozen=True)
class RankPlan:
    """What the ranks of a check do.

    Attributes:
        backend: nccl or gloo.
        master: address of rank 0's node.
        port: free there.
        first_rank, ranks: those of this node.
        world: all ranks.
        pairs: which are timed, in this order.
        timeout_s: for all of it; a rank that is not done by then is ended.
    """

    backend: str
    master: str
    port: int
    first_rank: int
    ranks: int
    world: int
    pairs: tuple[tuple[int, int], ...]
    timeout_s: float


@dataclass(frozen=True)
class RankOutcome:
    """What became of a rank.

    Attributes:
        events: what it reported, in order (probe.py).
        ended: exit status, None if it was ended at the deadline.
        words: the last lines of its standard error.
    """

    rank: int
    events: tuple[dict[str, Any], ...]
    ended: int | None
    words: str

    def has(self, kind: str) -> bool:
        """Whether it came as far as an event of this kind."""
        return any(event["event"] == kind for event in self.events)


class NodeAgent:
    """One node's part.

    Args:
        address: the one that the cluster knows this node by.
        gpus: that its ranks may use, 0 for ranks on the CPU.
    """

    def __init__(self, address: str, gpus: int) -> None:
        self._address = address
        self._gpus = gpus
        self._listener: socket.socket | None = None
        self._ranks: list[_Rank] = []

    def describe(self) -> NodeFacts:
        """What this node is."""
        name = socket.gethostname()
        resolved = ""
        with contextlib.suppress(OSError):
            resolved = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        found = {variable(backend): foreign(variable(backend)) or "" for backend in _BACKENDS}
        # The cluster may count GPUs that are not there: a node without any is told to lend one for training in small.
        gpus = min(self._gpus, len(visible_gpus())) if self._gpus else 0
        return NodeFacts(self._address, name, interfaces(), found, resolved, gpus)

    def listen(self) -> int:
        """Answer every byte on a free port of this node until `close`; the port."""
        self._listener = socket.create_server((self._address, 0), backlog=1024)
        threading.Thread(target=_echo_all, args=(self._listener,), daemon=True).start()
        return self._listener.getsockname()[1]

    def reach(self, ports: Mapping[str, int]) -> dict[str, float | str]:
        """Try the others' ports: by address, milliseconds there and back, or why it cannot be reached."""
        found: dict[str, float | str] = {}

        def try_one(address: str, port: int) -> None:
            found[address] = _round_trip_ms(address, port)

        threads = [threading.Thread(target=try_one, args=entry) for entry in ports.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def free_port(self) -> int:
        """A port of this node that nobody has at the moment."""
        with socket.create_server((self._address, 0)) as server:
            return server.getsockname()[1]

    def run_ranks(self, plan: RankPlan) -> list[RankOutcome]:
        """Start this node's ranks, and end those that are not done in time."""
        deadline_s = time.monotonic() + plan.timeout_s
        try:
            for index in range(plan.ranks):
                self._ranks.append(_Rank(plan, index))
            return [rank.outcome(deadline_s) for rank in self._ranks]
        finally:
            self.close()

    def close(self) -> None:
        """End the ranks, and listen no longer."""
        for rank in self._ranks:
            rank.kill()
        if self._listener:
            self._listener.close()


class _Rank:
    """A process of one rank."""

    def __init__(self, plan: RankPlan, index: int) -> None:
        self.rank = plan.first_rank + index
        specification = {
            "backend": plan.backend,
            "master": plan.master,
            "port": plan.port,
            "rank": self.rank,
            "local_rank": index,
            "world": plan.world,
            "pairs": plan.pairs,
            "timeout_s": plan.timeout_s,
        }
        root = Path(__file__).resolve().parents[2]  # that holds verl_ext, wherever Ray unpacked it
        import_path = os.pathsep.join(filter(None, [str(root), foreign("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl_ext.network.probe", json.dumps(specification)],
            stdin=subprocess.PIPE,  # closes when this process dies, and the rank with it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"},  # noqa: TID251 - handed on
        )
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._events: list[dict[str, Any]] = []
        self._readers = [threading.Thread(target=self._read_events), threading.Thread(target=self._read_words)]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self._process.stdout  # noqa: S101 - asked for
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a library that prints
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    self._events.append(event)

    def _read_words(self) -> None:
        assert self._process.stderr  # noqa: S101 - asked for
        for line in self._process.stderr:
            self._words.put(line)

    def outcome(self, deadline_s: float) -> RankOutcome:
        """Wait until it is done, or the deadline."""
        ended: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = self._process.wait(max(0.0, deadline_s - time.monotonic()))
        self.kill()
        for reader in self._readers:
            reader.join()
        words = [self._words.get() for _ in range(self._words.qsize())]
        return RankOutcome(self.rank, tuple(self._events), ended, "".join(words[-12:]))

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()


def _echo_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while received := connection.recv(64):
            connection.sendall(received)


def _round_trip_ms(address: str, port: int) -> float | str:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return statistics.median(_echo_time_ms(connection) for _ in range(ECHOES))
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _echo_time_ms(connection: socket.socket) -> float:
    start_s = time.perf_counter()
    connection.sendall(b"?")
    if not connection.recv(1):
        raise OSError("closed by the other side")
    return (time.perf_counter() - start_s) * 1000


def split_ranks(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """First rank and number of ranks of each node: one a GPU, or one where there are none."""
    found, first = [], 0
    for number in gpus:
        ranks = max(number, 1)
        found.append((first, ranks))
        first += ranks
    return found
