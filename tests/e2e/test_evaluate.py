"""The smoke run's checkpoint, evaluated as a user does it: an engine with GPUs of its own, real sandboxes, numbers.

One model and one setting, since each model is a start of Ray and an engine; the others take the same way
(tests/contract/test_evaluation_rollout.py has the setting without tools, and what happens on interruption).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl_ext.evaluation.results import SAMPLES
from verl_ext.runs import METRICS, read_jsonl
from verl_ext.trajectory import read_records

ROOT = Path(__file__).resolve().parents[2]
N = 2


@pytest.fixture(scope="module")
def evaluate(environment: dict[str, str], smoke_run: Any) -> Callable[[], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-m", "recipe.retool.evaluate", "smoke", "--settings=trained", f"--n={N}"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--run-id=evaluated"],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
            check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def done(evaluate: Callable[[], Any]) -> Any:
    return evaluate()


@pytest.fixture(scope="module")
def folder(done: Any, data_root: Path) -> Path:
    assert done.returncode == 0, done.stdout
    return data_root / "runs" / "evaluated"


def test_its_numbers_are_those_of_the_runs_own_validation(folder: Path, smoke_run: Any):
    summary = json.loads((folder / "summary.json").read_text())
    [found] = summary["results"]
    assert (summary["complete"], summary["subject"]["run_id"], summary["subject"]["step"]) == (True, "smoke", 16)
    assert (found["problems"], found["samples"], found["lost"], found["k"]) == (32, 32 * N, 0, N)
    validations = [line["data"] for line in read_jsonl(smoke_run.run_dir / METRICS)]
    [*_, last] = [data["val-core/arithmetic/acc/mean@1"] for data in validations if any("val-core" in k for k in data)]
    # Both are means over the same 32 problems, each sample of which is right or wrong.
    assert found["mean"] == pytest.approx(last, abs=0.2)
    assert found["low"] <= found["mean"] <= found["high"]
    assert found["tool_calls"] > 0.5


def test_every_sample_and_its_trajectory_are_kept(folder: Path):
    samples = pq.read_table(folder / "samples.parquet")
    assert samples.schema.equals(SAMPLES)
    trajectories = {record["trajectory_id"] for record in read_records(folder / "trained", validation=True)}
    assert trajectories == set(samples["trajectory_id"].to_pylist())
    assert len(trajectories) == 32 * N


def test_the_table_ends_it(done: Any, folder: Path):
    assert "tools, after training" in done.stdout
    assert f"mean@{N}" in done.stdout
    assert f"written to {folder}" in done.stdout


def test_the_same_command_again_takes_nothing(folder: Path, evaluate: Callable[[], Any]):
    before = json.loads((folder / "summary.json").read_text())
    again = evaluate()
    assert again.returncode == 0, again.stdout
    assert ": 0 samples to take" in again.stdout
    assert "Ray is up" not in again.stdout
    assert json.loads((folder / "summary.json").read_text())["results"] == before["results"]


def test_nothing_is_left(done: Any, leftovers: Callable[[], list[str]]):
    assert "leaked 0" in done.stdout
    assert leftovers() == []
