"""`python -m verl_ext.cluster.look`, run as a job by `invoke launch`: waits for the nodes and says what would fail.

The last line of its output begins with `RESULT` and has for `invoke launch` what it needs to know, as JSON.

Exit status: 0 a run may start; 2 something is wrong, named with the node and the cure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_ext.cluster import compare
from verl_ext.cluster.compare import Examined
from verl_ext.cluster.facts import ROOT, Facts
from verl_ext.cluster.shape import Node, gpus_per_node, too_few_cpus
from verl_ext.errors import ConfigurationError
from verl_ext.settings import foreign

RESULT = "verl-ags-nodes: "
FACTS_TIMEOUT_S, TASK_TIMEOUT_S = 120.0, 180.0
# A network file system may show a file to others a little later (NFS caches what a folder holds for up to 60 s).
SHARED_WITHIN_S = 75.0
MARKS = ".verl-ags-marks"


def look(
    address: str,
    wanted: str,
    wait_s: float,
    node_arguments: Sequence[str],
    say: Callable[[str], None],
    shared_within_s: float = SHARED_WITHIN_S,
) -> list[Examined]:
    """Wait for the nodes and examine each.

    Args:
        address: of the cluster.
        wanted: which nodes, see `nodes.wait_for`.
        wait_s: how long for.
        node_arguments: flags of `verl_ext.cluster.facts`, the same on every node.
        say: told what goes on.
        shared_within_s: how long what one node writes may take to be seen by another.

    Raises:
        ConfigurationError: nodes did not come.
    """
    from verl_ext.cluster import nodes as cluster
    from verl_ext.cluster import on_node

    with cluster.attached(address):
        nodes = cluster.wait_for(wanted, wait_s, say)
        say(f"examining {len(nodes)} node(s)")

        def arguments(node: Node) -> tuple[Any, ...]:
            own = ["--address", node.address, "--ray-gpus", str(node.gpus)]
            return str(ROOT), [*own, *node_arguments], FACTS_TIMEOUT_S

        answers = cluster.on_each(nodes, on_node.examine, arguments, TASK_TIMEOUT_S)
        facts = [_facts(answer) for answer in answers]
        skews = [_skew(node) for node in nodes]
        marks = _marks(nodes, facts, shared_within_s)
    return [
        Examined(node, told, *skew, *mark) for node, told, skew, mark in zip(nodes, facts, skews, marks, strict=True)
    ]


def _facts(answer: tuple[int, str, str] | str) -> Facts | str:
    if isinstance(answer, str):
        return f"cannot be examined ({answer}): look at this node in the dashboard"
    status, said, complaint = answer
    if status == 0:
        return Facts(**json.loads(said.splitlines()[-1]))
    last = (complaint.strip().splitlines() or [f"status {status}"])[-1]
    if "No module named" in complaint:
        return (
            f"the project is not in {ROOT} there ({last}): use the image on every node, a checkout at the same path, "
            "or send it along with `invoke launch --upload`"
        )
    return f"cannot be examined ({last}): run `invoke doctor` there"


def _skew(node: Node) -> tuple[float | None, float]:
    """The node's clock against ours, and by how much that may be wrong: half of the time that the asking took."""
    from verl_ext.cluster import nodes as cluster
    from verl_ext.cluster import on_node

    best: tuple[float | None, float] = (None, 0.0)
    for _ in range(3):  # the first starts a process there
        began_s = time.time()
        [then_s] = cluster.on_each([node], on_node.clock, lambda _: (), TASK_TIMEOUT_S)
        took_s = time.time() - began_s
        if isinstance(then_s, float) and (best[0] is None or took_s / 2 < best[1]):
            best = then_s - (began_s + took_s / 2), took_s / 2
    return best


def _marks(
    nodes: Sequence[Node], facts: Sequence[Facts | str], shared_within_s: float
) -> list[tuple[tuple[Node, ...], str]]:
    """For each node whose mark in its data root it does not see, and why it cannot leave one."""
    from verl_ext.cluster import nodes as cluster
    from verl_ext.cluster import on_node

    # Each in its own data root: that they are not the same path is told apart from that.
    told = {node: each for node, each in zip(nodes, facts, strict=True) if isinstance(each, Facts)}
    asked, trial = list(told), uuid.uuid4().hex[:8]

    def folder(node: Node) -> str:
        return str(Path(told[node].data_root, f"{MARKS}-{trial}"))

    errors = dict(
        zip(asked, cluster.on_each(asked, on_node.leave_mark, lambda n: (folder(n), n.id), TASK_TIMEOUT_S), strict=True)
    )
    marked = [node for node in asked if not errors[node]]
    unseen: dict[Node, tuple[Node, ...]] = {}
    until_s = time.monotonic() + shared_within_s
    while True:
        seen = cluster.on_each(marked, on_node.read_marks, lambda n: (folder(n),), TASK_TIMEOUT_S)
        unseen = {
            node: tuple(other for other in marked if other.id not in names)
            for node, names in zip(marked, seen, strict=True)
        }
        if not any(unseen.values()) or time.monotonic() > until_s:
            break
        time.sleep(1)
    cluster.on_each(marked, on_node.remove_marks, lambda n: (folder(n),), TASK_TIMEOUT_S)
    return [(unseen.get(node, ()), errors.get(node, "")) for node in nodes]


def main(arguments: Sequence[str]) -> int:
    """Print the table, the problems and the result."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.cluster.look", description="Look at a cluster's nodes.")
    parser.add_argument("--nodes", default="", help="how many with GPUs, or which")
    parser.add_argument("--wait-s", type=float, default=600, help="how long they are waited for")
    parser.add_argument("--shared-within-s", type=float, default=SHARED_WITHIN_S, help="see SHARED_WITHIN_S")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of VERL_EXT_ENV_FILE")
    options = parser.parse_args(arguments)
    flags = {"--data-root": options.data_root, "--env-file": options.env_file}
    node_arguments = [word for flag, value in flags.items() if value for word in (flag, value)]
    try:
        address = foreign("RAY_ADDRESS") or "auto"
        examined = look(address, options.nodes, options.wait_s, node_arguments, _say, options.shared_within_s)
        Console(width=160).print(compare.table(examined))
        if wrong := compare.problems(examined):
            raise ConfigurationError.listing(f"{len(wrong)} problem(s) on {len(examined)} node(s)", wrong)
        each = gpus_per_node([one.node for one in examined])
        if short := too_few_cpus([one.node for one in examined]):
            raise ConfigurationError(short)
    except ConfigurationError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    told = [one.facts for one in examined if one.node.gpus and isinstance(one.facts, Facts)]
    result = {
        "nodes": len(told),
        "gpus_per_node": each,
        "gpu_name": told[0].gpus[0] if told[0].gpus else "",
        "gpu_gib": told[0].gpu_gib[0] if told[0].gpu_gib else 0.0,
    }
    _say(f"{len(examined)} node(s), alike and fit to train")
    _say(RESULT + json.dumps(result))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
