"""Several nodes on one machine: network namespaces on a bridge of their own, and Ray on them. Needs root and iproute2.

    with node_network(2) as network:
        head, other = network.nodes
        address = start_ray(network)              # "10.x.y.1:6379", each node with 8 CPUs and 1 made-up GPU
        network.run(head, ["ray", "status"])
        network.slow(other, rate_mbit=100)
        network.cut(other)

A node has an address, a loopback and processes of its own. It shares files, memory and the process table with this
machine, but for `network.own_folder`: one path that is another folder on each node. Ray's session folder is below it,
since a worker takes the head's path for its own, and two raylets would share their sockets there. This machine is
`network.gateway` to the nodes; nothing else can be reached from them.

Where the kernel lets nobody make namespaces the test is skipped, with what it said.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

GRACE_S = 5.0
RAY_PORT = 6379
_INTERFACE = "eth0"
_NUMBERS = itertools.count()
# A node's command begins in it: `ip netns exec` gives each a mount namespace, so the bind mount is the node's alone.
_ENTER = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
# What would lead a node elsewhere: to another Ray, or to a proxy that it cannot reach.
_NOT_FOR_NODES = ("RAY_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        index: from 0.
        address: IPv4, which the other nodes and this machine reach.
        namespace: its name for `ip netns`.
        link: its cable's end on this machine.
        folder: what `own_folder` is on it, seen from this machine.
    """

    index: int
    address: str
    namespace: str
    link: str
    folder: Path


