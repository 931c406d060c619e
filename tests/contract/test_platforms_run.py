"""What is rendered, run: the batch script over two nodes, and TI-ONE's route without an image of ours as a Ray job.

Slurm's own programs are stood in for: `scontrol show hostnames`, `srun` that starts its tasks on nodes in network
namespaces, as srun starts them on machines, and `scancel --signal=TERM` that signals them. Ray, the script and its
bash are real.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from net_nodes import node_network

from verl_ext.platforms.facts import gather
from verl_ext.platforms.render import PLATFORMS, render

ROOT = Path(__file__).resolve().parents[2]
CANARY = "canary0123456789abcdef"
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys
enter = {enter!r}  # by node: how a process gets there
words = sys.argv[1:]
count = next(number for number, word in enumerate(words) if not word.startswith("--"))
tasks = [
    subprocess.Popen([*way, *words[count:]], env=dict(os.environ, SLURM_PROCID=str(number)))
    for number, way in enumerate(enter.values())
]
pathlib.Path({pid!r}).write_text(str(os.getpid()))
signal.signal(signal.SIGUSR1, lambda *_: [task.terminate() for task in tasks])
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCANCEL = """#!/bin/sh
[ "$*" = "--signal=TERM 7" ] && exec kill -USR1 "$(cat {pid})"
"""
# In place of the run: is the cluster there, as many nodes as asked for? Ends with a status of its own.
RUN = """#!{python}
import os, sys, time
import ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="error")
until_s = time.monotonic() + 60
while len([node for node in ray.nodes() if node["Alive"]]) < 2 and time.monotonic() < until_s:
    time.sleep(0.5)
