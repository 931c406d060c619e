"""Two machines in network namespaces: cluster-head on one, cluster-join on the other, and what a look at both finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from net_nodes import RAY_PORT, Node, NodeNetwork, node_network

from verl_ext.cluster.look import RESULT

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Two:
    """A cluster of two nodes; `run` runs one of our modules on one of them."""

    network: NodeNetwork
    run: Callable[..., CompletedProcess[str]]
    data_root: Path

    @property
    def address(self) -> str:
        return f"{self.network.nodes[0].address}:{RAY_PORT}"

    def look(self, *words: str) -> CompletedProcess[str]:
        head = self.network.nodes[0]
        return self.run(head, "verl_ext.cluster.look", *words, RAY_ADDRESS=self.address, check=False)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    data_root = tmp_path_factory.mktemp("shared")
    with node_network(2) as network:

        def run(node: Node, module: str, *words: str, check: bool = True, **variables: str) -> CompletedProcess[str]:
            given = {"PYTHONPATH": str(ROOT), "VERL_EXT_DATA_ROOT": str(data_root), **variables}
            return network.run(node, [sys.executable, "-m", module, *words], given, check=check, timeout_s=240)

        two = Two(network, run, data_root)
        head, other = network.nodes
        begun = run(head, "verl_ext.cluster.start", "head", "--gpus=1", "--cpus=4").stdout
        assert f"invoke cluster-join {two.address}" in begun
        # Its own env file: another number of sandboxes than the head's, which a look must find.
        env_file = other.folder / "node.env"
        env_file.write_text("VERL_EXT_SANDBOX_MAX_ALIVE=7\nE2B_API_KEY=ark_0123456789abcdef\n")
        on_it = network.own_folder / "node.env"
        joined = run(
            other, "verl_ext.cluster.start", "join", two.address, f"--env-file={on_it}", "--gpus=1", "--cpus=4"
        )
        assert f"{other.address} has joined {two.address}" in joined.stdout
        yield two


def test_a_look_finds_what_differs_and_waits_for_who_is_missing(two: Two):
    head, other = (node.address for node in two.network.nodes)
    done = two.look("--wait-s=5", "--nodes=2")
    assert done.returncode == 2
    assert f"VERL_EXT_SANDBOX_MAX_ALIVE differs, 10 on {head}" in done.stdout
    assert f"E2B_API_KEY differs, not set on {head}" in done.stdout
    assert "set on " + other in done.stdout
    assert "ark_0123456789abcdef" not in done.stdout
    for fine in ("Python", "torch", "vllm", "the lock", "the project's code", "the data root", "clock is"):
        assert f"{fine} differs" not in done.stdout
    done = two.look("--wait-s=1", "--nodes=3")
    assert done.returncode == 2
    assert f"after 1 s 1 of 3 nodes with GPUs missing ({head}" in done.stdout
    assert other in done.stdout


def test_with_one_env_file_on_shared_storage_the_nodes_are_alike(two: Two):
    shared = two.data_root / "all.env"
    shared.write_text("VERL_EXT_SANDBOX_MAX_ALIVE=7\n")
    done = two.look("--nodes=2", f"--env-file={shared}")
    assert done.returncode == 0, done.stdout
    result = done.stdout.splitlines()[-1]
    assert json.loads(result.removeprefix(RESULT)) == {"nodes": 2, "gpus_per_node": 1, "gpu_name": "", "gpu_gib": 0.0}
    assert not list(two.data_root.glob(".verl-ags-*")), "the marks are gone"


def test_a_folder_that_only_has_the_same_name_is_not_shared(two: Two):
    private = two.network.own_folder / "root"
    shared = two.data_root / "all.env"
    shared.write_text("VERL_EXT_SANDBOX_MAX_ALIVE=7\n")
    done = two.look(f"--data-root={private}", f"--env-file={shared}", "--shared-within-s=1")
    assert done.returncode == 2
    assert f"does not see in {private} what" in done.stdout
    assert done.stdout.count("so it is not shared") == 2


def test_a_run_takes_its_size_from_the_cluster(two: Two):
    head = two.network.nodes[0]
    done = two.run(head, "verl_ext.launch", "--hardware=cpu", "--model=/no/model", RAY_ADDRESS=two.address, check=False)
    assert done.returncode == 2
    assert "2 node(s) with 1 GPU(s) each" in done.stdout
    assert "no model in /no/model" in done.stdout
    assert "unset RAY_ADDRESS" not in done.stdout
    done = two.run(head, "verl_ext.launch", "--hardware=cpu", RAY_ADDRESS="http://127.0.0.1:8265", check=False)
    assert done.returncode == 2
    assert "`invoke launch` submits one" in done.stdout


def test_a_node_leaves_alone_and_who_is_gone_is_named(two: Two):  # the last: one node is less after it
    head, other = two.network.nodes
    assert "processes ended" in two.run(other, "verl_ext.cluster.start", "stop").stdout
    assert two.network.pids(other) == []
    assert "this machine is a node of it" in two.run(head, "verl_ext.cluster.start", "status").stdout
    again = two.run(other, "verl_ext.cluster.start", "stop").stdout
    assert "no node that `invoke cluster-head` or `cluster-join` started runs here" in again
    done = two.look("--wait-s=1", "--nodes=2")
    assert f"gone: {other.address}" in done.stdout
    assert "1 of 2 nodes with GPUs missing" in done.stdout
    two.network.cut(head)
    done = two.run(other, "verl_ext.cluster.start", "join", two.address, check=False)
    assert done.returncode == 2
    assert f"nobody answers at {two.address}" in done.stdout
    two.network.mend(head)
    two.run(head, "verl_ext.cluster.start", "stop")
    assert two.network.pids(head) == []
