"""What the network check makes of what nodes say: which interface, who is cut off, what a rank said last."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from verl_ext.network import problems, report
from verl_ext.network.__main__ import main
from verl_ext.network.check import Finding, check, pairs_of
from verl_ext.network.interfaces import Interface, chosen_by_gloo, chosen_by_nccl
from verl_ext.network.node import NodeFacts, RankOutcome, split_ranks
from verl_ext.network.nodes import Silent

LO = Interface("lo", ("127.0.0.1",), True)
ETH0 = Interface("eth0", ("10.0.0.1",), True)
ETH1 = Interface("eth1", (), True)
BOND0 = Interface("bond0", ("192.168.0.1",), False)
DOCKER0 = Interface("docker0", ("172.17.0.1",), True)
ALL = (LO, ETH0, ETH1, BOND0, DOCKER0)


def node(last: int = 1, **variables: str) -> NodeFacts:
    address = f"10.0.0.{last}"
    eth0 = Interface("eth0", (address,), True)
    return NodeFacts(address, f"host{last}", (LO, eth0, ETH1, BOND0), variables, address, 0)


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth0", ["eth0"]),
        ("=eth", []),
        ("=eth0,bond0", ["eth0", "bond0"]),
        ("^docker,lo", ["eth0", "eth1", "bond0"]),
        ("^=docker", ["lo", "eth0", "eth1", "bond0", "docker0"]),
        ("ib", []),
    ],
)
def test_nccls_variable_chooses_as_its_guide_says(value: str, chosen: list[str]):
    assert [interface.name for interface in chosen_by_nccl(value, ALL)] == chosen


def test_gloos_variable_takes_whole_names():
    assert chosen_by_gloo("eth", ALL) == []
    assert chosen_by_gloo("eth0,docker0", ALL) == [ETH0, DOCKER0]


@pytest.mark.parametrize(
    ("backend", "value", "said"),
    [
        ("gloo", "eth7", "GLOO_SOCKET_IFNAME=eth7 chooses no interface of node 10.0.0.1"),
        ("nccl", "ib", "NCCL_SOCKET_IFNAME=ib chooses no interface"),
        ("gloo", "bond0", "chooses what is down or has no address"),
        ("gloo", "eth1", "chooses what is down or has no address"),
        ("gloo", "lo", "leads node 10.0.0.1 to itself only"),
    ],
)
def test_a_wrong_interface_is_said_with_all_that_there_are(backend: str, value: str, said: str):
    name = f"{backend.upper()}_SOCKET_IFNAME"
    [problem] = problems.of_interfaces([node(1, **{name: value}), node(2, **{name: "eth0"})], backend)
    assert said in problem
    assert "lo (127.0.0.1), eth0 (10.0.0.1), eth1 (no address), bond0 (192.168.0.1, down)" in problem
    assert f"set {name}=eth0" in problem


def test_a_hosts_name_that_leads_to_itself_is_said_for_gloo_alone():
    """Debian's /etc/hosts has 127.0.1.1 for it; NCCL does not ask."""
    first = NodeFacts("10.0.0.1", "host1", (LO, ETH0), {}, "127.0.1.1", 0)
    [problem] = problems.of_interfaces([first, node(2)], "gloo")
    assert "127.0.1.1" in problem
    assert "set GLOO_SOCKET_IFNAME=eth0" in problem
    assert problems.of_interfaces([first, node(2)], "nccl") == []
    assert problems.of_interfaces([first], "gloo") == []


def test_a_node_that_nobody_reaches_is_one_problem_and_not_many():
    a, b, c = "10.0.0.1", "10.0.0.2", "10.0.0.3"
    late = "no answer within 5 s"
    [problem] = problems.of_connections({a: {b: 0.1, c: late}, b: {a: 0.1, c: late}, c: {a: late, b: late}})
    assert problem.startswith(f"no other node reaches {c} ({late})")
    [problem] = problems.of_connections({a: {b: 0.1, c: 0.1}, b: {a: 0.1, c: late}, c: {a: 0.2, b: 0.2}})
    assert problem.startswith(f"{b} does not reach {c}")
    assert problems.of_connections({a: {b: 0.1}, b: {a: 0.1}}) == []


