"""How large the cluster is that a run trains on: what verl is told of nodes and GPUs, in the one place that knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.errors import ConfigurationError

# CPUs that a run holds beside one for each GPU, as Ray counts them: its first process (verl 0.6.1 trainer/main_ppo.py,
# num_cpus=1), and one that must be free when the workers find each other (single_controller/ray/base.py makes an actor
# for it, and Ray wants a CPU to place any).
CPUS_BESIDE = 2


@dataclass(frozen=True)
class Node:
    """One machine of a Ray cluster.

    Attributes:
        id: Ray's.
        address: IP that the others reach it at.
        hostname: its own word.
        gpus: that Ray may give away there.
        cpus: likewise.
    """

    id: str
    address: str
    hostname: str
    gpus: int
    cpus: int

    def __str__(self) -> str:
        name = f" ({self.hostname})" if self.hostname not in ("", self.address) else ""
        return f"{self.address}{name}"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster as a run sees it.

    Attributes:
        address: of its control store, host:port.
        driver: address of the node that the run's own process is on.
        nodes: that train.
        gpus_per_node: on each of them.
    """

    address: str
    driver: str
    nodes: int
    gpus_per_node: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """What verl is told."""
        return f"trainer.nnodes={self.nodes}", f"trainer.n_gpus_per_node={self.gpus_per_node}"


def gpus_per_node(nodes: Sequence[Node]) -> int:
    """How many GPUs each node with GPUs has.

    Raises:
        ConfigurationError: none has any, or they differ, which verl's placement groups cannot use.
    """
    training = [node for node in nodes if node.gpus]
    if not training:
        raise ConfigurationError(
            f"no node of this cluster has GPUs that Ray knows of ({listed(nodes)}): start the nodes with GPUs "
            "(`invoke cluster-join`; in Kubernetes a worker group), or say how many: `ray start --num-gpus`"
        )
    counts = Counter(node.gpus for node in training)
    if len(counts) > 1:
        by_count = [f"{count} on {listed([node for node in training if node.gpus == count])}" for count in counts]
        raise ConfigurationError(
            f"the nodes have different numbers of GPUs ({'; '.join(by_count)}), and verl takes the same from each: "
            "start them all with the same `ray start --num-gpus`"
        )
    return training[0].gpus


def too_few_cpus(nodes: Sequence[Node]) -> str:
    """What Ray would wait for without a word: CPUs that it does not count; "" if there are enough.

    verl reserves one for each GPU on the same node (single_controller/ray/base.py@v0.6.1, get_placement_groups).
    """
    cure = (
        "start Ray with more (`invoke cluster-head --cpus N`, `ray start --num-cpus`; in Kubernetes raise the "
        "container's CPUs): it counts, and reserves no core"
    )
    short = [node for node in nodes if node.gpus > node.cpus]
    if short:
        counted = ", ".join(f"{node}: {node.cpus} for {node.gpus} GPU(s)" for node in short)
        return f"Ray counts fewer CPUs than GPUs ({counted}), and verl takes one with each: {cure}"
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    if cpus < gpus + CPUS_BESIDE:
        return (
            f"Ray counts {cpus} CPU(s) in this cluster ({listed(nodes)}), and a run on {gpus} GPU(s) needs "
            f"{gpus + CPUS_BESIDE}, or it waits for ever: {cure}"
        )
    return ""


def listed(nodes: Sequence[Node]) -> str:
    """Their names, for a message."""
    return ", ".join(map(str, nodes)) or "no node"
