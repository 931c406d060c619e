"""DAPO-Math-17k rows and the 30 problems of AIME 2024 through the same path, with the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_ext.runs import DATA_REPORT
from verl_ext.trajectory import read_records

ROOT = Path(__file__).resolve().parents[2]
DAPO = ROOT / "recipe" / "retool" / "samples" / "dapo_sample.parquet"
# The problem texts are (c) MAA and not in this repository.
AIME = ROOT.parent / "shared" / "data" / "aime_2024_problems.parquet"


@dataclass(frozen=True)
class Finished:
    status: int
    steps: list[str]
    said: str
    run_dir: Path


@pytest.fixture(scope="module")
def run(environment: dict[str, str], data_root: Path, smoke: Callable[..., object]) -> Finished:
    if not AIME.is_file():
        pytest.skip("needs Maxwell-Jia/AIME_2024's parquet file, which the hub has and this repository must not")
    models = list((data_root / "cache").glob("tiny-qwen3-*"))
    if not models:
        smoke("only-for-the-model", "trainer.total_training_steps=1")
        models = list((data_root / "cache").glob("tiny-qwen3-*"))
    out = data_root / "data" / "retool"
    prepare = ["-m", "recipe.retool.prepare_data", "--train", str(DAPO), "--val", str(AIME), "--out", str(out)]
    subprocess.run([sys.executable, *prepare], cwd=ROOT, check=True, env=environment)
    sizes = [
        "data.train_batch_size=8",
        "data.max_response_length=256",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    train = ["--hardware", "cpu", "--model", str(models[0]), "--train", str(out / "train.parquet")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "verl_ext.launch",
            *train,
            "--val",
            str(out / "val.parquet"),
            "--run-id",
            "real",
            "--json",
            *sizes,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return Finished(done.returncode, done.stdout.splitlines(), done.stderr, data_root / "runs" / "real")


def test_two_steps_on_dapo_rows(run: Finished):
    assert run.status == 0, run.said
    records = list(read_records(run.run_dir, validation=False))
    assert {record["step"] for record in records} == {1, 2}
    assert {record["data_source"] for record in records} == {"math_dapo"}
    assert len(records) == 2 * 8 * 4
    assert json.loads((run.run_dir / DATA_REPORT).read_text())["train"]["rows_kept"] == 60  # prepare-data's, kept


def test_standard_output_is_one_json_object_a_step_and_nothing_else(run: Finished):
    steps = [json.loads(line) for line in run.steps]
    assert [(step["step"], step["total_steps"]) for step in steps] == [(0, 2), (1, 2), (2, 2)]
    assert steps[0]["validation"]
    assert all(step["reward"] <= 0 and step["tokens_per_s"] > 0 for step in steps[1:])
    assert "step 2/2  reward" in run.said


def test_one_validation_over_the_thirty_aime_problems_is_stored(run: Finished):
    records = list(read_records(run.run_dir, validation=True))
    assert len({record["problem_id"] for record in records}) == 30
    assert all(record["problem_id"].startswith("2024-") and record["verdict"] for record in records)


def test_nothing_is_left(run: Finished, leftovers: Callable[[], list[str]]):
    assert "leaked 0" in run.said
    assert leftovers() == []
