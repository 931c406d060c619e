"""A run that an alarm ends, as a user asked: the weights are not synced on purpose, and the alarm is for that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_ext.runs import ALARMS, CHECKPOINTS, METRICS, read_jsonl

STOP_ON = "verl_ext.stop_on=[truncation,probability-difference]"


@pytest.fixture(scope="module")
def run(smoke: Callable[..., Any]) -> Any:
    return smoke("stopped", "--control", "no-weight-sync", "trainer.total_training_steps=8", STOP_ON)


def test_it_ends_with_a_status_of_its_own_and_says_why(run: Any):
    assert run.status == 3, run.output
    assert run.output.count("ALARM probability-difference at step") == 2, "when it starts, and at the end"
    assert "Cure: leave rollout.free_cache_engine on" in run.output
    assert "alarms: 1\n  probability-difference, from step" in run.output


def test_the_alarm_is_in_the_run_folder_and_no_step_follows_it(run: Any):
    [event] = [json.loads(line) for line in (run.run_dir / ALARMS).read_text().splitlines()]
    assert (event["alarm"], event["state"], event["threshold"]) == ("probability-difference", "started", 0.01)
    assert event["value"] > 0.01
    assert read_jsonl(run.run_dir / METRICS)[-1]["step"] == event["step"] < 8


def test_the_trackers_have_that_step_too(run: Any):
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    step = read_jsonl(run.run_dir / METRICS)[-1]["step"]
    assert events.Scalars("training/rollout_probs_diff_mean")[-1].step == step


def test_its_last_step_has_a_checkpoint_that_can_be_resumed(run: Any):
    step = read_jsonl(run.run_dir / METRICS)[-1]["step"]
    checkpoints = run.run_dir / CHECKPOINTS
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(step)
    assert (checkpoints / f"global_step_{step}" / "data.pt").is_file()
    assert list((checkpoints / f"global_step_{step}" / "actor").glob("model_world_size_1_rank_0.pt"))


def test_nothing_is_left(run: Any, leftovers: Callable[[], list[str]]):
    assert "leaked 0" in run.output
    assert leftovers() == []
