"""verl_ext.launch: a user's mistakes give exit status 2 and the cure, before anything is started.

Not covered here: a run itself (tests/e2e), signals (tests/e2e/test_faults.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext import launch, preflight
from verl_ext.errors import ConfigurationError, DataError, SandboxUnavailableError, TrainingDiedError
from verl_ext.launch import RunRequest, configure, guarded, main
from verl_ext.settings import Settings

ROOT = Path(launch.__file__).parents[1]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The flags of a request with nothing wrong, and nothing of the developer's environment."""
    for name in [name for name in os.environ if name.startswith(("VERL_EXT_", "E2B_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_EXT_DATA_ROOT", str(tmp_path / "root"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    for path in (tmp_path / "train.parquet", tmp_path / "val.parquet"):
        pq.write_table(pa.table({"prompt": ["q"]}), path)
    return {
        "--recipe": "smoke", "--hardware": "cpu", "--model": str(model), "--run-id": "mine",
        "--train": str(tmp_path / "train.parquet"), "--val": str(tmp_path / "val.parquet"),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(launch, "_train", started)
    monkeypatch.setattr(launch, "start_server", started)


def flags(inputs: dict[str, str]) -> list[str]:
    return [part for pair in inputs.items() for part in pair]


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"--model": "/no/model"}, [], "no model in /no/model"),
        ({"--model": "train.parquet"}, [], "no config.json"),
        ({"--train": "/no/train.parquet"}, [], "make it with `invoke prepare-data`"),
        ({"--val": "/no/val.parquet"}, [], "data.val_files: /no/val.parquet is not there"),
        ({"--recipe": "retol"}, [], "did you mean retool?"),
        ({"--recipe": "no such recipe"}, [], "no such recipe"),
        ({"--hardware": "h20"}, [], "no hardware named 'h20'"),
        ({"--run-id": "../x"}, [], "run id '../x'"),
        ({"--run-id": "a b"}, [], "use letters, digits"),
        ({}, ["trainer.save_frq=1"], "did you mean trainer.save_freq?"),
        ({}, ["trainer.save_freq"], "write KEY=VALUE"),
        ({}, ["data.train_batch_size=17"], "is no multiple of ppo_mini_batch_size"),
        ({}, ["actor_rollout_ref.rollout.n=0"], "rollout.n is 0"),
        ({}, ["trainer.project_name=${no.key}"], "does not resolve"),
        ({}, ["actor_rollout_ref.rollout.free_cache_engine=false"], "stops weight sync"),
    ],
)
def test_a_mistake_is_told_with_its_cure(changes, overrides, words, inputs, capsys, tmp_path: Path):
    assert main([*flags(inputs | changes), *overrides]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not (tmp_path / "root").exists(), "a refused request leaves no folder"


def test_all_that_preflight_finds_is_told_at_once(inputs, capsys):
    changes = {"--model": "/no", "--train": "/no.parquet", "--val": "/no.parquet"}
    assert main([*flags(inputs | changes), "actor_rollout_ref.rollout.mode=sync"]) == 2
    assert "4 problem(s) before the start" in capsys.readouterr().err


def test_wrong_settings_are_told_like_wrong_flags(inputs, capsys, monkeypatch):
    monkeypatch.setenv("VERL_EXT_SANDBOX_MAX_ALIVE", "many")
    assert main(flags(inputs)) == 2
    assert "VERL_EXT_SANDBOX_MAX_ALIVE" in capsys.readouterr().err


def test_a_run_folder_is_never_written_over(inputs, capsys, tmp_path: Path):
    (tmp_path / "root" / "runs" / "mine").mkdir(parents=True)
    assert main(flags(inputs)) == 2
    assert "is there already: choose another --run-id" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--hardware", "cpu"], ["--no-such-flag"], ["--help"]])
def test_the_command_line_itself_explains(arguments: list[str], capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == (0 if arguments == ["--help"] else 2)
    captured = capsys.readouterr()
    assert "invoke train" in captured.out + captured.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("wrong flag"), 2),
        (DataError("wrong data"), 2),
        (TrainingDiedError("a process died"), 70),
        (SandboxUnavailableError("no server"), 70),
        (launch.Interrupted(15), 143),
        (launch.Interrupted(2), 130),
    ],
)
def test_an_expected_failure_is_a_message_and_a_status(error: BaseException, status: int, capsys):
    def fail() -> None:
        raise error

    assert guarded(fail) == status
    words = "ended by SIG" if status > 128 else str(error)
    assert words in capsys.readouterr().err


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


def test_success_is_zero():
    assert guarded(lambda: "anything") == 0


# --- what a good request becomes


def request(inputs: dict[str, str], *overrides: str, **changes: str) -> RunRequest:
    values = inputs | changes
    return RunRequest(
        values["--recipe"], values["--hardware"], Path(values["--model"]), Path(values["--train"]),
        Path(values["--val"]), overrides, values["--run-id"],
    )  # fmt: skip


def test_a_good_request_is_resolved_and_makes_no_folder(inputs, tmp_path: Path):
    config, run_dir = configure(request(inputs, "trainer.save_freq=7"), Settings.load())
    assert run_dir == tmp_path / "root" / "runs" / "mine"
    assert not run_dir.exists()
    assert config.trainer.save_freq == 7
    assert config.trainer.default_local_dir == f"{run_dir}/checkpoints"
    assert config.verl_ext.run_id == config.trainer.experiment_name == "mine"
    preflight.check(config)


def test_a_run_without_a_name_gets_one(inputs):
    _, run_dir = configure(request(inputs, **{"--run-id": ""}), Settings.load())
    assert run_dir.name.startswith("smoke-20")


def test_relative_paths_are_the_users(inputs, tmp_path: Path):
    changes = {"--model": "model", "--train": "train.parquet", "--val": "val.parquet"}
    config, _ = configure(request(inputs, **changes), Settings.load())
    assert config.actor_rollout_ref.model.path == str(tmp_path / "model")
    assert config.data.train_files == str(tmp_path / "train.parquet")


@pytest.mark.parametrize("name", ["my model", "a #b", "a: b", "[x]", "{y}", "'q'", "é", "1e-6", "=", "a=b"])
def test_a_path_may_hold_anything(name: str, inputs, tmp_path: Path):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").touch()
    config, _ = configure(request(inputs, **{"--model": str(folder)}), Settings.load())
    assert config.actor_rollout_ref.model.path == str(folder)


def test_an_override_wins_over_a_flag(inputs, tmp_path: Path):
    other = tmp_path / "other.parquet"
    other.touch()
    config, _ = configure(request(inputs, f"data.val_files=[{inputs['--val']}, {other}]"), Settings.load())
    assert list(config.data.val_files) == [inputs["--val"], str(other)]


def test_importing_the_launcher_loads_nothing_heavy():
    heavy = "torch", "ray", "vllm", "verl", "transformers", "tensordict"
    modules = "verl_ext.launch, verl_ext.compose, verl_ext.preflight, verl_ext.settings, verl_ext.export, tasks"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
