"""One rank of the check, as a process of its own, so that a hang can be ended: `python -m verl_ext.network.probe SPEC`.

Each line that it prints is an event, as JSON:

    {"event": "joined"}                                            all ranks have found each other
    {"event": "pair", "from": 0, "to": 1, "latency_s": ..., "bytes": ..., "seconds": ...}       by the lower rank, twice
    {"event": "all_reduce", "bytes": ..., "seconds": ..., "right": true}                         by rank 0, by size
    {"event": "failed", "doing": "...", "error": "..."}
    {"event": "done"}
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PINGS = 20
# A transfer is made larger until it takes this long, so that a slow link is timed in a second and a fast one at all.
ENOUGH_S = 0.2
FIRST_BYTES, MOST_BYTES = 1 << 20, 256 << 20


def say(event: str, **values: Any) -> None:
    """Print an event."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class Rank:
    """This rank among the others.

    Args:
        rank: of this process.
        device: that NCCL or gloo moves memory of.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)

    def numbers(self, *values: int) -> torch.Tensor:
        """Whole numbers, to be sent."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def settle(self) -> None:
        """Wait until what was sent has left: NCCL only queues it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_pair(self, first: int, second: int) -> None:
        """Time both directions between two ranks; `first` says the result."""
        if self.rank not in (first, second):
            return
        latency_s = self._ping(first, second)
        for sender, receiver in ((first, second), (second, first)):
            size, seconds = self._transfer(sender, receiver)
            measured = self.numbers(size, round(seconds * 1e9))
            if sender != first:  # the one who timed it tells the one who says it
                dist.send(measured, first) if self.rank == sender else dist.recv(measured, sender)
            if self.rank == first:
                size, nanoseconds = measured.tolist()
                say("pair", **{"from": sender, "to": receiver}, latency_s=latency_s, bytes=size,
                    seconds=nanoseconds / 1e9)  # fmt: skip

    def _ping(self, first: int, second: int) -> float:
        """Seconds one way of a single byte: half of there and back."""
        times = []
        for _ in range(PINGS + 1):  # the first one opens the connection
            start_s = time.perf_counter()
            if self.rank == first:
                dist.send(self._byte, second)
                dist.recv(self._byte, second)
            else:
                dist.recv(self._byte, first)
                dist.send(self._byte, first)
            self.settle()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:]) / 2

    def _transfer(self, sender: int, receiver: int) -> tuple[int, float]:
        """Bytes and seconds of a transfer that took long enough; both are of the sender's clock."""
        size, seconds = FIRST_BYTES, 0.0
        while True:
            agreed = self.numbers(size)
            dist.send(agreed, receiver) if self.rank == sender else dist.recv(agreed, sender)
            size = int(agreed.item())
            if size == 0:
                return 0, 0.0  # the receiver's; the sender has the result
            load = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self.settle()
            start_s = time.perf_counter()
            if self.rank == sender:
                dist.send(load, receiver)
                dist.recv(self._byte, receiver)
            else:
                dist.recv(load, sender)
                dist.send(self._byte, sender)
            self.settle()
            seconds = time.perf_counter() - start_s
            if self.rank == sender and (seconds >= ENOUGH_S or size >= MOST_BYTES):
                dist.send(self.numbers(0), receiver)
                return size, seconds
            size = larger(size, seconds)

    def all_reduce(self) -> None:
        """Sum over all ranks, from a few bytes to enough; rank 0 says each size."""
        size, world = 1024, dist.get_world_size()
        while size:
            load = torch.full((size // 4,), float(self.rank + 1), device=self.device)
            dist.barrier()
            self.settle()
            start_s = time.perf_counter()
            dist.all_reduce(load)
            self.settle()
            seconds = time.perf_counter() - start_s
            if self.rank == 0:
                right = bool((load == world * (world + 1) / 2).all())
                say("all_reduce", bytes=size, seconds=seconds, right=right)
            following = self.numbers(next_all_reduce(size, seconds))
            dist.broadcast(following, 0)
            size = int(following.item())


def larger(size: int, seconds: float) -> int:
    """The next size of a transfer: what would take twice as long as is enough, at most 16 times as much."""
    factor = min(16, max(2, round(2 * ENOUGH_S / max(seconds, 1e-6))))
    return min(MOST_BYTES, size * factor)


def next_all_reduce(size: int, seconds: float) -> int:
    """The size that follows 1 KiB, 1 MiB and so on; 0 when the last one took long enough."""
    if size < FIRST_BYTES:
        return FIRST_BYTES
    return 0 if seconds >= ENOUGH_S or size >= MOST_BYTES else larger(size, seconds)


def end_with_parent() -> None:
    """End this process when the one that started it is gone: nobody would read what it says."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(specification: dict[str, Any]) -> int:
    """Join the others and time everything; exit status 1 if something failed."""
    rank, world, timeout_s = specification["rank"], specification["world"], specification["timeout_s"]
    doing = f"finding the other ranks through {specification['master']}:{specification['port']}"
    try:
        if specification["backend"] == "nccl":
            device = torch.device("cuda", specification["local_rank"])
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        dist.init_process_group(
            specification["backend"],
            init_method=f"tcp://{specification['master']}:{specification['port']}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        dist.barrier()
        say("joined")
        here = Rank(rank, device)
        for first, second in specification["pairs"]:
            doing = f"timing ranks {first} and {second}"
            here.time_pair(first, second)
            dist.barrier()  # one pair at a time: two would share a link
        doing = "the all-reduce"
        here.all_reduce()
        say("done")
    except (RuntimeError, ValueError, OSError) as error:
        say("failed", doing=doing, error=str(error).strip().splitlines()[0])
        return 1
    return 0


if __name__ == "__main__":
    end_with_parent()
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group whose peers are gone waits for them in its destructor
