"""`python -m verl_ext.cluster.start head|join|status|stop`, called by the tasks `cluster-...`: Ray's nodes, by hand.

Thin around `ray start`: what is added is the environment that all workers of the node inherit, and a note of which
processes are ours, so that `stop` ends those and nobody else's.

Exit status: 0; 2 something is wrong; else that of Ray's own command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from verl_ext import cuda_compat
from verl_ext.errors import ConfigurationError, VerlAgsError
from verl_ext.network.interfaces import VARIABLES, interfaces, variable, with_address, wrong_choice
from verl_ext.preflight.machine import port_error
from verl_ext.settings import Settings, foreign

HEAD_PORT, DASHBOARD_PORT = 6379, 8265
AGENT_PORT = 52365  # of the process that starts jobs; without it Ray's node runs, and takes none
# In the environment of every process of the node, for `stop` to know them by.
MARK = "VERL_AGS_NODE"
GRACE_S = 10.0
DASHBOARD_WITHIN_S = 180.0
_SETTLED_S = 5.0
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# What every node of a cluster of ours has; a platform that starts Ray itself should set the same.
# Not in it: RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper, which makes every job end with status 0 (Ray
# issue 49119); an engine whose worker was killed ends by itself instead, see verl_ext.engine.process.
# Source: ray 2.49.2 dashboard/modules/job/job_supervisor.py, dashboard/consts.py.
NODE_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default of 15 would let any other process of the machine go first.
    "RAY_worker_niceness": "0",
    # The dashboard gives up where its nine processes are not all ready in 30 s, which a busy machine may need.
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "150",
    # A run that is stopped ends its sandboxes itself if it is given the time; Ray's default is 3.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
}


def node_environment(
    settings: Settings, environ: Mapping[str, str], address: str, say: Callable[[str], None]
) -> dict[str, str]:
    """The environment for `ray start`: of this process, and what a run needs of every worker on this node.

    Args:
        settings: of this node.
        environ: of this process.
        address: of this node.
        say: told what is changed of what the user set.

    Raises:
        ConfigurationError: NCCL or Gloo are told of an interface that is not here.
    """
    values = {**environ, **{name: value for name, value in NODE_ENVIRONMENT.items() if name not in environ}}
    values["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    decision = cuda_compat.decide(environ, settings.cuda_compat)
    if decision.driver or decision.trouble:
        say(cuda_compat.line(decision))
    values = cuda_compat.environment(decision, values)
    if settings.env_file:  # each worker reads it for itself; the secrets in it go into no process's environment
        values["VERL_EXT_ENV_FILE"] = str(settings.env_file)
    values["VERL_EXT_DATA_ROOT"] = str(settings.data_root.absolute())
    parts = [part for part in environ.get(_ALLOCATOR, "").split(",") if part]
    if kept := [part for part in parts if not part.strip().lower().startswith("expandable_segments")]:
        values[_ALLOCATOR] = ",".join(kept)
    elif parts:
        del values[_ALLOCATOR]
    if len(kept) < len(parts):
        say(f"{_ALLOCATOR}: expandable_segments is taken out, which vLLM's sleep mode refuses")
    interface = with_address(address, interfaces())
    for backend in VARIABLES:
        if wrong := wrong_choice(backend, environ.get(variable(backend), ""), interfaces()):
            raise ConfigurationError(wrong)
    # Gloo would look up this host's name, which on many machines is 127.0.1.1; NCCL looks for itself.
    if interface and not environ.get("GLOO_SOCKET_IFNAME"):
        values["GLOO_SOCKET_IFNAME"] = interface.name
    return values


def own_address(towards: str) -> str:
    """The address of this machine that the way to another begins at; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
        except OSError as error:
            raise ConfigurationError(
                f"this machine has no way to {towards} ({error}): say its own address with --node-address"
            ) from error


