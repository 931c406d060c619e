"""What is wrong with a network, in words: where, and the cure. Plain functions of what the nodes said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from verl_ext.network.interfaces import VARIABLES, is_loopback, variable, with_address
from verl_ext.network.node import NodeFacts, RankOutcome


def of_silence(silent: Mapping[str, str], gone: Mapping[str, str]) -> list[str]:
    """Nodes that do not answer, or that the cluster has lost."""
    found = [
        f"node {address} does not answer ({why}), though the cluster counts it: its cable, its raylet (`ray status` "
        "there), or its GPUs are taken by another job"
        for address, why in silent.items()
    ]
    return found + [
        f"node {address} was lost by the cluster ({why}): start Ray there again, or take it out"
        for address, why in gone.items()
    ]


def of_interfaces(facts: Sequence[NodeFacts], backend: str) -> list[str]:
    """Nodes on which the backend's variable chooses nothing, or nothing that leads to the others."""
    found = []
    several = len(facts) > 1
    name = variable(backend)
    for node in facts:
        value = node.variables.get(name, "")
        right = with_address(node.address, node.interfaces)
        cure = f"set {name}={right.name}" if right else f"set {name} to the one that leads to the other nodes"
        there = f"{node} has {', '.join(map(str, node.interfaces))}: {cure} in the environment of `ray start` there"
        if value:
            chosen = VARIABLES[backend](value, node.interfaces)
            if not chosen:
                found.append(f"{name}={value} chooses no interface of node {node.address}. {there}")
            elif all(not entry.up or not entry.addresses for entry in chosen):
                found.append(f"{name}={value} chooses what is down or has no address on node {node.address}. {there}")
            elif several and all(entry.is_loopback for entry in chosen):
                found.append(f"{name}={value} leads node {node.address} to itself only. {there}")
        elif backend == "gloo" and several and (not node.hostname_address or is_loopback(node.hostname_address)):
            leads = node.hostname_address or "nowhere"
            found.append(
                f"{name} is not set on node {node.address}, and gloo would take what its name {node.hostname} "
                f"leads to, which is {leads}. {there}"
            )
    return found


def of_connections(times: Mapping[str, Mapping[str, float | str]]) -> list[str]:
    """Nodes that cannot be reached: those that nobody reaches as one, else pair by pair.

    Args:
        times: by node and the other node, milliseconds, or why not.
    """
    failed = {(one, other): why for one, row in times.items() for other, why in row.items() if isinstance(why, str)}
    found = []
    for node in times:
        others = [other for other in times if other != node]
        if len(others) > 1 and all((other, node) in failed for other in others):
            why = failed[others[0], node]
            found.append(f"no other node reaches {node} ({why}): look at its cable, its interface and its firewall")
            failed = {pair: text for pair, text in failed.items() if node not in pair}
    return found + [
        f"{one} does not reach {other} ({why}): let TCP through between the nodes, on all ports or at least on those "
        "of net.ipv4.ip_local_port_range, which Ray, NCCL and gloo take theirs from"
        for (one, other), why in failed.items()
    ]


def of_ranks(outcomes: Sequence[RankOutcome], homes: Mapping[int, str], timeout_s: float) -> list[str]:
    """Ranks that failed or did not end; `homes` has each rank's node."""
    found: list[str] = []
    for outcome in outcomes:
        if outcome.has("done"):
            continue
        where = f"rank {outcome.rank} on {homes[outcome.rank]}"
        failure = next((event for event in outcome.events if event["event"] == "failed"), None)
        if failure:
            found.append(f"{where} failed at {failure['doing']}: {_with_peer(failure['error'], homes)}")
        elif outcome.ended is None:
            stage = "the others were found" if outcome.has("joined") else "it had found the others"
            when = "after" if outcome.has("joined") else "before"
            found.append(f"{where} was not done after {timeout_s:g} s and was ended, {when} {stage}")
        else:
            words = outcome.words.strip().splitlines()
            found.append(f"{where} ended with status {outcome.ended}: {words[-1] if words else 'it said nothing'}")
    return found


def of_figures(outcomes: Sequence[RankOutcome]) -> list[str]:
    """An all-reduce whose sum was wrong: memory or a link changes what it carries."""
    wrong = [event for outcome in outcomes for event in outcome.events if event.get("right") is False]
    return [
        f"the all-reduce of {event['bytes']} bytes gave a wrong sum: the hardware is at fault; try pairs of nodes alone"
        for event in wrong
    ]


def _with_peer(error: str, homes: Mapping[int, str]) -> str:
    """An error of gloo's or NCCL's that names a node's address is left as it is; both are terse."""
    error = re.sub(r"^\[[^\]]*\]\s*", "", error)  # the file and line in torch
    named = [address for address in homes.values() if address in error]
    return f"{error} (that is node {named[0]})" if named else error
