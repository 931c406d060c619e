"""The smoke run as a user runs it, and what must be true of it; then the three runs that must not learn."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl_ext.alarms import read_events
from verl_ext.report.__main__ import main as write_report
from verl_ext.runs import CONFIG, MANIFEST, METRICS, read_jsonl
from verl_ext.trajectory import SCHEMA, read_records

CONTROL_STEPS = "trainer.total_training_steps=8"


@pytest.fixture(scope="module")
def run(smoke_run: Any) -> Any:
    return smoke_run


def test_it_learned_by_its_own_rule(run: Any):
    assert run.status == 0, run.output
    assert "it learned" in run.output


def test_the_reward_rose_and_the_tool_was_learned(run: Any):
    report = run.report
    assert report["accuracy_last"] - report["accuracy_first"] >= 0.25
    assert report["tool_use_last"] >= 0.5
    assert report["accuracy_without_tool"]["accuracy"] < 0.05
    assert report["tool_calls"] > 100


def test_the_metrics_are_finite_and_the_weights_moved(run: Any):
    steps = [entry["data"] for entry in read_jsonl(run.run_dir / METRICS) if "agent/accuracy" in entry["data"]]
    assert all(math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0 for step in steps)


def test_engine_and_trainer_agree_at_the_last_step(run: Any):
    assert run.report["probability_difference_last"] < 0.01


def test_a_run_that_learns_raises_no_alarm(run: Any):
    assert read_events(run.run_dir) == []
    assert "alarms: none" in run.output


def test_every_trajectory_is_recorded_with_its_mask(run: Any):
    files = sorted((run.run_dir / "rollouts").glob("*.parquet"))
    assert all(pq.read_schema(path).equals(SCHEMA) for path in files)
    assert run.report["mask_errors"] == 0
    record = next(record for record in read_records(run.run_dir, validation=False) if len(record["turns"]) > 1)
    assert len(record["response_ids"]) == len(record["response_mask"]) == len(record["rollout_log_probs"])
    assert 0 in record["response_mask"]
    assert record["turns"][0]["calls"][0]["status"] == "ok"
    assert record["prompt"][0]["content"]


def test_a_report_of_it_has_every_trajectory(run: Any):
    files = (run.run_dir / "rollouts").glob("*.parquet")
    assert write_report([str(run.run_dir)]) == 0
    html = (run.run_dir / "report.html").read_text(encoding="utf-8")
    packed = re.search(r'id="index">([^<]+)<', html)
    assert packed
    index = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert index["notes"] == []
    assert len(index["columns"]["reward"]) == sum(pq.read_metadata(path).num_rows for path in files)


def test_the_checkpoint_is_exported_with_the_trainers_logits(run: Any):
    assert run.report["export"]["ok"], run.report["export"]
    folder = run.run_dir / "export" / "global_step_16"
    assert (folder / "config.json").is_file()
    assert "# smoke, step 16" in (folder / "README.md").read_text()


def test_the_run_folder_says_what_ran(run: Any):
    assert (run.run_dir / CONFIG).is_file()
    assert (run.run_dir / MANIFEST).is_file()


def test_no_secret_of_the_env_file_shows_anywhere(run: Any, canaries: dict[str, str]):
    assert run.watched.found == set()
    # Where nothing was looked at, nothing can be found.
    assert run.watched.looked["command lines"] > 100
    assert run.watched.looked["session files"] > 20
    assert run.watched.looked["control store"] > 0
    assert run.watched.looked["metrics pages"] > 10
    found, kinds = [], set()
    for path in run.run_dir.rglob("*"):
        if not path.is_file():
            continue
        texts = [path.read_bytes()]
        if path.suffix == ".parquet":  # compressed
            texts.append(repr(pq.read_table(path).to_pylist()).encode())
        found += [path for text in texts for value in canaries.values() if value.encode() in text]
        kinds.add(path.relative_to(run.run_dir).parts[0])
    assert found == []
    assert {"config.yaml", "manifest.json", "logs", "tensorboard", "rollouts", "checkpoints", "sandboxes"} <= kinds
    assert not [name for name, value in canaries.items() if value in run.output]
    assert json.loads((run.run_dir / MANIFEST).read_text())["settings"]["E2B_API_KEY"] == "set"


def test_nothing_is_left(run: Any, leftovers: Callable[[], list[str]]):
    assert run.report["left"] == 0
    assert leftovers() == []


@pytest.mark.parametrize(
    ("control", "broken"),
    [
        ("no-learning", "accuracy rises"),
        ("wrong-values", "accuracy rises"),
        ("no-weight-sync", "engine and trainer agree"),
    ],
)
def test_a_run_that_cannot_learn_fails_the_same_rule(
    control: str, broken: str, smoke: Callable[..., Any], leftovers: Callable[[], list[str]]
):
    run = smoke(control, "--control", control, CONTROL_STEPS)
    assert run.status == 1, run.output
    assert "it did NOT learn" in run.output
    failed = [line for line in run.output.splitlines() if line.rstrip(" │").endswith("NO")]
    assert any(broken in line for line in failed), run.output
    assert leftovers() == []
