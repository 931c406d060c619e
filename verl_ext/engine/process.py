"""The Ray process of an engine server, and the engine's own, importing while the trainer's model is built.

verl 0.6.1 starts a server when the model is built: the server imports vLLM, then spawns the engine, which imports it
again, and the TaskRunner has imported it too, to name the server's class. On a GPU node that was 50 to 110 s of the
190 s to the first step. Here the first two imports go on beside everything else, and the third is not made.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import re
from collections.abc import Awaitable, Sequence
from typing import Any

import ray

from verl_ext.engine.worker_errors import last_error
from verl_ext.errors import EngineDiedError
from verl_ext.process_tree import end_with
from verl_ext.start import import_unhurriedly, start_on_nodes

SERVER_MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"
ENGINE_MODULE = "vllm.v1.engine.core"
ENGINE_STARTER = "vllm.v1.engine.utils"
WORDS_WITHIN_S = 10.0
ABORT_AGAIN_S = 0.02


class EngineServerProcess:
    """Holds verl's `vLLMHttpServerBase` once `begin` has been called; the other methods are that server's."""

    def __init__(self) -> None:
        start_the_fork_server()
        self._module = import_unhurriedly(SERVER_MODULE)
        self._server: Any = None
        self._workers: list[Any] = []
        self._turns = itertools.count()
        self._under_way: set[str] = set()

    def begin(self, arguments: dict[str, Any], *, async_scheduling: bool = False) -> None:
        """Build the server.

        Args:
            arguments: those of verl's class.
            async_scheduling: see verl_ext.engine.async_scheduling; only with a trainer.
        """
        if not uses_cuda_itself(arguments["workers"]):
            fork_the_engine(importlib.import_module(ENGINE_STARTER))
        if async_scheduling and arguments["workers"]:
            importlib.import_module("verl_ext.engine.async_scheduling").schedule_ahead(self._module)
        self._workers = list(arguments["workers"])
        self._server = self._module.vLLMHttpServerBase(**arguments)

    async def get_master_address(self) -> tuple[str, int]:
        """Address and port for data parallel groups."""
        return self._server.get_master_address()

    async def get_server_address(self) -> tuple[str, int]:
        """Address and port of the HTTP server."""
        return self._server.get_server_address()

    async def launch_server(self, master_address: str, master_port: int) -> None:
        """Start the engine and the HTTP server; returns when both are ready."""
        launching = self._server.launch_server(master_address=master_address, master_port=master_port)
        await self._or_the_workers_words(launching)

    async def generate(self, *args: Any, request_id: str, **kwargs: Any) -> Any:
        """Tokens in, tokens out; verl's `TokenOutput`.

        verl gives every turn of a trajectory the same id. A step that was planned ahead may still have the last turn's
        request in it when the next turn's comes, which would get its token.
        """
        turn = f"{request_id}-{next(self._turns)}"
        self._under_way.add(turn)
        try:
            return await self._or_the_workers_words(self._server.generate(*args, request_id=turn, **kwargs))
        finally:
            self._under_way.discard(turn)

    async def _or_the_workers_words(self, asked: Awaitable[Any]) -> Any:
        """vLLM says of a dead engine that the cause is "above", in a log of another process."""
        try:
            return await asked
        except Exception as error:
            if not re.search("EngineDeadError|Engine core initialization failed", f"{type(error).__name__}: {error}"):
                raise
            words = asyncio.gather(*[worker.__ray_call__.remote(last_error) for worker in self._workers])
            try:
                said = [one for one in await asyncio.wait_for(words, WORDS_WITHIN_S) if one]
            except Exception as why:  # noqa: BLE001 - a worker that is gone too, in any of Ray's ways
                said = [f"it does not answer ({type(why).__name__})"]
            told = said[0] if said else "nothing; the processes' logs have the engine's own error"
            raise EngineDiedError(f"vLLM's engine died. What its worker said: {told}") from error

    async def wake_up(self) -> None:
        """Take the memory back and the trainer's weights over."""
        await self._server.wake_up()

    async def sleep(self) -> None:
        """Give the memory to the trainer."""
        await self._server.sleep()

    async def wait_for_requests_to_drain(self) -> None:
        """Ends what is still asked for; returns when no worker has a step of it to run.

        verl's waits only for engines that share their data, and it is called when every trajectory has its end. What
        runs then was given up at a deadline, which Ray does not tell the server. Going on, it would run on memory that
        the trainer has taken, and keep its blocks, old weights' too, in the prefix cache.
        """
        await self._server.wait_for_requests_to_drain()
        while self._under_way:
            await self._server.engine.abort(list(self._under_way))
            await asyncio.sleep(ABORT_AGAIN_S)  # what has not reached vLLM yet cannot be aborted yet
        # Answered in its turn, after the steps that were asked for before it: a worker that sleeps must run none.
        await self._server.engine.collective_rpc("check_health")


def begin(gpus_per_server: int, count: int, *, own_gpus: bool = False) -> dict[str, list[Any]]:
    """Start `count` processes, on each node as many as its GPUs can feed; does not wait.

    Args:
        gpus_per_server: of one engine.
        count: engines.
        own_gpus: whether Ray gives them to the server; a trainer holds them otherwise.

    Returns:
        Handles by node id. Fewer than `count` where a server's GPUs lie on more than one node.
    """
    places: list[str] = []
    for node in ray.nodes():
        gpus = int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0
        places += [node["NodeID"]] * (gpus // gpus_per_server)
    handles = start_on_nodes(EngineServerProcess, places[:count], "engine_server", soft=False,
                             num_gpus=gpus_per_server if own_gpus else 0)  # fmt: skip
    by_node: dict[str, list[Any]] = {}
    for node_id, handle in zip(places, handles, strict=False):
        by_node.setdefault(node_id, []).append(handle)
    return by_node


class _EnvironmentForkServer(multiprocessing.context.ForkServerContext):
    """A fork server whose children get the environment of the process that asks, not the server's own."""

    def Process(  # pyright: ignore[reportIncompatibleVariableOverride] - a class in the library, a function here
        self, target: Any, name: str | None = None, kwargs: dict[str, Any] | None = None
    ) -> Any:
        environment = dict(os.environ)  # noqa: TID251 - handed on, not read
        arguments = (os.getpid(), environment, target, kwargs or {})
        return super().Process(target=_as_if_spawned, name=name, args=arguments)


def _as_if_spawned(server_pid: int, environment: dict[str, str], target: Any, kwargs: dict[str, Any]) -> None:
    end_with(server_pid)
    os.environ.clear()  # noqa: TID251
    os.environ.update(environment)  # noqa: TID251
    target(**kwargs)


def fork_the_engine(module: Any) -> None:
    """Fork vLLM's engine process from one that has vLLM imported, instead of spawning it.

    In a Ray actor vLLM 0.11.0 spawns its engine, which imports torch and vLLM again: 15 to 20 s of one core
    on the way to the first step.
    """
    module.get_mp_context = _EnvironmentForkServer


def uses_cuda_itself(workers: Sequence[Any]) -> bool:
    """Whether the engine's own process will hold the model on a GPU, so that it must not be forked.

    A process cannot use CUDA if it was forked from one that has asked for GPUs, and verl asks when it is imported
    (verl/utils/device.py@v0.6.1). With a trainer its workers hold the model; the engine's process only schedules.
    """
    import torch

    return not workers and torch.cuda.is_available()


def start_the_fork_server() -> None:
    """Let a fork server import the engine while this process goes on; it ends with this process."""
    multiprocessing.set_forkserver_preload([SERVER_MODULE, ENGINE_MODULE])
    multiprocessing.forkserver.ensure_running()
