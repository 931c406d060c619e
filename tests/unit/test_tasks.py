"""tasks.py: a table of contents that needs invoke alone, and runs the command that it says."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from invoke import MockContext, Result
from invoke.exceptions import Exit

ROOT = Path(__file__).parents[2]
spec = spec_from_file_location("tasks_under_test", ROOT / "tasks.py")
assert spec is not None
assert spec.loader is not None
tasks = module_from_spec(spec)
spec.loader.exec_module(tasks)
TASKS = tasks.namespace.tasks
ARGUMENTS = {name: task.get_arguments() for name, task in TASKS.items()}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> MockContext:
    """A context in which every command succeeds."""
    made = MockContext(run=Result(exited=0), repeat=True)
    # A task ends by becoming its command; here the command is recorded with the others.
    monkeypatch.setattr(tasks, "become", lambda *words: tasks.run(made, sys.executable, "-m", *words))
    return made


def commands(context: MockContext) -> list[list[str]]:
    """The commands that were run, without the interpreter and `-m`."""
    found = []
    for called in context.run.call_args_list:
        words = shlex.split(called.args[0])
        assert words[0] == "exec"
        found.append(words[3:] if words[1:3] == [sys.executable, "-m"] else words[1:])
    return found


@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_a_summary_that_fits_its_row(name: str):
    summary = (TASKS[name].__doc__ or "").strip().splitlines()
    assert summary, f"{name} has no docstring"
    assert 0 < len(summary[0]) <= 50
    assert summary[0].endswith(".")


@pytest.mark.parametrize("name", TASKS)
def test_each_flag_has_help(name: str):
    assert [argument.name for argument in ARGUMENTS[name] if not argument.help] == []


@pytest.mark.parametrize("name", TASKS)
def test_a_body_is_short(name: str):
    lines = TASKS[name].body.__code__
    source = (ROOT / "tasks.py").read_text().splitlines()[lines.co_firstlineno - 1 :]
    start = next(at for at, line in enumerate(source) if '"""' in line) + 1
    body = []
    for line in source[start:]:
        if line and not line.startswith(" "):
            break
        body += [line] if line.strip() else []
    assert len(body) <= 7


BARE = """
import sys
class OnlyInvoke:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = "invoke", "tasks", "verl_ext", "fluidity", "lexicon", "yaml"
        if top not in sys.stdlib_module_names and top not in ours:
            raise ModuleNotFoundError(f"a bare environment has no {name}")
sys.meta_path.insert(0, OnlyInvoke())
sys.argv = ["invoke", *sys.argv[1:]]
from invoke.main import program
program.run()
"""


def bare(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BARE, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_list_needs_no_stack():
    done = bare("--list")
    assert done.returncode == 0, done.stderr
    for name in (
        "download",
        "prepare-data",
        "train",
        "smoke",
        "evaluate",
        "export",
        "serve-sandbox",
        "check",
        "test",
        "setup",
        "settings",
    ):
        assert f"\n  {name} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", TASKS)
