"""What a step costs the parts that do not grow with the cluster: `python tests/bench/bench_scale.py`.

The driver's part is verl 0.6.1's own: a batch with the columns that it has when update_actor is called, cut in chunks,
each written as a Ray argument is and read again as a worker does. The broker's part is ours: its actor and the calls
that one trajectory with a sandbox of its own makes. Both at the recipe's lengths; recipe/retool/SCALE.md uses them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import time
from collections.abc import Sequence

import on_path  # noqa: F401
import ray
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from verl_ext.sandbox.broker import Broker
from verl_ext.sandbox.limiter import Limits

PROMPT, RESPONSE = 2048, 16384  # recipe/retool/config/retool.yaml
_LONG = ("input_ids", "attention_mask", "position_ids")
_RESPONSE_LONG = ("responses", "response_mask")
_RESPONSE_FLOAT = (
    "rollout_log_probs", "rm_scores", "old_log_probs", "token_level_scores", "token_level_rewards", "advantages",
    "returns",
)  # fmt: skip


def batch(trajectories: int) -> DataProto:
    """The columns of a step's batch before the update, as verl 0.6.1's trainer and ours have them."""
    columns = {name: torch.ones(trajectories, PROMPT + RESPONSE, dtype=torch.int64) for name in _LONG}
    columns |= {name: torch.ones(trajectories, RESPONSE, dtype=torch.int64) for name in _RESPONSE_LONG}
    columns |= {name: torch.rand(trajectories, RESPONSE) for name in _RESPONSE_FLOAT}
    columns["prompts"] = torch.ones(trajectories, PROMPT, dtype=torch.int64)
    return DataProto(batch=TensorDict(columns, batch_size=trajectories))


def written(chunks: Sequence[DataProto]) -> tuple[list[tuple[bytes, list[bytes]]], float]:
    """What Ray would put into its object store, buffers apart, each copied once; and the processor's seconds."""
    start_s = time.process_time()
    made = []
    for chunk in chunks:
        buffers: list[pickle.PickleBuffer] = []
        text = pickle.dumps(chunk, protocol=5, buffer_callback=buffers.append)
        made.append((text, [bytes(buffer.raw()) for buffer in buffers]))
    return made, time.process_time() - start_s


def read(parts: Sequence[tuple[bytes, list[bytes]]]) -> float:
    """The processor's seconds of a worker's reading."""
    start_s = time.process_time()
    for text, buffers in parts:
        pickle.loads(text, buffers=buffers)
    return time.process_time() - start_s


def driver(trajectories: int, chunks: int) -> None:
    """Print bytes of a batch's way from the driver to the workers, and what it takes of one core, best of fifteen."""
    whole = batch(trajectories).chunk(chunks)
    for method in ("", "numpy"):
        os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = method
        tries = [written(whole) for _ in range(15)]
        size = sum(len(text) + sum(map(len, buffers)) for text, buffers in tries[0][0])
        write_s, read_s = min(seconds for _, seconds in tries), min(read(parts) for parts, _ in tries)
        print(
            f"{method or 'torch.save'}: {size / trajectories / 2**20:.2f} MiB a trajectory; written in "
            f"{write_s / trajectories * 1000:.2f} ms, read in {read_s / trajectories * 1000:.2f} ms of one core"
        )


class BrokerActor:
    """The broker without a service behind it."""

    def __init__(self, places: int) -> None:
        limits = Limits(max_alive=places, max_starting=places)
        self._broker = Broker(limits, backend=None, run_id="bench")

    async def acquire_start(self, owner: str, lease: str) -> None:
        await self._broker.acquire_start(owner, lease)

    async def start_done(self, owner: str, lease: str) -> None:
        await self._broker.start_done(owner, lease, f"s-{lease}", False)

    async def release(self, owner: str, lease: str) -> None:
        await self._broker.release(owner, lease)


async def leases(actor: ray.actor.ActorHandle, owner: str, count: int, in_flight: int) -> None:
    """Take and give back `count` leases, `in_flight` at once."""
    places = asyncio.Semaphore(in_flight)

    async def one(number: int) -> None:
        async with places:
            lease = f"{owner}-{number}"
            await actor.acquire_start.remote(owner, lease)
            await actor.start_done.remote(owner, lease)
            await actor.release.remote(owner, lease)

    await asyncio.gather(*map(one, range(count)))


def broker(count: int) -> None:
    """Print how many trajectories a second the broker serves, this process being its only client."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor = ray.remote(BrokerActor).options(num_cpus=0, max_concurrency=1000).remote(10_000)
    asyncio.run(leases(actor, "warm", 100, 10))
    for in_flight in (1, 64, 256):
        start_s = time.perf_counter()
        asyncio.run(leases(actor, f"w{in_flight}", count, in_flight))
        rate = count / (time.perf_counter() - start_s)
        print(f"broker, {in_flight} trajectories at once: {rate:.0f} trajectories a second, {3 * rate:.0f} calls")
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--leases", type=int, default=1000)
    options = parser.parse_args()
    driver(options.trajectories, options.chunks)
    broker(options.leases)


if __name__ == "__main__":
    main()
