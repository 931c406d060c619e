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

    from verl_ext.sandbox.metrics import PoolReport


class AgentLoopProcess:
    """Holds a `SandboxedAgentLoopWorker` once `start` has been called; the other methods are the worker's."""

    def __init__(self) -> None:
        self._worker_module = import_unhurriedly("verl_ext.agent_loop.worker")
        self._worker: Any = None

    def start(self, config: Any, server_handles: list[Any], reward_router_address: str | None, broker: Any) -> None:
        """Build the worker; see `AgentLoopWorkerBase`. `broker` grants its sandboxes."""
        self._worker_module.use_broker(broker)
        self._worker = self._worker_module.SandboxedAgentLoopWorker(config, server_handles, reward_router_address)

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Roll out this worker's share of a batch."""
        return await self._worker.generate_sequences(batch)

    async def sandbox_report(self) -> PoolReport:
        """What this worker's sandboxes did since the last report."""
        return self._worker.sandbox_report()

    async def probe_sandbox(self) -> str:
        """Whether the service works; see `SandboxedAgentLoopWorker.probe_sandbox`."""
        return await self._worker.probe_sandbox()

    async def close_sandboxes(self) -> dict[str, float]:
        """End every sandbox of this worker; the counts since it started."""
        return await self._worker.close_sandboxes() if self._worker else {}


def begin(count: int) -> list[Any]:
    """Start `count` processes, spread over the nodes in turn as verl spreads its workers; does not wait."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    places = [nodes[index % len(nodes)] for index in range(count)]
    return start_on_nodes(AgentLoopProcess, places, "agent_loop_worker", soft=True)
