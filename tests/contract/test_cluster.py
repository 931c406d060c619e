"""A real Ray cluster of ours on this machine: jobs given to it, stopped, followed; no secret to be seen in it.

Two machines (cluster-head, cluster-join, what the look at the nodes finds) are in test_cluster_nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
CANARIES = {"E2B_API_KEY": "ark_canaryofthecluster0123", "HF_TOKEN": "hf_canaryofthecluster0123"}
# Says whether a worker has the secrets, and nothing of them.
SECRETS_ARRIVE = """
import ray
from verl_ext.settings import Settings
ray.init(log_to_driver=False, logging_level="error")
@ray.remote
def lengths():
    settings = Settings.load()
    return [len(secret.reveal()) for secret in (settings.e2b_api_key, settings.hf_token)]
print("lengths", *ray.get(lengths.remote()))
"""
# What a run's process is to SIGTERM: it needs longer than the 3 s that Ray gives by itself.
SLOW_TO_END = """
import signal, sys, time
def end(*_):
    time.sleep(5)
    print("cleaned up", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Here:
    """A cluster of one node on this machine.

    Attributes:
        url: of its dashboard.
        address: of its node.
        environment: for commands that a person types on this machine.
        run: `python -m` with it.
        session: Ray's folder.
    """

    url: str
    address: str
    environment: dict[str, str]
    run: Callable[..., subprocess.CompletedProcess[str]]
    session: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """`invoke cluster-head` with an env file that has secrets; `cluster-stop` in the end."""
    folder = Path(tempfile.mkdtemp(prefix="agc-", dir="/tmp"))  # short, for Ray's sockets
    data_root = tmp_path_factory.mktemp("root")
    env_file = tmp_path_factory.mktemp("settings") / "node.env"
    lines = [*(f"{name}={value}" for name, value in CANARIES.items()), "VERL_EXT_SANDBOX_BACKEND=local"]
    env_file.write_text("\n".join(lines) + "\n")
    ours = ("VERL_EXT_", "E2B_", "RAY_", "HF_", "WANDB_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**kept, "RAY_TMPDIR": str(folder), "VERL_EXT_DATA_ROOT": str(data_root), "PYTHONPATH": str(ROOT)}

    def run(module: str, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    port, dashboard = free_port(), free_port()
    try:
        begun = run(
            "verl_ext.cluster.start", "head", f"--port={port}", f"--dashboard-port={dashboard}",
            f"--env-file={env_file}", "--gpus=1", "--cpus=4",
        )  # fmt: skip
        assert begun.returncode == 0, begun.stdout + begun.stderr
        assert f"ssh -L {dashboard}:127.0.0.1:{dashboard}" in begun.stdout
        [address] = re.findall(rf"head of the cluster: (\S+):{port}", begun.stdout)
        yield Here(f"http://127.0.0.1:{dashboard}", address, environment, run, folder)
        ended = run("verl_ext.cluster.start", "stop")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "has left the cluster" in ended.stdout
        assert [line for line in map(command_line, psutil.process_iter()) if str(folder) in line] == []
    finally:
        run("verl_ext.cluster.start", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture
def jobs(cluster: Here, monkeypatch: pytest.MonkeyPatch):
    from verl_ext.cluster.jobs import ADDRESS_FIRST, Jobs

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv(ADDRESS_FIRST, cluster.url)  # to be put back
    return Jobs(cluster.url)


def followed(jobs, job: str) -> list[str]:
    from verl_ext.cluster.jobs import Log

    lines: list[str] = []
    jobs.follow(job, Log(lines.append), lambda _: None)
    return lines


def python(code: str) -> str:
    import shlex

    return f"exec {sys.executable} -c {shlex.quote(code)}"


def test_a_jobs_words_and_its_exit_status_come_back(jobs):
    jobs.submit("of-mine", python("import sys; print('one'); print('two', end=''); sys.exit(7)"), run="r", kind="train")
    assert followed(jobs, "of-mine")[-2:] == ["one", "two"]
    assert jobs.exit_status("of-mine") == 7
    assert jobs.described("of-mine")["status"] == "FAILED"
    assert jobs.run_of("of-mine") == "r"
    jobs.submit("killed", python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), run="r", kind="train")
    followed(jobs, "killed")
    assert jobs.exit_status("killed") == 137


def test_what_is_unknown_is_told(jobs, cluster: Here):
    done = cluster.run("verl_ext.cluster.launch", "--address", cluster.url, "--status", "no-such-job")
    assert done.returncode == 2
    assert "no job no-such-job is known" in done.stderr
    assert "Traceback" not in done.stderr
    done = cluster.run("verl_ext.cluster.launch", "--address", "http://127.0.0.1:1", "--logs", "x")
    assert done.returncode == 2
    assert "no Ray dashboard answers" in done.stderr


def test_a_job_that_is_stopped_has_the_time_to_clean_up_and_is_swept_from_outside(jobs, cluster: Here):
    jobs.submit("slow", python(SLOW_TO_END), run="slow", kind="train")
    until_s = time.monotonic() + 60
    while "ready" not in jobs.log("slow"):
        assert time.monotonic() < until_s
        time.sleep(0.2)
    done = cluster.run("verl_ext.cluster.launch", "--address", cluster.url, "--stop", "slow")
    assert done.returncode == 0, done.stderr
    assert "slow is stopped" in done.stdout
    assert "cleaned up" in jobs.log("slow"), "on a cluster of ours Ray waits longer than its 3 s"
    assert "sandboxes of a run's own server end with that server" in done.stdout, "a job looked for what was left"
    assert jobs.exit_status("slow") == 143


def test_ctrl_c_leaves_a_job_to_itself_where_nobody_can_answer(jobs, cluster: Here):
    jobs.submit("on", python("import time; print('ready', flush=True); time.sleep(600)"), run="on", kind="train")
    following = subprocess.Popen(
        [sys.executable, "-m", "verl_ext.cluster.launch", "--address", cluster.url, "--logs", "on"],
        env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with following:
        assert following.stdout is not None
        while following.stdout.readline().strip() != "ready":
            assert following.poll() is None
        following.send_signal(signal.SIGINT)
        rest = following.stdout.read()
        assert following.wait(60) == 130
    assert "on goes on by itself" in rest
    assert "--stop on" in rest
    assert str(jobs.status("on").value) == "RUNNING"
    assert jobs.stop("on") is True


def test_a_launch_looks_submits_and_ends_with_the_runs_own_status(cluster: Here):
    done = cluster.run(
        "verl_ext.cluster.launch", "--address", cluster.url, "--hardware", "cpu", "--model", "/no/model",
        "--run-id", "whole", "--nodes", "1",
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    for words in (
        "1 node(s), alike and fit to train",
        "submitted whole: 1 node(s), 1 GPU(s) each, hardware cpu",
        "1 node(s) with 1 GPU(s) each",  # the run's own process, on the cluster
        "no model in /no/model",
        "--stop whole",
    ):
        assert words in text
    assert "RAY_ADDRESS" not in text
    assert "verl-ags-nodes" not in text, "what is for the program is not shown"


def test_without_waiting_the_job_is_known_by_the_runs_name(cluster: Here, jobs):
    done = cluster.run(
        "verl_ext.cluster.launch", "--address", cluster.url, "--hardware", "cpu", "--run-id", "later", "--no-wait"
    )
    assert done.returncode == 0, done.stderr
    followed(jobs, "later")
    status = cluster.run("verl_ext.cluster.launch", "--address", cluster.url, "--status", "later").stdout
    assert "exit status  2" in status
    logs = cluster.run("verl_ext.cluster.launch", "--address", cluster.url, "--logs", "later")
    assert logs.returncode == 2
    assert "problem(s) before the start" in logs.stdout


def test_nodes_that_do_not_come_are_counted_and_nothing_is_submitted(cluster: Here, jobs):
    done = cluster.run(
        "verl_ext.cluster.launch", "--address", cluster.url, "--nodes", f"{cluster.address},gpu-7", "--wait-s", "1",
        "--hardware", "cpu", "--run-id", "never",
    )  # fmt: skip
    assert done.returncode == 2
    assert f"missing gpu-7 ({cluster.address}" in done.stdout
    assert "nothing was started" in done.stderr
    from verl_ext.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="no job never is known"):
        jobs.status("never")


def test_the_project_can_be_sent_along_without_its_secrets(cluster: Here, jobs, tmp_path: Path):
    (tmp_path / "mine.py").write_text("print('sent along')\nimport os\nprint(sorted(os.listdir('.')))\n")
    (tmp_path / ".env").write_text("\n".join(f"{name}={value}" for name, value in CANARIES.items()))
    (tmp_path / "node.env").write_text("\n".join(f"{name}={value}" for name, value in CANARIES.items()))
    jobs.submit("sent", f"exec {sys.executable} -m mine", run="r", kind="train", upload=tmp_path)
    assert followed(jobs, "sent")[-2:] == ["sent along", "['mine.py']"]
    sent = {path.name for path in cluster.session.rglob("*") if "_ray_pkg_" in str(path)}
    assert "mine.py" in sent
    assert not {".env", "node.env"} & sent


def test_no_secret_is_seen_in_what_a_cluster_shows_and_keeps(cluster: Here, jobs):
    jobs.submit("secrets", python(SECRETS_ARRIVE), run="secrets", kind="train")
    assert followed(jobs, "secrets")[-1] == f"lengths {' '.join(str(len(value)) for value in CANARIES.values())}"
    pages = [
        "/api/jobs/", "/api/jobs/secrets", "/api/jobs/secrets/logs", "/api/version", "/api/cluster_status",
        "/nodes?view=summary", "/nodes?view=details", "/logical/actors", "/api/v0/actors?detail=1",
        "/api/v0/tasks?detail=1", "/api/v0/jobs?detail=1", "/api/v0/workers?detail=1", "/api/v0/runtime_envs?detail=1",
        "/api/v0/nodes?detail=1", "/api/v0/objects?detail=1", "/events", "/api/component_activities",
    ]  # fmt: skip
    seen: dict[str, bytes] = {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for page in pages:
        with contextlib.suppress(urllib.error.HTTPError):
            seen[page] = opener.open(cluster.url + page, timeout=30).read()
    assert len(seen) >= len(pages) - 1, f"of the dashboard's pages only {sorted(seen)} were there"
    assert b"verl-ags-run" in seen["/api/jobs/"]
    assert b"lengths" in seen["/api/jobs/secrets/logs"]
    assert json.loads(seen["/api/jobs/secrets"])["runtime_env"] == {}
    for path in cluster.session.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                seen[str(path)] = path.read_bytes()
    assert any(name.endswith("job-driver-secrets.log") for name in seen)
    for process in psutil.process_iter():
        seen[f"command of {process.pid}"] = command_line(process).encode()
        with contextlib.suppress(OSError):
            if str(cluster.session) in command_line(process):
                seen[f"environment of {process.pid}"] = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert any(b"VERL_EXT_ENV_FILE" in content for name, content in seen.items() if name.startswith("environment"))
    found = {f"{name} in {where}" for where, content in seen.items()
             for name, value in CANARIES.items() if value.encode() in content}  # fmt: skip
    assert found == set()


def test_a_second_node_on_one_machine_is_refused(cluster: Here):
    done = cluster.run("verl_ext.cluster.start", "head", f"--port={free_port()}")
    assert done.returncode == 2
    assert "`invoke cluster-stop` ends it" in done.stderr


def test_the_cluster_shows_itself(cluster: Here):
    done = cluster.run("verl_ext.cluster.start", "status")
    assert done.returncode == 0, done.stderr
    assert f"this machine is a node of it: {cluster.address}" in done.stdout
    assert "/1.0 GPU" in done.stdout