def head(options: argparse.Namespace, settings: Settings, say: Callable[[str], None]) -> int:
    """Start Ray's head here.

    Raises:
        ConfigurationError: a node of ours runs here, or a port is taken.
    """
    _refuse_second()
    address = options.node_address or own_address("192.0.2.1")  # of the documentation's network: nobody's
    for port, flag in ((options.port, "--port"), (options.dashboard_port, "--dashboard-port")):
        if error := port_error(port):
            raise ConfigurationError(
                f"port {port} is taken ({error}): another Ray may run here (ray status), or choose one with {flag}"
            )
    words = ["--head", f"--port={options.port}", f"--dashboard-host={options.dashboard_host}",
             f"--dashboard-port={options.dashboard_port}"]  # fmt: skip
    status = _start(words, address, options, settings, say)
    if status == 0:
        _wait_for_dashboard(f"http://{_reached_at(options.dashboard_host, address)}:{options.dashboard_port}")
        say(f"head of the cluster: {address}:{options.port}")
        say(f"on each other machine:  invoke cluster-join {address}:{options.port}")
        say(f"dashboard (jobs, nodes, logs): http://{options.dashboard_host}:{options.dashboard_port}")
        if options.dashboard_host.startswith("127."):
            port = options.dashboard_port
            say(f"from your own machine:  ssh -L {port}:127.0.0.1:{port} {address}  and open http://127.0.0.1:{port}")
        say("train:  invoke launch")
    return status


def join(options: argparse.Namespace, settings: Settings, say: Callable[[str], None]) -> int:
    """Join this machine to a cluster.

    Raises:
        ConfigurationError: a node of ours runs here, or nobody answers at the head's address.
    """
    _refuse_second()
    host, _, port = options.address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"{options.address!r} is no address: HOST:PORT, as cluster-head said it ({HEAD_PORT})")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
        address = options.node_address or own_address(host)
    except OSError as error:
        raise ConfigurationError(
            f"nobody answers at {options.address} ({error}): is `invoke cluster-head` running there, and does a "
            "firewall let this machine in? Ray needs all ports between the nodes"
        ) from error
    status = _start([f"--address={options.address}"], address, options, settings, say)
    if status == 0:
        say(f"{address} has joined {options.address}; `invoke cluster-status` shows all, `invoke cluster-stop` leaves")
    return status


def _reached_at(host: str, address: str) -> str:
    return address if host in ("0.0.0.0", "::") else host  # noqa: S104 - asked for by the user


def _wait_for_dashboard(url: str) -> None:
    """Until it answers. `ray start` itself gives up after 20 s, which a busy machine needs for the imports alone.

    Raises:
        ConfigurationError: it does not come; the node runs, but takes no jobs.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    until_s = time.monotonic() + DASHBOARD_WITHIN_S
    while True:
        try:
            direct.open(f"{url}/api/version", timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() > until_s:
                raise ConfigurationError(
                    f"Ray runs here, and its dashboard does not answer at {url} ({error}), so no job can be submitted: "
                    "its reasons are in dashboard.log in Ray's session folder; then `invoke cluster-stop`"
                ) from error
        time.sleep(0.5)


def _start(
    words: Sequence[str], address: str, options: argparse.Namespace, settings: Settings, say: Callable[[str], None]
) -> int:
    environment = node_environment(settings, os.environ, address, say)  # noqa: TID251 - handed on
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, f"--node-ip-address={address}",
               f"--dashboard-agent-listen-port={_free_port(AGENT_PORT)}", "--disable-usage-stats"]  # fmt: skip
    command += [f"--num-gpus={options.gpus}"] if options.gpus else []
    command += [f"--num-cpus={options.cpus}"] if options.cpus else []
    _raise_open_files()
    done = subprocess.run(
        command, env={**environment, MARK: mark}, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        _end(_marked(mark))
        said = settings.redacted((done.stdout + done.stderr).strip())
        sys.stderr.write(f"ray start did not succeed (status {done.returncode}); its words:\n{said}\n")
        return done.returncode
    path = _note()
    path.parent.mkdir(parents=True, exist_ok=True)
    joined = options.address if options.what == "join" else f"{address}:{options.port}"
    note = {"mark": mark, "node": address, "cluster": joined}
    path.write_text(json.dumps(note) + "\n", encoding="utf-8")
    return 0


def _free_port(wanted: int) -> int:
    """The port, or any other that is free if another Ray of this machine has it."""
    if not port_error(wanted):
        return wanted
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def status(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Show the cluster: Ray's own word, and what of it is ours here."""
    if note := _read_note():
        say(f"this machine is a node of it: {note['node']}, {len(_marked(note['mark']))} processes")
    known = options.address or foreign("RAY_ADDRESS") or (note or {}).get("cluster", "")
    words = [f"--address={known}"] if known and "://" not in known else []
    return subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "status", *words], check=False).returncode


