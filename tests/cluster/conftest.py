"""Training across two Ray nodes of this machine, in network namespaces; minutes, 11 GB, and root.

Not part of `invoke test`: `invoke test --only cluster`. Both nodes share this machine's disk, as a cluster shares a
file system, and its cores, so that seconds here say little of a real network.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_run import Live
from net_nodes import RAY_PORT, NodeNetwork, node_network, start_ray

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TwoNodes:
    """Two nodes with Ray on them, and a run that is started on the first.

    Attributes:
        network: the nodes.
        address: of Ray's head.
        data_root: the run's, which both nodes see.
        flags: model and data.
    """

    network: NodeNetwork
    address: str
    data_root: Path
    flags: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "VERL_EXT_DATA_ROOT": str(self.data_root),
            "VERL_EXT_SANDBOX_BACKEND": "local",
            "RAY_ADDRESS": self.address,
        }

    def start(self, run_id: str, *overrides: str, again: bool = False) -> Live:
        """`invoke train` on the first node."""
        head = self.network.nodes[0]
        what = [f"--resume={run_id}"] if again else ["--run-id", run_id, *self.flags]
        command = [sys.executable, "-m", "verl_ext.launch", *what, *overrides]

        def begin(**options: object) -> subprocess.Popen:
            return self.network.start(head, command, self.variables, **options)

        return Live(self.data_root, run_id, begin)

    def join_again(self, index: int) -> None:
        """Start Ray anew on a node that was lost."""
        node = self.network.nodes[index]
        self.network.mend(node)
        self.network.kill(node)
        words = [f"--address={self.address}", f"--node-ip-address={node.address}", "--num-cpus=8", "--num-gpus=1"]
        self.network.run(node, ["ray", "start", *words, f"--object-store-memory={256 * 2**20}"])

    def restart(self) -> None:
        """End Ray on all nodes, the head's too, and start it anew at the same address."""
        for node in self.network.nodes:
            self.network.kill(node)
        start_ray(self.network, self.environments)

    @property
    def environments(self) -> dict[int, dict[str, str]]:
        """Of everything that Ray starts on each node."""
        # Ray gives its workers a niceness of 15, with which they would starve beside anything else on these cores.
        own = {"PYTHONPATH": str(ROOT), "VERL_EXT_DATA_ROOT": str(self.data_root), "RAY_worker_niceness": "0"}
        return dict.fromkeys(range(len(self.network.nodes)), own)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke run's model and data; AGS_TEST_DATA_ROOT goes on with another session's."""
    root = Path(os.environ.get("AGS_TEST_DATA_ROOT") or tmp_path_factory.mktemp("data-root"))
    code = (
        "from recipe.smoke.run import prepare; from verl_ext.settings import Settings; prepare(Settings.load(), print)"
    )
    environment = {**os.environ, "VERL_EXT_DATA_ROOT": str(root)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    return root


@pytest.fixture(scope="session")
def two_nodes(data_root: Path) -> Iterator[TwoNodes]:
    model = next((data_root / "cache").glob("tiny-*"))
    data = data_root / "data" / "smoke"
    flags = ("--recipe=smoke", "--hardware=cpu", f"--model={model}")
    files = (f"--train={data / 'train.parquet'}", f"--val={data / 'val.parquet'}")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(node_network(2))
        nodes = TwoNodes(network, f"{network.nodes[0].address}:{RAY_PORT}", data_root, (*flags, *files))
        start_ray(network, nodes.environments)
        yield nodes
