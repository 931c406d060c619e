"""The order of a check: who answers, which interface, who reaches whom, and only then the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl_ext.network import problems
from verl_ext.network.node import CONNECT_TIMEOUT_S, NodeFacts, RankOutcome, RankPlan, split_ranks
from verl_ext.network.nodes import Nodes, Silent

# Ray starts a process on the node first, and brings our package there.
ANSWER_TIMEOUT_S = 45.0
# Beside the ranks' own deadline, for starting and ending their processes.
_SPARE_S = 15.0


@dataclass
class Finding:
    """What a check found.

    Attributes:
        backend: nccl or gloo.
        nodes: that answered.
        connections: by node and other node, milliseconds there and back, or why not.
        homes: the node of each rank.
        outcomes: of the ranks, [] if they were not started.
        problems: in words, [] if all is well.
    """

    backend: str
    nodes: list[NodeFacts] = field(default_factory=list)
    connections: dict[str, dict[str, float | str]] = field(default_factory=dict)
    homes: dict[int, str] = field(default_factory=dict)
    outcomes: list[RankOutcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check(nodes: Nodes, say: Callable[[str], None], timeout_s: float, *, backend: str = "") -> Finding:
    """Check a network, and stop at the first kind of trouble: what comes after would only hang.

    Args:
        nodes: asked.
        say: told each stage.
        timeout_s: of the ranks.
        backend: nccl or gloo; if "" nccl between the nodes that have GPUs, else gloo between all.
    """
    finding = Finding(backend or "gloo")
    say(f"{len(nodes.addresses)} node(s): {', '.join(nodes.addresses)}")
    answers = nodes.ask("describe", dict.fromkeys(nodes.addresses, ()), ANSWER_TIMEOUT_S)
    finding.nodes = [answer for answer in answers.values() if isinstance(answer, NodeFacts)]
    silent = {address: answer for address, answer in answers.items() if isinstance(answer, Silent)}
    finding.problems = problems.of_silence(silent, nodes.gone)
    with_gpus = [node for node in finding.nodes if node.gpus]
    if with_gpus and not backend:
        finding.backend = "nccl"
    members = with_gpus if finding.backend == "nccl" else finding.nodes
    if finding.nodes and not members:
        finding.problems.append("no node has a GPU that nvidia-smi shows, and nccl needs one: leave --backend out")
    finding.problems += problems.of_interfaces(members, finding.backend)
    if len(finding.nodes) > 1 and not silent:
        say("connections between all nodes")
        _connect(nodes, finding)
    if not finding.problems:
        _measure(nodes, members, finding, say, timeout_s)
    return finding


def _connect(nodes: Nodes, finding: Finding) -> None:
    everyone = [node.address for node in finding.nodes]
    ports = nodes.ask("listen", dict.fromkeys(everyone, ()), ANSWER_TIMEOUT_S)
    listening = {address: port for address, port in ports.items() if not isinstance(port, Silent)}
    wanted = {
        address: ({other: port for other, port in listening.items() if other != address},) for address in listening
    }
    found = nodes.ask("reach", wanted, ANSWER_TIMEOUT_S + CONNECT_TIMEOUT_S)
    silent = {address: answer for answers in (ports, found) for address, answer in answers.items()
              if isinstance(answer, Silent)}  # fmt: skip
    finding.connections = {address: row for address, row in found.items() if address not in silent}
    finding.problems += problems.of_silence(silent, {})
    finding.problems += problems.of_connections(finding.connections)


def _measure(
    nodes: Nodes, members: Sequence[NodeFacts], finding: Finding, say: Callable[[str], None], timeout_s: float
) -> None:
    gpus = [node.gpus if finding.backend == "nccl" else 0 for node in members]
    if len(gpus) == 1 and not gpus[0]:
        gpus = [2]  # one rank has nobody to talk to
    shares = split_ranks(gpus)
    world = sum(ranks for _, ranks in shares)
    master = members[0].address
    port = nodes.ask("free_port", {master: ()}, ANSWER_TIMEOUT_S)[master]
    pairs = pairs_of(shares)
    say(f"{world} ranks over {finding.backend}: {len(pairs)} pair(s), then all of them")
    plans = {}
    for node, (first, ranks) in zip(members, shares, strict=True):
        plans[node.address] = (RankPlan(finding.backend, master, port, first, ranks, world, tuple(pairs), timeout_s),)
        finding.homes |= dict.fromkeys(range(first, first + ranks), node.address)
    answers = nodes.ask("run_ranks", plans, timeout_s + _SPARE_S)
    for answer in answers.values():
        finding.outcomes += [] if isinstance(answer, Silent) else answer
    silent = {address: answer for address, answer in answers.items() if isinstance(answer, Silent)}
    finding.problems += problems.of_silence(silent, {})
    finding.problems += problems.of_ranks(finding.outcomes, finding.homes, timeout_s)
    finding.problems += problems.of_figures(finding.outcomes)


def pairs_of(shares: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs to time: each two nodes by their first ranks, and two ranks of each node that has them."""
    firsts = [first for first, _ in shares]
    between = [(one, other) for at, one in enumerate(firsts) for other in firsts[at + 1 :]]
    return [(first, first + 1) for first, ranks in shares if ranks > 1] + between
