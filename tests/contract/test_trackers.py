"""What each tracker of `trainer.logger` gets: the numbers of metrics.jsonl, under the same names.

TensorBoard is the real one. W&B, SwanLab and MLflow are stand-ins at the place where verl imports them, which take
what the real ones take and nothing else: not covered is what those do with it.
"""

from __future__ import annotations

import json
import numbers
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from verl_ext import trainer
    from verl_ext.run_environment import tracker_files
    from verl_ext.settings import Settings

STEP = {"critic/score/mean": np.float32(0.5), "global_seqlen/min": torch.tensor(12), "timing_s/step": 2.0}
ROLLOUT = {"agent/accuracy": 0.25}
NAMES = {*STEP, *ROLLOUT, "val-core/x/acc/mean@2"}
KEYS = {"WANDB_API_KEY": "wb_0123456789", "SWANLAB_API_KEY": "sl_0123456789", "MLFLOW_TRACKING_TOKEN": "ml_0123456789"}


class StandIn(types.ModuleType):
    """A tracker's module: notes each call, and refuses what is no plain number."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.logged: dict[int, dict[str, Any]] = {}
        monkeypatch.setitem(sys.modules, name, self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **given: Any) -> Any:
            self.calls.append((name, given))
            return types.SimpleNamespace(experiment_id="1")

        return call

    def log(self, data: dict[str, Any], step: int) -> None:
        assert all(isinstance(value, numbers.Real) for value in data.values()), data
        self.logged[step] = data

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.log(metrics, step)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the process that trains: the launcher's variables, and the keys of an `.env`."""
    for name in (*KEYS, "WANDB_MODE", "WANDB_DIR", "SWANLAB_MODE", "SWANLAB_LOG_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "x")  # so that it is put back at the end
        monkeypatch.delenv(name)
    env_file = tmp_path / "keys.env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in KEYS.items()))
    settings = Settings.load(env_file)
    for name, value in tracker_files(settings, tmp_path).items():
        monkeypatch.setenv(name, value)
    settings.export_foreign()


@pytest.fixture
def logged(environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Logs two steps with a tracker; the first line of metrics.jsonl."""
    monkeypatch.setattr(trainer, "_run_dir", tmp_path)
    monkeypatch.setattr(trainer, "_pending", dict(ROLLOUT))

    def log(name: str) -> dict[str, Any]:
        tracking = trainer.AgsTracking("project", "run", default_backend=[name], config={"trainer": {"n": 1}})
        tracking.log({**STEP, "val-core/x/acc/mean@2": 0.75}, 1)
        tracking.log({"timing_s/step": float("nan")}, 2)
        tracking._metrics_file.close()
        del tracking  # verl ends its trackers with it
        return json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["data"]

    return log


def test_tensorboard_has_every_number_of_the_file_under_its_name(logged, tmp_path: Path):
    line = logged("tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(line) == NAMES
    for name, value in line.items():
        first = events.Scalars(name)[0]
        assert (first.step, first.value) == (1, pytest.approx(value)), name


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_wandb_and_swanlab_get_the_same_names(name: str, logged, monkeypatch: pytest.MonkeyPatch):
    tracker = StandIn(name, monkeypatch)
    assert tracker.logged == {}
    assert logged(name) == tracker.logged[1]
    assert set(tracker.logged[1]) == NAMES
    assert [call for call, _ in tracker.calls][-1] == "finish"
    given = dict(tracker.calls)["init"]
    assert (given["project"], given.get("name", given.get("experiment_name"))) == ("project", "run")


def test_swanlab_is_given_its_key_and_a_place_in_the_run_folder(
    logged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tracker = StandIn("swanlab", monkeypatch)
    logged("swanlab")
    assert [call for call, _ in tracker.calls][:2] == ["login", "init"]
    assert dict(tracker.calls)["init"]["logdir"] == str(tmp_path / "swanlab")


def test_mlflow_gets_the_same_names_but_for_the_sign_that_it_refuses(logged, monkeypatch: pytest.MonkeyPatch):
    tracker = StandIn("mlflow", monkeypatch)
    line = logged("mlflow")
    assert tracker.logged[1] == {name.replace("@", "_at_"): value for name, value in line.items()}


def test_each_finds_its_key_and_its_place(environment: None, tmp_path: Path):
    import os

    assert {name: os.environ.get(name) for name in KEYS} == KEYS
    assert os.environ["WANDB_DIR"] == str(tmp_path)
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_server_of_the_users_is_left_to_mlflow(tmp_path: Path):
    settings = Settings.load(environ={"MLFLOW_TRACKING_URI": "http://mlflow:5000"})
    assert "MLFLOW_TRACKING_URI" not in tracker_files(settings, tmp_path)