def stop(say: Callable[[str], None]) -> int:
    """End the node that was started here, and nothing else.

    Raises:
        ConfigurationError: a process of it survives.
    """
    note = _read_note()
    if note is None:
        say("no node that `invoke cluster-head` or `cluster-join` started runs here")
        return 0
    ours = _marked(note["mark"])
    ended = _end(ours)
    if left := [each for each in ours if _lives(each)]:
        raise ConfigurationError(
            f"processes {', '.join(str(each.pid) for each in left)} survive being killed: look at them with ps, they "
            "may wait for a device or a disk"
        )
    _note().unlink(missing_ok=True)
    say(f"{note['node']} has left the cluster; {ended} processes ended")
    return 0


def _marked(mark: str) -> list[psutil.Process]:
    """The processes that were started with a mark, and all that came from them.

    Children inherit the mark, but Ray's workers write their title over it.
    """
    found: dict[psutil.Process, None] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found |= dict.fromkeys([process, *process.children(recursive=True)])
        except (psutil.Error, OSError):
            continue  # of another user, or gone
    return [process for process in found if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    """Whether it does; one that is dead and that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(processes: Sequence[psutil.Process]) -> int:
    """Ask them to end, kill those that have not; how many there were."""
    for ask, patience_s in ((psutil.Process.terminate, GRACE_S), (psutil.Process.kill, _SETTLED_S)):
        for process in processes:
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        until_s = time.monotonic() + patience_s
        while any(map(_lives, processes)) and time.monotonic() < until_s:
            time.sleep(0.1)
    return len(processes)


def _refuse_second() -> None:
    note = _read_note()
    if note and _marked(note["mark"]):
        raise ConfigurationError(f"this machine is a node already ({note['node']}): `invoke cluster-stop` ends it")


def _note() -> Path:
    """The file that says which processes are ours, beside Ray's own (RAY_TMPDIR, TMPDIR, /tmp)."""
    folder = foreign("RAY_TMPDIR") or foreign("TMPDIR") or "/tmp"  # noqa: S108 - Ray's place
    return Path(folder, f"verl-ags-node-{os.getuid()}.json")


def _read_note() -> dict[str, Any] | None:
    try:
        path = _note()
        if path.stat().st_uid != os.getuid():
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _raise_open_files() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Start, show or stop a node."""
    options = _parser().parse_args(arguments)
    try:
        if options.what == "status":
            return status(options, _say)
        if options.what == "stop":
            return stop(_say)
        if not shutil.which("ray", path=str(Path(sys.executable).parent)):
            raise ConfigurationError("Ray is not installed here: invoke setup --stack gpu (or cpu)")
        settings = Settings.load(options.env_file or None)
        return (head if options.what == "head" else join)(options, settings, _say)
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="invoke cluster-...", description="A node of a Ray cluster.")
    kinds = parser.add_subparsers(dest="what", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--node-address", default="", help="of this machine, if it has several")
    both.add_argument("--env-file", default="", help="in place of ./.env")
    both.add_argument("--gpus", default="", help="that Ray gives away; default: all that are here")
    both.add_argument("--cpus", default="", help="likewise")
    at_head = kinds.add_parser("head", parents=[both])
    at_head.add_argument("--port", type=int, default=HEAD_PORT)
    at_head.add_argument("--dashboard-host", default="127.0.0.1")
    at_head.add_argument("--dashboard-port", type=int, default=DASHBOARD_PORT)
    kinds.add_parser("join", parents=[both]).add_argument("address")
    kinds.add_parser("status").add_argument("--address", default="")
    kinds.add_parser("stop")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
