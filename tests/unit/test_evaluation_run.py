"""An evaluation from command to summary; what would start Ray answers from a script."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from recipe.retool.evaluate import main
from verl_ext import launch
from verl_ext.compose import CONFIG_DIR, compose, resolve
from verl_ext.errors import TrainingDiedError
from verl_ext.evaluation import run as evaluation_run
from verl_ext.evaluation.plan import Plan, parts
from verl_ext.evaluation.process import EvaluationRunnerProcess
from verl_ext.evaluation.results import key_of, next_part, read_parts, sample_row, write_part
from verl_ext.request import Configured

DAPO = Path(__file__).parents[2] / "recipe" / "retool" / "samples" / "dapo_sample.parquet"
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
RIGHT = {"no_tools": 0.0, "tools": 0.0, "trained": 1.0}


class Engine:
    """Stands for the launcher: takes what is left of a model, or so many parts of it."""

    def __init__(self) -> None:
        self.taken: list[Configured] = []
        self.parts_at_most = 1000

    def carry_out(self, configured: Configured, request: Any, settings: Any, say: Any, runner_class: type) -> None:
        assert runner_class is EvaluationRunnerProcess
        self.taken.append(configured)
        folder = configured.run_dir.parent
        plan = Plan.read(folder)
        rows = pq.read_table(plan.data).to_pylist()
        done = {key_of(row) for row in read_parts(folder)}
        for part in parts(plan, configured.run_dir.name, rows, done, next_part(folder)):
            if not self.parts_at_most:
                raise TrainingDiedError("the machine went away")
            self.parts_at_most -= 1
            found = [
                sample_row(sample.setting, sample.number, sample.seed, part.number, trajectory(sample))
                for sample in part.samples
            ]
            write_part(folder, part.number, found)


def trajectory(sample: Any) -> dict[str, Any]:
    return {
        "data_source": sample.row["data_source"], "problem_id": sample.row["extra_info"]["index"],
        "ground_truth": "1", "extracted": "1", "verdict": "equal", "stop_reason": "answered", "infra_failed": False,
        "infra_error": "", "trajectory_id": "t", "turns": [], "response_ids": [1], "accuracy": RIGHT[sample.setting],
    }  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(launch, "carry_out", made.carry_out)
    monkeypatch.setattr(evaluation_run, "exported", lambda checkpoint, target, say: None)
    return made


@pytest.fixture
def trained_run(full_root: Path, make_model: Callable[..., Path]) -> Path:
    """A run with a checkpoint that is exported already."""
    run = full_root / "runs" / "mine"
    make_model(run / "export" / "global_step_4")
    (run / "checkpoints" / "global_step_4" / "actor").mkdir(parents=True)
    values = {
        "actor_rollout_ref.model.path": str(full_root / "models" / MODEL.replace("/", "--")),
        "verl_ext.run_id": "mine",
        "verl_ext.run_dir": str(run),
        "verl_ext.config_dir": str(CONFIG_DIR),
        "data.val_files": str(DAPO),
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    (run / "config.yaml").write_text(OmegaConf.to_yaml(resolve(compose("retool", "h200x1", overrides))))
    return run


@pytest.fixture
def command(full_root: Path, engine: Engine, no_complaint_of_this_machine: None) -> list[str]:
    return ["--hardware=h200x1", f"--data={DAPO}", "--max-problems=5", "--run-id=e"]


def summary(root: Path) -> dict[str, Any]:
    return json.loads((root / "runs" / "e" / "summary.json").read_text())


def test_a_run_is_taken_in_three_settings_by_two_models(
    command: list[str], trained_run: Path, full_root: Path, engine: Engine, capsys: pytest.CaptureFixture
):
    assert main(["mine", *command, "--n=3"]) == 0
    assert [one.run_dir.name for one in engine.taken] == ["base", "trained"]
    base, trained = (one.config for one in engine.taken)
    assert base.actor_rollout_ref.model.path == str(full_root / "models" / MODEL.replace("/", "--"))
    assert trained.actor_rollout_ref.model.path == str(trained_run / "export" / "global_step_4")
    assert (base.actor_rollout_ref.rollout.val_kwargs.n, base.actor_rollout_ref.rollout.val_kwargs.top_p) == (3, 0.6)
    found = summary(full_root)
    assert (found["complete"], found["subject"]["run_id"], found["subject"]["step"]) == (True, "mine", 4)
    assert found["data"]["sets"] == [{"data_source": "math_dapo", "problems": 5}]
    assert found["sampling"]["n"] == 3
    assert {one["setting"]: one["mean"] for one in found["results"]} == RIGHT
    assert [(one["from"], one["to"], one["difference"]) for one in found["differences"]] == [
        ("no_tools", "tools", 0.0), ("no_tools", "trained", 1.0), ("tools", "trained", 1.0)
    ]  # fmt: skip
    assert "tools, after training" in capsys.readouterr().out


def test_a_model_is_taken_as_the_recipe_validates(command: list[str], full_root: Path, engine: Engine):
    assert main([MODEL, *command]) == 0
    assert [one.run_dir.name for one in engine.taken] == ["base"]
    sampling = summary(full_root)["sampling"]
    assert (sampling["n"], sampling["top_p"], sampling["temperature"]) == (30, 0.6, 1.0)
    assert [one["setting"] for one in summary(full_root)["results"]] == ["no_tools", "tools"]


def test_an_evaluation_that_died_says_how_it_goes_on_and_does(
    command: list[str], full_root: Path, engine: Engine, capsys: pytest.CaptureFixture
):
    engine.parts_at_most = 1
    assert main([MODEL, *command, "--n=8"]) == 70
    said = capsys.readouterr()
    assert "the machine went away" in said.err
    assert "48 samples are left; the same command with --run-id=e goes on with them" in said.out
    died = summary(full_root)
    assert (died["complete"], [one["samples"] for one in died["results"]]) == (False, [32])
    engine.parts_at_most = 1000
    assert main([MODEL, *command, "--n=8"]) == 0
    assert "48 samples to take" in capsys.readouterr().out
    whole = summary(full_root)
    assert (whole["complete"], [one["samples"] for one in whole["results"]]) == (True, [40, 40])
    assert whole["created"] == died["created"]
    assert main([MODEL, *command, "--n=8"]) == 0
    assert len(engine.taken) == 2, "where nothing is left nothing is started"


def test_the_same_name_with_another_question_is_refused_and_loses_nothing(
    command: list[str], full_root: Path, engine: Engine, capsys: pytest.CaptureFixture
):
    assert main([MODEL, *command, "--n=2"]) == 0
    before = summary(full_root)
    assert main([MODEL, *command, "--n=4"]) == 2
    assert "n was 2 and is 4" in capsys.readouterr().err
    assert summary(full_root) == before


def test_two_do_not_take_the_same_evaluation(command: list[str], full_root: Path, capsys: pytest.CaptureFixture):
    assert main([MODEL, *command, "--n=2"]) == 0
    with (full_root / "runs" / "e" / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([MODEL, *command, "--n=2"]) == 2
    assert "e is being written by " in capsys.readouterr().err


def test_what_is_wrong_with_the_second_model_is_told_before_the_first_is_taken(
    command: list[str], trained_run: Path, engine: Engine, capsys: pytest.CaptureFixture
):
    (trained_run / "export" / "global_step_4" / "config.json").unlink()
    assert main(["mine", *command]) == 2
    assert "global_step_4" in capsys.readouterr().err
    assert engine.taken == []


def test_an_engine_on_a_cpu_is_not_started_without_a_compiler(
    command: list[str], engine: Engine, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", "/no/g++")
    assert main([MODEL, *command, "--hardware=cpu"]) == 2
    assert "[compiler]" in capsys.readouterr().err
    assert engine.taken == []
    monkeypatch.setenv("CXX", "true")
    assert main([MODEL, *command, "--hardware=cpu"]) == 0