def outcome(rank: int, *events: dict[str, Any], ended: int | None = 0, words: str = "") -> RankOutcome:
    return RankOutcome(rank, events, ended, words)


JOINED, DONE = {"event": "joined"}, {"event": "done"}


def test_a_rank_says_how_far_it_came():
    homes = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3", 3: "10.0.0.4"}
    failed = {
        "event": "failed",
        "doing": "timing ranks 0 and 1",
        "error": "[x.cc:144] Connection closed by peer 10.0.0.3",
    }
    found = problems.of_ranks(
        [
            outcome(0, JOINED, failed, ended=1),
            outcome(1, JOINED, ended=None),
            outcome(2, ended=-9, words="one\nlast word\n"),
            outcome(3, JOINED, DONE),
        ],
        homes,
        60,
    )
    assert found == [
        "rank 0 on 10.0.0.1 failed at timing ranks 0 and 1: Connection closed by peer 10.0.0.3 (that is node 10.0.0.3)",
        "rank 1 on 10.0.0.2 was not done after 60 s and was ended, after the others were found",
        "rank 2 on 10.0.0.3 ended with status -9: last word",
    ]


def test_a_sum_that_is_wrong_is_a_problem():
    event = {"event": "all_reduce", "bytes": 1024, "seconds": 1, "right": False}
    assert "wrong sum" in problems.of_figures([outcome(0, event)])[0]


def test_ranks_and_pairs():
    shares = split_ranks([2, 1, 0])
    assert shares == [(0, 2), (2, 1), (3, 1)]
    assert pairs_of(shares) == [(0, 1), (0, 2), (0, 3), (2, 3)]


class Scripted:
    """Nodes that answer what a test says."""

    def __init__(self, answers: dict[str, dict[str, Any]], gone: dict[str, str] | None = None) -> None:
        self.addresses = list(answers["describe"])
        self.gone = gone or {}
        self.answers = answers
        self.asked: list[str] = []

    def ask(self, method: str, arguments: Any, timeout_s: float) -> dict[str, Any]:
        self.asked.append(method)
        return {address: self.answers[method][address] for address in arguments}

    def close(self) -> None:
        pass


def test_nothing_is_started_where_it_would_only_hang():
    nodes = Scripted(
        {
            "describe": {"10.0.0.1": node(1), "10.0.0.2": Silent("no answer within 45 s")},
        },
        gone={"10.0.0.3": "health check failed"},
    )
    finding = check(nodes, lambda _: None, 60)
    assert nodes.asked == ["describe"]
    assert len(finding.problems) == 2
    assert "10.0.0.2 does not answer" in finding.problems[0]
    assert "10.0.0.3 was lost by the cluster (health check failed)" in finding.problems[1]


def test_figures_are_in_the_units_that_they_name():
    finding = Finding("gloo", homes={0: "a", 1: "b", 2: "c", 3: "d"})
    finding.outcomes = [
        outcome(0, {"event": "pair", "from": 0, "to": 1, "latency_s": 5e-5, "bytes": 125_000_000, "seconds": 0.5},
                {"event": "all_reduce", "bytes": 125_000_000, "seconds": 1.0, "right": True}),
    ]  # fmt: skip
    [pair] = report.pairs(finding)
    assert (pair.latency_us, pair.gbit_per_s) == (pytest.approx(50), pytest.approx(2))
    [entry] = report.all_reduces(finding)
    # nccl-tests: the bus carries 2 (n - 1) / n of what an all-reduce sums.
    assert (entry.milliseconds, entry.algorithm_gbit_per_s, entry.bus_gbit_per_s) == (1000, 1, 1.5)
    shown = io.StringIO()
    report.show(finding, Console(file=shown, width=100))
    assert "all-reduce over 4 ranks" in shown.getvalue()
    assert json.loads(report.to_json(finding))["pairs"][0]["gbit_per_s"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://10.0.0.1:8265", "ray job submit"),
        ("ray://10.0.0.1:10001", "on one of its nodes"),
        ("10.0.0.1", "HOST:PORT"),
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
    ],
)
def test_an_address_that_is_none_is_said_at_once(address: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--address", address]) == 2
    assert said in capsys.readouterr().err
