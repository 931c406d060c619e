"""Who is in a Ray cluster: asked, waited for, and given something to run on each node. Needs `ray.init` before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext.cluster import on_node
from verl_ext.cluster.shape import CPUS_BESIDE, Cluster, Node, gpus_per_node, listed, too_few_cpus
from verl_ext.errors import ConfigurationError
from verl_ext.interrupts import check, deferred, rearm

POLL_S = 1.0
SAY_EVERY_S = 15.0
cloudpickle.register_pickle_by_value(on_node)  # pyright: ignore[reportPrivateImportUsage]


@contextlib.contextmanager
def attached(address: str) -> Iterator[None]:
    """A connection to the cluster, for as long as the block runs.

    Raises:
        ConfigurationError: nobody answers there, or with another version of Ray or Python.
    """
    if "://" in address:
        raise ConfigurationError(
            f"RAY_ADDRESS is {address}, where jobs are submitted and no run can attach: `invoke launch` submits one; "
            "unset RAY_ADDRESS to train on this machine alone"
        )
    try:
        with deferred():
            ray.init(address=address, log_to_driver=False, logging_level="error")
            rearm()  # ray.init takes SIGTERM for itself
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"no Ray cluster can be joined at RAY_ADDRESS={address} ({first}): `invoke cluster-head` starts one; unset "
            "RAY_ADDRESS to train on this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def alive() -> list[Node]:
    """The nodes that answer, by address."""
    return sorted((_node(entry) for entry in ray.nodes() if entry["Alive"]), key=lambda node: node.address)


def gone() -> list[Node]:
    """The nodes that were there once and are not any more."""
    here = {node.address for node in alive()}
    dead = (_node(entry) for entry in ray.nodes() if not entry["Alive"])
    return [node for node in {node.address: node for node in dead}.values() if node.address not in here]


def wait_for(wanted: str, timeout_s: float, say: Callable[[str], None]) -> list[Node]:
    """The nodes once all that are wanted are there; only those with GPUs count.

    Args:
        wanted: how many, or which ("10.0.0.1,10.0.0.2", host names too); any at all if "".
        timeout_s: how long they are waited for.
        say: told who is missing, now and then.

    Raises:
        ConfigurationError: they did not come; the message names who is missing.
    """
    until_s, said_s = time.monotonic() + timeout_s, 0.0
    while True:
        check()
        nodes = alive()
        missing = missing_of(wanted, nodes, gone())
        if not missing:
            return nodes
        now_s = time.monotonic()
        if now_s >= until_s:
            raise ConfigurationError(
                f"after {timeout_s:.0f} s {missing}: look at the missing machine (`invoke cluster-join ADDRESS` there; "
                "in Kubernetes at its pod), ask for fewer with --nodes, or wait longer with --wait-s"
            )
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            say(f"waiting, {until_s - now_s:.0f} s more: {missing}")
        time.sleep(POLL_S)


def missing_of(wanted: str, nodes: Sequence[Node], lost: Sequence[Node]) -> str:
    """Who is missing, in words; "" if nobody is.

    Args:
        wanted: as for `wait_for`.
        nodes: that are there.
        lost: that were.
    """
    training = [node for node in nodes if node.gpus]
    here = f"{listed(training)} {'are' if len(training) > 1 else 'is'} there with GPUs"
    without = [node for node in nodes if not node.gpus]
    notes = f"; without GPUs: {listed(without)}" if without else ""
    if without and not training:
        # One is lent to each rank of hardware `cpu`.
        notes += f"; to train in small without any, start Ray there with --gpus 1 --cpus {1 + CPUS_BESIDE}"
    notes += f"; gone: {listed(lost)}" if lost else ""
    if wanted and not wanted.isdecimal():
        names = [name.strip() for name in wanted.split(",") if name.strip()]
        absent = [name for name in names if not any(name in (node.address, node.hostname) for node in training)]
        return f"missing {', '.join(absent)} ({here}{notes})" if absent else ""
    count = int(wanted or 1)
    if len(training) >= count:
        return ""
    return f"{count - len(training)} of {count} nodes with GPUs missing ({here}{notes})"


def cluster_of(address: str, wanted: str, timeout_s: float, say: Callable[[str], None]) -> Cluster:
    """What a run on this cluster has, once it is all there.

    Raises:
        ConfigurationError: it cannot be joined, nodes do not come, their GPUs differ in number, or Ray counts too few
            CPUs.
    """
    with attached(address):
        nodes = wait_for(wanted, timeout_s, say)
        here = ray.util.get_node_ip_address()
        store = ray.get_runtime_context().gcs_address
    each = gpus_per_node(nodes)
    if short := too_few_cpus(nodes):
        raise ConfigurationError(short)
    training = [node for node in nodes if node.gpus]
    say(f"Ray cluster {store}: {len(training)} node(s) with {each} GPU(s) each ({listed(training)})")
    return Cluster(address=store, driver=here, nodes=len(training), gpus_per_node=each)


def on_each[T](
    nodes: Sequence[Node], function: Callable[..., T], arguments: Callable[[Node], Sequence[Any]], timeout_s: float
) -> list[T | str]:
    """What a function of `on_node` answers on each node, or why it does not.

    Args:
        nodes: where.
        function: of on_node.py.
        arguments: for each node.
        timeout_s: for all of them together.
    """
    if not nodes:
        return []
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(*arguments(node))
        for node in nodes
    ]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    answers: list[T | str] = []
    for reference in asked:
        if reference not in done:
            answers.append(f"no answer in {timeout_s:g} s")
            continue
        try:
            answers.append(ray.get(reference))
        except RayError as error:
            answers.append(str(error).strip().splitlines()[-1])
    return answers


def _node(entry: dict[str, Any]) -> Node:
    resources = entry["Resources"]
    return Node(
        entry["NodeID"],
        entry["NodeManagerAddress"],
        entry["NodeManagerHostname"],
        gpus=int(resources.get("GPU", 0)),
        cpus=int(resources.get("CPU", 0)),
    )