print("nodes", *sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
print("resources", ray.cluster_resources()["GPU"], ray.cluster_resources()["CPU"])
print("asked", os.environ["PYTHONPATH"], *sys.argv[1:], flush=True)
sys.exit(7)
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_batch_script_makes_a_cluster_of_its_nodes_and_ends_with_the_runs_status(tmp_path: Path):
    interpreter = sys.executable
    with node_network(2) as network:
        enter = {}
        for node in network.nodes:
            mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
            enter[node.address] = ["ip", "netns", "exec", node.namespace, "sh", "-c", mount, "sh", str(node.folder),
                                   str(network.own_folder)]  # fmt: skip
        programs = tmp_path / "bin"
        pid = str(tmp_path / "srun.pid")
        program(programs / "srun", SRUN.format(python=interpreter, enter=enter, pid=pid))
        program(programs / "scancel", SCANCEL.format(pid=pid))
        program(programs / "scontrol", f"#!/bin/sh\nprintf '%s\\n' {' '.join(enter)}\n")
        program(programs / "run", RUN.format(python=interpreter))
        instead = f'case "$*" in "-m verl_ext.launch "*) exec {programs}/run "$@";; esac'
        program(programs / "python", f'#!/bin/sh\n{instead}\nexec {interpreter} "$@"\n')
        program(programs / "ray", f'#!/bin/sh\nexec {Path(interpreter).with_name("ray")} "$@"\n')
        asked = {**PLATFORMS["slurm"].defaults, "data_root": f"{tmp_path}/root", "env_file": f"{tmp_path}/.env",
                 "python": f"{programs}/python"}  # fmt: skip
        [text] = render("slurm", gather(hardware="cpu", nodes=2, **asked)).values()
        program(tmp_path / "train.sbatch", text)
        head, other = network.nodes
        environment = {
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_ID": "7",
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        done = network.run(head, ["bash", str(tmp_path / "train.sbatch")], environment, check=False, timeout_s=200)
        assert done.returncode == 7, done.stdout
        assert f"nodes {head.address} {other.address}" in done.stdout
        assert "resources 2.0 16.0" in done.stdout
        assert f"asked {ROOT} -m verl_ext.launch --hardware=cpu --nodes=2" in done.stdout
        left = [psutil.Process(pid).cmdline() for node in network.nodes for pid in network.pids(node)]
        assert [words for words in left if "ray" in " ".join(words)] == []


@pytest.fixture
def outside_any_environment(tmp_path: Path) -> Iterator[str]:
    """A Ray head of an interpreter that is in no virtual environment, as a built-in image has it: its dashboard.

    In one, Ray would copy the whole of it, gigabytes, for each RuntimeEnv with pip.
    """
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VERL_EXT_", "E2B_"))}
    folder = Path(f"/tmp/ti-{os.getpid()}")  # short: sockets lie below it
    environment = {
        **kept,
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{base.parent}:/usr/bin:/bin",
    }
    environment.pop("VIRTUAL_ENV", None)
    folder.mkdir()
    ray = [str(base), "-m", "ray.scripts.scripts"]
    words = ["start", "--head", "--port=0", "--dashboard-port=0", "--num-cpus=2", "--block",
             "--object-store-memory=100000000"]  # fmt: skip
    log = tmp_path / "ray.log"
    with log.open("w") as said:
        head = subprocess.Popen([*ray, *words], env=environment, stdout=said, stderr=said, cwd=tmp_path)
    try:
        yield dashboard(folder, log)
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            process.kill()
        head.wait()
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def dashboard(folder: Path, log: Path) -> str:
    """Where jobs are submitted, from Ray's own store: `ray start` itself waits for it for 20 s only."""
    from ray._raylet import GcsClient

    note = folder / "ray" / "ray_current_cluster"
    until_s = time.monotonic() + 180
    while time.monotonic() < until_s:
        if note.is_file():
            store = GcsClient(address=note.read_text().strip())
            if found := store.internal_kv_get(b"dashboard", b"dashboard", timeout=10):
                return "http://" + found.decode()
        time.sleep(1)
    raise AssertionError(f"no dashboard within 180 s:\n{log.read_text()}")


def test_the_built_in_image_runs_the_project_from_its_runtime_env(outside_any_environment: str, tmp_path: Path):
    from ray.job_submission import JobStatus, JobSubmissionClient

    env_file = tmp_path / "shared.env"
    env_file.write_text(f"E2B_API_KEY={CANARY}\n")
    asked = {**PLATFORMS["tione-builtin"].defaults, "working_dir": str(ROOT), "env_file": str(env_file),
             "data_root": str(tmp_path / "root")}  # fmt: skip
    files = render("tione-builtin", gather(hardware="h200x8", nodes=1, **asked))
    start = shlex.split(files["start-command.sh"].splitlines()[-1])
    # The rendered command, with a module of the project's that needs no GPU.
    assert start[:3] == ["python", "-m", "verl_ext.launch"]
    settings = "python -m verl_ext.settings"
    look = (
        "import importlib.metadata, os, ray, sys, verl_ext; ray.init(log_to_driver=False); "
        "f = ray.remote(lambda: (importlib.import_module('verl_ext').__file__, importlib.metadata.version('e2b'), "
        "sys.prefix != sys.base_prefix, os.environ['VERL_EXT_ENV_FILE'])); print('task', *ray.get(f.remote()))"
    )
    client = JobSubmissionClient(outside_any_environment)
    job = client.submit_job(
        entrypoint=f"{settings} && python -c {shlex.quote('import importlib; ' + look)}",
        runtime_env=json.loads(files["runtime-env.json"]),
    )
    until_s = time.monotonic() + 240
    while not (status := client.get_job_status(job)).is_terminal() and time.monotonic() < until_s:
        time.sleep(1)
    logs = client.get_job_logs(job)
    assert status == JobStatus.SUCCEEDED, f"{client.get_job_info(job).message}\n{logs}"
    assert "E2B_API_KEY=set" in logs
    [task] = [line.split() for line in logs.splitlines() if line.startswith("task ")]
    assert "working_dir_files" in task[1]  # what was sent, not the checkout
    assert task[2:] == ["2.50.0", "True", str(env_file)]
    assert CANARY not in f"{client.list_jobs()} {logs}"