def test_the_help_of_each_task_needs_no_stack(name: str):
    done = bare("--help", name)
    assert done.returncode == 0, done.stderr
    assert "Options:" in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("setup", {}, [["verl_ext.stack", "cpu"]]),
        ("setup", {"stack": "gpu"}, [["verl_ext.stack", "gpu"]]),
        ("smoke", {}, [["verl_ext.stack", "cpu"], ["recipe.smoke.run", "--hardware=cpu"]]),
        ("smoke", {"hardware": "h200x1"}, [["verl_ext.stack", "gpu"], ["recipe.smoke.run", "--hardware=h200x1"]]),
        (
            "smoke",
            {"control": "no-learning", "set_": ["a.b=1", "c=x y"]},
            [["verl_ext.stack", "cpu"],
             ["recipe.smoke.run", "--hardware=cpu", "--control=no-learning", "a.b=1", "c=x y"]],
        ),
        ("train", {}, [["verl_ext.launch", "--recipe=retool"]]),
        ("train", {"resume": True}, [["verl_ext.launch", "--recipe=retool", "--resume=latest"]]),
        ("train", {"resume": "r1"}, [["verl_ext.launch", "--recipe=retool", "--resume=r1"]]),
        (
            "train",
            {"hardware": "cpu", "model": "my m", "train": "t", "val": "v", "recipe": "smoke", "run_id": "r1",
             "data_root": "d", "env_file": "e", "sandbox": "local", "dry_run": True, "json": True,
             "stop_on": "truncation,grad-norm",
             "set_": ["trainer.logger=[console, file]", "x='$HOME;`ls`'"]},
            [["verl_ext.launch", "--recipe=smoke", "--hardware=cpu", "--model=my m", "--train=t", "--val=v",
              "--run-id=r1", "--data-root=d", "--env-file=e", "--sandbox=local",
              "--stop-on=truncation,grad-norm", "--json", "--dry-run",
              "trainer.logger=[console, file]", "x='$HOME;`ls`'"]],
        ),
        ("launch", {}, [["verl_ext.cluster.launch"]]),
        (
            "launch",
            {"address": "a:1", "nodes": "2", "no_wait": True, "upload": True, "hardware": "cpu", "set_": ["a.b=1"]},
            [["verl_ext.cluster.launch", "--upload", "--no-wait", "--address=a:1", "--nodes=2", "--hardware=cpu",
              "a.b=1"]],
        ),
        ("launch", {"stop": "r"}, [["verl_ext.cluster.launch", "--stop=r"]]),
        ("cluster_head", {"gpus": "1"}, [["verl_ext.cluster.start", "head", "--gpus=1"]]),
        ("cluster_join", {"address": "a:1"}, [["verl_ext.cluster.start", "join", "a:1"]]),
        ("cluster_status", {}, [["verl_ext.cluster.start", "status"]]),
        ("cluster_stop", {}, [["verl_ext.cluster.start", "stop"]]),
        ("prepare_data", {}, [["recipe.retool.prepare_data"]]),
        (
            "prepare_data",
            {"train": ["a"], "val": ["b", "b2"], "out": "c", "max_rows": "9"},
            [["recipe.retool.prepare_data", "--train=a", "--val=b", "--val=b2", "--out=c", "--max-rows=9"]],
        ),
        ("download", {}, [["verl_ext.download"]]),
        ("download", {"model": "org/name", "source": "modelscope"},
         [["verl_ext.download", "--model=org/name", "--source=modelscope"]]),
        ("export", {"run_": "runs/r"}, [["verl_ext.export", "runs/r"]]),
        (
            "export",
            {"run_": "r", "step": "30", "out": "o", "verify": True, "json": True},
            [["verl_ext.export", "r", "--step=30", "--out=o", "--verify", "--json"]],
        ),
        ("report", {"run_": "r"}, [["verl_ext.report", "r"]]),
        (
            "report",
            {"run_": "r", "other": "s", "out": "o", "steps": "1-9", "max_mb": "50"},
            [["verl_ext.report", "r", "s", "--out=o", "--steps=1-9", "--max-mb=50"]],
        ),
        ("evaluate", {"subject": "r"}, [["recipe.retool.evaluate", "r", "--recipe=retool"]]),
        (
            "evaluate",
            {"subject": "my r", "step": "30", "base": "b", "data": ["aime-2024", "d"], "settings": "tools,trained",
             "n": "4", "max_problems": "8", "seed": "2", "run_id": "e1", "recipe": "smoke", "hardware": "cpu",
             "data_root": "d", "env_file": "e", "sandbox": "local", "set_": ["a.b=1"]},
            [["recipe.retool.evaluate", "my r", "--data=aime-2024", "--data=d", "--step=30", "--base=b",
              "--settings=tools,trained", "--n=4", "--max-problems=8", "--seed=2", "--run-id=e1", "--recipe=smoke",
              "--hardware=cpu", "--data-root=d", "--env-file=e", "--sandbox=local", "a.b=1"]],
        ),
        (
            "serve_sandbox",
            {"port": 3000},
            [["verl_ext.sandbox.server", "--host", "127.0.0.1", "--port", "3000", "--isolation", "auto"]],
        ),
        ("doctor", {"deep": True, "json": True}, [["verl_ext.doctor", "--deep", "--json"]]),
        ("manifest", {"sbom": True}, [["verl_ext.image.manifest", "--sbom"]]),
        ("settings", {}, [["verl_ext.settings"]]),
        ("check_sandbox", {}, [["verl_ext.check"]]),
        ("check_sandbox", {"json": True, "max_probe": "20"}, [["verl_ext.check", "--json", "--max-probe", "20"]]),
        ("render", {"platform": "slurm", "nodes": "4", "out": "o", "set_": ["a.b=1"]},
         [["verl_ext.platforms", "slurm", "--nodes=4", "--out=o", "a.b=1"]]),
        ("check_network", {}, [["verl_ext.network"]]),
        ("check_network", {"address": "h:6379", "timeout_s": "9", "json": True},
         [["verl_ext.network", "--address=h:6379", "--timeout-s=9", "--json"]]),
        ("clean_sandboxes", {"run_": "r"}, [["verl_ext.clean", "--run", "r"]]),
    ],
)  # fmt: skip
def test_a_task_runs_its_command(name: str, arguments: dict, expected: list[list[str]], context: MockContext):
    getattr(tasks, name)(context, **arguments)
    assert commands(context) == expected


