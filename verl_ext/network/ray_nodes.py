"""The nodes of a Ray cluster, asked by a task first and then by an actor, which hold the node's GPUs meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext.errors import ConfigurationError
from verl_ext.interrupts import deferred, rearm
from verl_ext.network.node import NodeAgent, NodeFacts
from verl_ext.network.nodes import Silent

_POLL_S = 1.0
_PACKAGE = Path(__file__).resolve().parent.parent
# Threads of an actor: the ranks' method blocks, and the echo of the others' connections goes on beside it.
_CONCURRENCY = 4


class RayNodes:
    """See `nodes.Nodes`.

    Args:
        address: of the cluster, which `check_address` found in order.
        on_gpus: whether ranks are to run on the nodes' GPUs; if not, one on each node's CPU.

    Raises:
        ConfigurationError: there is no cluster at the address.
    """

    def __init__(self, address: str, *, on_gpus: bool) -> None:
        try:
            with deferred():
                # Our package goes along, so that a node needs nothing but the stack.
                ray.init(address=address, log_to_driver=False, logging_level="error",
                         runtime_env={"py_modules": [str(_PACKAGE)]})  # fmt: skip
                rearm()
        except (ConnectionError, RayError, RuntimeError) as error:
            raise ConfigurationError(
                f"no Ray cluster can be used at {address} ({str(error).splitlines()[0]}): run the command on a node of "
                "the cluster, with RAY_ADDRESS or --address as `ray start` said it"
            ) from error
        found = ray.nodes()
        alive = sorted((node for node in found if node["Alive"]), key=_head_first)
        self.addresses: Sequence[str] = [node["NodeManagerAddress"] for node in alive]
        self.gone: Mapping[str, str] = {
            node["NodeManagerAddress"]: str(node.get("DeathReasonMessage") or "no reason given")
            for node in found
            if not node["Alive"] and node["NodeManagerAddress"] not in self.addresses
        }
        self._gpus = {
            node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) if on_gpus else 0 for node in alive
        }
        self._places = {
            node["NodeManagerAddress"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive
        }
        self._actors: dict[str, Any] = {}

    def ask(self, method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, Any]:
        """As in Nodes."""
        asked = {self._begin(address, method, values): address for address, values in arguments.items()}
        done, waited_for = [], list(asked)
        until_s = time.monotonic() + timeout_s
        while waited_for and time.monotonic() < until_s:
            with deferred():  # a signal is heard between two of Ray's calls
                ready, waited_for = ray.wait(waited_for, num_returns=len(waited_for), timeout=_POLL_S)
            done += ready
        answers: dict[str, Any] = {address: Silent(f"no answer within {timeout_s:.0f} s") for address in arguments}
        for reference in done:
            try:
                answers[asked[reference]] = ray.get(reference, timeout=timeout_s)
            except RayError as error:
                answers[asked[reference]] = Silent(str(error).strip().splitlines()[-1].strip())
        return answers

    def _begin(self, address: str, method: str, values: Sequence[Any]) -> Any:
        gpus = self._gpus[address]
        where = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": self._places[address]}
        if method == "describe":
            # A task, which its node is asked for. An actor that takes nothing is asked for at a random node first (Ray,
            # gcs_actor_scheduler.cc, SelectForwardingNode), so that one without a cable would hold up the others'.
            return ray.remote(_describe).options(**where, max_retries=0).remote(address, gpus)
        if address not in self._actors:
            made = ray.remote(NodeAgent).options(**where, max_concurrency=_CONCURRENCY)
            self._actors[address] = made.remote(address, gpus)
        return getattr(self._actors[address], method).remote(*values)

    def close(self) -> None:
        """As in Nodes."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        ray.shutdown()


def _describe(address: str, gpus: int) -> NodeFacts:
    return NodeAgent(address, gpus).describe()


def _head_first(node: dict[str, Any]) -> tuple[bool, bytes]:
    """So that a rank is on the same node in each check."""
    return "node:__internal_head__" not in node["Resources"], ip_address(node["NodeManagerAddress"]).packed
