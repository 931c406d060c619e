"""verl's rollout replica over an engine server process that was begun early."""

from __future__ import annotations

import gc
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_ext.engine.process import EngineServerProcess
from verl_ext.errors import ConfigurationError
from verl_ext.start import start_on_nodes

_waiting: dict[str, list[Any]] = {}


def offer(by_node: dict[str, list[Any]]) -> None:
    """Give the processes of `process.begin` to the replicas of this process."""
    _waiting.clear()
    _waiting.update(by_node)


def _take(node_id: str, replica_rank: int) -> Any:
    if _waiting.get(node_id):
        return _waiting[node_id].pop()
    # Its GPUs lie on more than one node, or verl has spread the workers differently: then it starts now.
    return start_on_nodes(EngineServerProcess, [node_id], f"late_engine_server_{replica_rank}", soft=False)[0]


def _take_any() -> Any:
    for handles in _waiting.values():
        if handles:
            return handles.pop()
    raise ConfigurationError(
        "no node has the GPUs of one engine: make actor_rollout_ref.rollout.tensor_model_parallel_size times "
        "pipeline_model_parallel_size at most trainer.n_gpus_per_node"
    )


class EarlyReplica(RolloutReplica):
    """verl's `vLLMReplica` without data parallelism: one server, on the node of its first worker."""

    def __init__(self, *args: Any, async_scheduling: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._async_scheduling = async_scheduling

    def get_ray_class_with_init_args(self) -> Any:
        """Only for verl's own way to an engine with GPUs of its own, see `init_standalone`."""
        raise NotImplementedError("verl_ext's engine runs its model itself: use init_standalone or init_hybrid")

    async def init_standalone(self) -> None:
        """An engine with GPUs of its own and the weights of the model's folder: no trainer is there.

        verl would make the processes that hold the model now and reach them through ZeroMQ, as it reaches a trainer's.
        Without a trainer vLLM's own executor does, in the process that was begun early with its GPUs.
        """
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Build and launch the server; returns when the engine is ready."""
        if self.workers:
            server = _take(await self.workers[0].__ray_call__.remote(_node_id), self.replica_rank)
        else:
            server = _take_any()
        await server.begin.remote(
            {
                "config": self.config,
                "model_config": self.model_config,
                "rollout_mode": self.rollout_mode,
                "workers": self.workers,
                "replica_rank": self.replica_rank,
                "node_rank": 0,
                "gpus_per_node": self.world_size,
                "nnodes": 1,
            },
            async_scheduling=self._async_scheduling,
        )
        self.servers.append(server)
        await server.launch_server.remote(*await server.get_master_address.remote())
        address, port = await server.get_server_address.remote()
        self._server_handle = server
        self._server_address = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    async def sleep(self) -> None:
        """Let running requests end, then give the memory to the trainer."""
        await self.servers[0].wait_for_requests_to_drain.remote()
        await super().sleep()


def _node_id(_: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def spare_the_collector(_: Any) -> None:
    """Take what a worker has made by now out of the garbage collector's sight.

    verl 0.6.1 collects garbage three to nine times on the way from training to generation and back
    (verl/utils/memory_utils.py, aggressive_empty_cache), and each time Python walks over the 550,000 objects of torch,
    transformers and vLLM, none of which ever goes: 0.25 s on the cores of the LOG, and less than 1 ms after this.
    It is here because a worker imports the module of what it is asked to do, and this one it has.
    """
    gc.collect()
    gc.freeze()