def test_checks_and_tests_run_in_order(context: MockContext):
    tasks.test(context, only="unit", k="pool")
    words = [command[0] for command in commands(context)]
    assert words[:5] == [
        "verl_ext.stack",
        "ruff",
        "ruff",
        "pyright",
        str(Path(sys.executable).with_name("lint-imports")),
    ]
    options = ["--durations=15", "--numprocesses=logical", "--dist=worksteal"]
    assert commands(context)[-1] == ["pytest", *options, "tests/unit", "-k", "pool"]


def test_without_a_name_the_quick_tests_come_first_and_each_folder_on_its_own(context: MockContext):
    tasks.test(context)
    pytest_runs = [command for command in commands(context) if command[0] == "pytest"]
    assert [command[-1] for command in pytest_runs] == ["tests/unit", "tests/contract", "tests/e2e"]
    assert ["--numprocesses=logical" in command for command in pytest_runs] == [True, False, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "No idea what 'trian' is"), (["train", "--hardware"], "needed value"),
        (["smoke", "--set", "", "--hardware=x"], "an override is empty"), (["train", "--", ""], "an override is empty"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_status_2(words: list[str], said: str):
    done = subprocess.run([sys.executable, "-m", "invoke", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("names", [["no-a"], ["no-a", "no-b"], ["no-a", "no-b", "--steps", "1"]])
def test_a_report_takes_one_run_or_two(names: list[str]):
    done = bare("report", *names)
    assert done.returncode == 2
    assert "no run 'no-a'" in done.stderr


@pytest.mark.parametrize("status", [1, 2, 70, 130, 143])
def test_a_commands_exit_status_is_invokes(status: int):
    context = MockContext(run=Result(exited=status), repeat=True)
    with pytest.raises(Exit) as caught:
        tasks.setup(context)
    assert caught.value.code == status
    assert context.run.call_args.kwargs["warn"] is True


def test_a_command_that_a_signal_ended_is_named_with_it():
    context = MockContext(run=Result(exited=-11), repeat=True)
    with pytest.raises(Exit) as caught:
        tasks.setup(context)
    assert caught.value.code == 139
    assert str(caught.value).endswith(" was ended by SIGSEGV")


def test_a_failed_step_ends_the_task():
    context = MockContext(run=Result(exited=2), repeat=True)
    with pytest.raises(Exit):
        tasks.smoke(context)
    assert len(context.run.call_args_list) == 1


def test_the_words_of_the_user_are_there():
    given = ["--hardware", "cpu", "--model", "m", "--set", "a=1", "--set", "b=2", "--", "c=x y", "d=4"]
    done = bare("train", *given)
    assert done.returncode == 2
    for key in "abcd":
        assert f"- {key}: verl 0.6.1 has no key of this name" in done.stderr


def test_a_task_chooses_cudas_libraries_itself(monkeypatch: pytest.MonkeyPatch, capsys):
    called = []
    monkeypatch.setattr(tasks.os, "execve", lambda *arguments: called.append(arguments))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat:/opt/mine")
    monkeypatch.setenv("CUDA_COMPAT", "off")
    tasks.become("verl_ext.settings")
    assert called[0][2]["LD_LIBRARY_PATH"] == "/opt/mine"
    assert "CUDA compatibility library off: CUDA_COMPAT=off" in capsys.readouterr().err


def test_a_task_becomes_its_command_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    called = []
    monkeypatch.setattr(tasks.os, "execve", lambda *arguments: called.append(arguments))
    monkeypatch.chdir(tmp_path)
    tasks.become("verl_ext.settings", "", "--example")
    program, words, environment = called[0]
    assert (program, words) == (sys.executable, [sys.executable, "-m", "verl_ext.settings", "--example"])
    assert environment["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert Path.cwd() == tmp_path


def test_without_a_stack_the_cure_is_said_and_no_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tasks, "NEEDED", ("rich", "no_such_package"))
    with pytest.raises(Exit, match="invoke setup --stack cpu") as caught:
        tasks.become("verl_ext.doctor")
    assert caught.value.code == 2


def test_a_hardware_file_that_is_not_there_installs_nothing(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    monkeypatch.setattr(tasks, "setup", lambda *_: done.append("setup"))
    monkeypatch.setattr(tasks, "become", lambda module, *_: done.append(module))
    tasks.smoke.body(MockContext(), hardware="cpux")
    assert done == ["recipe.smoke.run"]