@dataclass(frozen=True)
class NodeNetwork:
    """The nodes, their bridge, and what one does to them.

    Attributes:
        gateway: this machine's address on the bridge.
        own_folder: the path that each node has for itself.
    """

    bridge: str
    gateway: str
    own_folder: Path
    nodes: list[Node] = field(default_factory=list)

    def environment(self, node: Node, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of a process on a node: this process's, what leads it to the right interface, and `changes`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_NODES)}
        own = {
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            "NCCL_SOCKET_IFNAME": _INTERFACE,
            "VLLM_HOST_IP": node.address,
            "RAY_TMPDIR": str(self.own_folder),  # Ray's own name for the folder that its session folder is made in
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }
        return {**kept, **own, **(changes or {})}

    def start(
        self, node: Node, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on a node; `options` go to Popen. Its pid is the command's."""
        entering = ["ip", "netns", "exec", node.namespace, "sh", "-c", _ENTER, "sh"]
        return subprocess.Popen(
            [*entering, str(node.folder), str(self.own_folder), *command],
            env=self.environment(node, environment),
            text=True,
            **options,
        )

    def run(
        self,
        node: Node,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 120,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end; standard error is in `stdout` too.

        Raises:
            AssertionError: it ended with another status than 0, and `check`.
            subprocess.TimeoutExpired: it was ended after `timeout_s`.
        """
        # A file and not a pipe, which a daemon that the command leaves behind would hold open.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            process = self.start(node, command, environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
            try:
                status = process.wait(timeout_s)
            finally:
                process.kill()
                process.wait()
                said.seek(0)
                text = said.read()
        assert not check or status == 0, f"{' '.join(command)} on {node.address}: status {status}\n{text}"
        return subprocess.CompletedProcess(command, status, text)

    def cut(self, node: Node) -> None:
        """Pull the cable: nothing arrives and nobody is told."""
        _ip("link", "set", node.link, "down")

    def mend(self, node: Node) -> None:
        """Undo `cut` and `slow`."""
        _ip("link", "set", node.link, "up")
        for prefix, device in self._ends(node):
            subprocess.run([*prefix, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)

    def slow(self, node: Node, *, rate_mbit: float = 0, delay_ms: float = 0, loss_percent: float = 0) -> None:
        """Make a node's cable slow, in each direction; a value of 0 is no limit.

        A rate alone can be had everywhere; where the kernel was built without netem the test is skipped at the others.
        """
        rate = ["rate", f"{rate_mbit}mbit"] if rate_mbit else []
        if delay_ms or loss_percent:
            # netem holds what it delays: its default of 1000 packets would be a loss that nobody asked for.
            rule = ["netem", "limit", "100000", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%", *rate]
        else:
            rule = ["tbf", *rate, "burst", "128kb", "latency", "400ms"]
        for prefix, device in self._ends(node):
            command = [*prefix, "tc", "qdisc", "replace", "dev", device, "root", *rule]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "qdisc kind is unknown" in done.stderr:
                pytest.skip(f"this kernel has no {rule[0]}, so no cable can be slow that way")
            assert done.returncode == 0, done.stderr

    def kill(self, node: Node, *, silently: bool = False) -> None:
        """Kill every process of a node at once.

        Args:
            node: which.
            silently: as when the power goes: the cable is cut before, so that no peer sees a connection close.
        """
        if silently:
            self.cut(node)
        _end(node.namespace, grace_s=0)

    def pids(self, node: Node) -> list[int]:
        """Every process of a node."""
        return _pids(node.namespace)

    def _ends(self, node: Node) -> list[tuple[list[str], str]]:
        return [([], node.link), (["ip", "netns", "exec", node.namespace], _INTERFACE)]


@contextlib.contextmanager
def node_network(count: int) -> Iterator[NodeNetwork]:
    """`count` nodes, empty; in the end every process in them, the namespaces, the bridge and the folders are gone."""
    unavailable = _why_not()
    if unavailable:
        pytest.skip(f"no nodes in network namespaces here: {unavailable}")
    # At most 15 characters name an interface; the process id makes the names this process's.
    name = f"ags{os.getpid()}n{next(_NUMBERS)}"
    folders = Path(tempfile.mkdtemp(prefix="net-", dir="/tmp"))  # short: sockets lie below it
    with contextlib.ExitStack() as made:
        made.callback(shutil.rmtree, folders, ignore_errors=True)
        subnet = _free_subnet()
        network = NodeNetwork(f"b{name}", f"{subnet}.254", folders / "own")
        network.own_folder.mkdir()
        _ip("link", "add", network.bridge, "type", "bridge")
        made.callback(_ip, "link", "del", network.bridge)
        _ip("addr", "add", f"{network.gateway}/24", "dev", network.bridge)
        _ip("link", "set", network.bridge, "up")
        for index in range(count):
            node = Node(index, f"{subnet}.{index + 1}", f"{name}-{index}", f"v{index}{name}", folders / str(index))
            node.folder.mkdir()
            _ip("netns", "add", node.namespace)
            made.callback(_remove, node)
            _plug_in(node, network)
            network.nodes.append(node)
        yield network


def start_ray(
    network: NodeNetwork,
    environments: Mapping[int, Mapping[str, str]] | None = None,
    *,
    cpus: int = 8,
    gpus: int = 1,
    object_store_mib: int = 256,
    dashboard: bool = False,
) -> str:
    """A Ray cluster over all nodes, the first as head; its address.

    Args:
        network: the nodes.
        environments: by node's index, for every process that Ray starts there.
        cpus: that each node says it has.
        gpus: likewise; nobody looks whether there are any.
        object_store_mib: of each node.
        dashboard: whether the head has one; its nine processes cost a minute of a core at the start.
    """
    address = f"{network.nodes[0].address}:{RAY_PORT}"
    for node in network.nodes:
        at_head = ["--head", f"--port={RAY_PORT}", f"--include-dashboard={dashboard}"]
        role = at_head if node.index == 0 else [f"--address={address}"]
        sizes = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--object-store-memory={object_store_mib * 2**20}"]
        words = ["ray", "start", *role, f"--node-ip-address={node.address}", *sizes, "--disable-usage-stats"]
        network.run(node, words, (environments or {}).get(node.index))
    return address


def _why_not() -> str:
    """Why no namespace can be made here, "" if one can."""
    if missing := [program for program in ("ip", "tc", "mount") if not shutil.which(program)]:
        return f"{', '.join(missing)} not found (iproute2, util-linux)"
    if os.geteuid():
        return "only root can make them"
    namespace, bridge = f"ags{os.getpid()}probe", f"bags{os.getpid()}"
    try:
        _ip("netns", "add", namespace)
        try:
            # Inside, where it goes with the namespace; a veth pair or an address fails for no other reason than these.
            _ip("-n", namespace, "link", "add", bridge, "type", "bridge")
            _call("ip", "netns", "exec", namespace, "true")
        finally:
            _ip("netns", "del", namespace)
    except AssertionError as error:
        return str(error)
    return ""


def _free_subnet() -> str:
    """The first three bytes of a /24 that no interface of this machine is in."""
    taken = {
        entry["local"].rpartition(".")[0]
        for device in json.loads(_ip("-j", "-4", "addr"))
        for entry in device["addr_info"]
    }
    # Where two test sessions begin at once, they begin to look in different places.
    numbers = ((os.getpid() + step) % 2**14 for step in range(2**14))
    return next(found for n in numbers if (found := f"10.{64 + n // 256}.{n % 256}") not in taken)


def _plug_in(node: Node, network: NodeNetwork) -> None:
    peer = f"p{node.link}"[:15]
    inside = ["ip", "-n", node.namespace]
    _ip("link", "add", node.link, "type", "veth", "peer", "name", peer, "netns", node.namespace)
    _ip("link", "set", node.link, "master", network.bridge, "up")
    _call(*inside, "link", "set", peer, "name", _INTERFACE)
    _call(*inside, "addr", "add", f"{node.address}/24", "dev", _INTERFACE)
    _call(*inside, "link", "set", _INTERFACE, "up")
    _call(*inside, "link", "set", "lo", "up")
    # Ray asks which address leads outside, and takes 127.0.0.1 where none does.
    _call(*inside, "route", "add", "default", "via", network.gateway)


def _remove(node: Node) -> None:
    _end(node.namespace, grace_s=GRACE_S)
    # With its namespace the cable would go later, when the kernel comes to it.
    subprocess.run(["ip", "link", "del", node.link], capture_output=True, check=False)
    _ip("netns", "del", node.namespace)


def _end(namespace: str, grace_s: float) -> None:
    """End all that runs in a namespace: asked first if there is time for it, then killed until nothing is left."""
    if grace_s:
        asked = _signal(namespace, signal.SIGTERM)
        psutil.wait_procs(asked, timeout=grace_s)
    until_s = time.monotonic() + GRACE_S
    while killed := _signal(namespace, signal.SIGKILL):
        psutil.wait_procs(killed, timeout=1)
        assert time.monotonic() < until_s, f"these survive being killed in {namespace}: {killed}"


def _signal(namespace: str, signum: int) -> list[psutil.Process]:
    found = []
    for pid in _pids(namespace):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(signum)
                found.append(process)
    return found


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
