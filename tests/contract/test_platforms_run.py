"""What is rendered, run: the batch script over two nodes, and TI-ONE's route without an image of ours in Ray.

Slurm's own programs are stood in for: `scontrol show hostnames`, `srun` that starts its tasks on nodes in network
namespaces, as srun starts them on machines, and `scancel --signal=TERM` that signals them. Ray, the script and its
bash are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

import psutil
from net_nodes import NodeNetwork, node_network

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


def rays(network: NodeNetwork) -> list[str]:
    """Command lines of what is left of Ray on the nodes."""
    found = []
    for pid in [pid for node in network.nodes for pid in network.pids(node)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(psutil.Process(pid).cmdline()))
    return [line for line in found if "ray" in line]


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
        # The dashboard's own processes see that it is gone a moment later.
        until_s = time.monotonic() + 60
        while (left := rays(network)) and time.monotonic() < until_s:
            time.sleep(0.5)
        assert left == []


# As a job's driver does it: everything below ray.init runs in what RuntimeEnv asks for.
DRIVER = """
import json, pathlib, sys
import ray
wanted = json.loads(pathlib.Path(sys.argv[1]).read_text())
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8, _temp_dir=sys.argv[2],
         runtime_env=wanted)

@ray.remote
def look():
    import importlib.metadata, os, subprocess, sys, verl_ext
    said = subprocess.run(["python", "-m", "verl_ext.settings"], capture_output=True, text=True)
    return {
        "package": verl_ext.__file__,
        "versions": {name: importlib.metadata.version(name) for name in ("e2b", "invoke", "math-verify")},
        "prefix": sys.prefix,
        "settings": said.stdout + said.stderr,
        "history": os.path.exists(".git") or os.path.exists("tests"),
    }

print(json.dumps(ray.get(look.remote())))
"""


def test_the_built_in_image_runs_the_project_from_its_runtime_env(tmp_path: Path):
    """In an environment of a few files that leads to this one: Ray copies the environment that it is in."""
    env_file = tmp_path / "shared.env"
    env_file.write_text(f"E2B_API_KEY={CANARY}\n")
    asked = {**PLATFORMS["tione-builtin"].defaults, "working_dir": str(ROOT), "env_file": str(env_file),
             "data_root": str(tmp_path / "root")}  # fmt: skip
    wanted = tmp_path / "runtime-env.json"
    wanted.write_text(render("tione-builtin", gather(hardware="h200x8", nodes=1, **asked))["runtime-env.json"])
    image = tmp_path / "image"
    venv.create(image, symlinks=True, with_pip=True)
    [packages] = image.glob("lib/python*/site-packages")
    (packages / "image.pth").write_text(sysconfig.get_path("purelib"))
    foreign = ("RAY_", "VERL_EXT_", "E2B_", "VIRTUAL_ENV", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    with tempfile.TemporaryDirectory(prefix="ti-", dir="/tmp") as session:  # short: sockets lie below it
        command = [str(image / "bin" / "python"), "-c", DRIVER, str(wanted), session]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "working_dir_files" in found["package"]  # what was sent, not the checkout
    pins = dict(entry.split("==") for entry in json.loads(wanted.read_text())["pip"])
    assert found["versions"] == {name: pins[name] for name in found["versions"]}
    assert "runtime_resources/pip" in found["prefix"]  # an environment of the job's own
    assert found["history"] is False
    assert "E2B_API_KEY=set" in found["settings"]  # from the file that RuntimeEnv names only
    assert CANARY not in wanted.read_text() + done.stdout + done.stderr
