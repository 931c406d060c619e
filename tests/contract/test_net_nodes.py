"""The nodes in network namespaces that tests of several machines stand on: they are apart, and nothing stays."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
from net_nodes import NodeNetwork, node_network, start_ray

# Ends the process that reads after the bytes that it expects; says how long it took.
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
connection, _ = server.accept()
began_s, left = time.monotonic(), int(sys.argv[2])
while left > 0 and (got := connection.recv(65536)):
    left -= len(got)
print(time.monotonic() - began_s if left <= 0 else "cut off")
"""
SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3])).sendall(bytes(int(sys.argv[2])))
"""
WHO = """
import json, os, ray, sys
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
ask = ray.remote(num_cpus=0)(lambda: (ray.util.get_node_ip_address(), os.environ.get("WHOSE")))
here = {node["NodeManagerAddress"]: On(node["NodeID"], soft=False) for node in ray.nodes() if node["Alive"]}
print(json.dumps({address: ray.get(ask.options(scheduling_strategy=on).remote()) for address, on in here.items()}))
"""


def transfer(network: NodeNetwork, size_bytes: int) -> float:
    """Seconds that so many bytes take from the first node to the second."""
    sender, receiver = network.nodes
    with network.start(
        receiver, [sys.executable, "-c", RECEIVE, receiver.address, str(size_bytes)], stdout=subprocess.PIPE
    ) as receiving:
        assert receiving.stdout is not None
        assert receiving.stdout.readline() == "ready\n"
        network.run(sender, [sys.executable, "-c", SEND, receiver.address, str(size_bytes), "60"])
        return float(receiving.stdout.readline())


def test_nodes_are_apart_and_a_cable_can_be_slow_or_cut():
    with node_network(2) as network:
        first, second = network.nodes
        network.run(first, ["touch", str(network.own_folder / "mine")])
        assert network.run(second, ["ls", str(network.own_folder)]).stdout == ""
        assert (first.folder / "mine").is_file()
        network.slow(second, rate_mbit=2)
        slowly_s = transfer(network, 512 * 1024)
        assert slowly_s > 1, "128 KiB pass at once, 384 KiB at 2 Mbit/s take 1.5 s"
        network.mend(second)
        assert transfer(network, 512 * 1024) < slowly_s
        network.cut(second)
        done = network.run(first, [sys.executable, "-c", SEND, second.address, "1", "1"], check=False)
        assert done.returncode
        assert "timed out" in done.stdout or "No route to host" in done.stdout


def test_what_a_node_runs_ends_with_it_and_names_and_folders_go():
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with contextlib.suppress(ZeroDivisionError), node_network(1) as network:
        [node] = network.nodes
        process = network.start(node, [sys.executable, "-c", stubborn])
        threading.Thread(target=process.wait, daemon=True).start()  # reaps it, so that it can be gone
        network.run(node, ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"])
        left = network.pids(node)
        assert len(left) == 2
        _ = 1 / 0  # as a test that fails
    assert not any(psutil.pid_exists(pid) for pid in left)
    interfaces = {entry["ifname"] for entry in json.loads(subprocess.check_output(["ip", "-j", "link"]))}
    assert not {network.bridge, node.link} & interfaces
    assert node.namespace not in subprocess.check_output(["ip", "netns", "list"], text=True)
    assert not network.own_folder.parent.exists()


def test_two_nodes_are_one_ray_cluster():
    with node_network(2) as network:
        address = start_ray(network, {1: {"WHOSE": "the second's"}})
        head, other = network.nodes
        answer = network.run(head, [sys.executable, "-c", WHO, address, head.address]).stdout
        expected = {head.address: [head.address, None], other.address: [other.address, "the second's"]}
        assert json.loads(answer.splitlines()[-1]) == expected
        started = [psutil.Process(pid) for node in network.nodes for pid in network.pids(node)]
        network.kill(other, silently=True)
        assert network.pids(other) == []
    assert psutil.wait_procs(started, timeout=5)[1] == []
    assert not Path(f"/tmp/{network.own_folder.parent.name}").exists()
