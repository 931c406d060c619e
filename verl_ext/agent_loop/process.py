"""The Ray process of an agent loop worker, started before the engine that it will talk to.

verl 0.6.1 starts these when the engine is ready, because their constructor takes the engine's handles. Their
imports, 15 to 20 s of one core, can go on while the trainer's model and the engine are built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from verl_ext.start import import_unhurriedly, start_on_nodes

if TYPE_CHECKING:
    from verl.protocol import DataProto


class AgentLoopProcess:
    """Holds a `SandboxedAgentLoopWorker` once `start` has been called; the other methods are the worker's."""

    def __init__(self) -> None:
        self._class = import_unhurriedly("verl_ext.agent_loop.worker").SandboxedAgentLoopWorker
        self._worker: Any = None

    def start(self, config: Any, server_handles: list[Any], reward_router_address: str | None) -> None:
        """Build the worker; see `AgentLoopWorkerBase`."""
        self._worker = self._class(config, server_handles, reward_router_address)

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Roll out this worker's share of a batch."""
        return await self._worker.generate_sequences(batch)

    async def sandbox_metrics(self) -> dict[str, float]:
        """Counts and latencies of this worker's sandboxes since it started."""
        return self._worker.sandbox_metrics()

    async def close_sandboxes(self) -> dict[str, float]:
        """End every sandbox of this worker; returns the last metrics."""
        return await self._worker.close_sandboxes() if self._worker else {}


def begin(count: int) -> list[Any]:
    """Start `count` processes, spread over the nodes in turn as verl spreads its workers; does not wait."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    places = [nodes[index % len(nodes)] for index in range(count)]
    return start_on_nodes(AgentLoopProcess, places, "agent_loop_worker", soft=True)
