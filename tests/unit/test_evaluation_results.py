"""What an evaluation leaves: samples in parts, and the numbers over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl_ext.errors import ConfigurationError, DataError
from verl_ext.evaluation.plan import PART_SAMPLES, Plan, parts, seed_of
from verl_ext.evaluation.results import (
    PROBLEMS,
    SAMPLES,
    key_of,
    next_part,
    problem_rows,
    read_parts,
    result,
    sample_row,
    write_part,
    write_results,
)

ROWS = [{"data_source": "s", "extra_info": {"index": f"p{number}"}} for number in range(3)]
PLAN = Plan(
    settings=("no_tools", "tools", "trained"),
    models={"base": "/b", "trained": "/t"},
    data="d.parquet",
    content_sha256="0",
    n=2,
    seed=1,
    subject={"name": "x"},
    sampling={"n": 2},
    overrides=("a.b=1",),
)


def call(status: str) -> dict[str, Any]:
    return {"name": "code_interpreter", "arguments": "", "status": status, "response": "", "elapsed_s": 0.1}


def trajectory(accuracy: float, *, problem: str = "p0", extracted: str = "7", calls: tuple[str, ...] = (),
               tokens: int = 10, stop: str = "answered", lost: str = "") -> dict[str, Any]:  # fmt: skip
    turns = [{"text": "", "tokens": 4, "generate_s": 0.1, "calls": [call(status) for status in calls]}]
    return {
        "data_source": "s",
        "problem_id": problem,
        "ground_truth": "42",
        "trajectory_id": f"val-1-{problem}",
        "response_ids": [1] * tokens,
        "turns": turns,
        "accuracy": accuracy,
        "verdict": "equal" if accuracy else "different",
        "extracted": extracted,
        "stop_reason": stop,
        "infra_failed": bool(lost),
        "infra_error": lost,
    }


def samples(setting: str, *outcomes: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample_row(setting, number, 5, 1, one) for number, one in enumerate(outcomes)]


def test_a_sample_counts_its_calls_by_what_became_of_them():
    statuses = ("ok", "error", "timeout", "malformed", "unknown_tool", "bad_arguments", "not_run")
    [row] = samples("tools", trajectory(1.0, calls=statuses, tokens=9))
    assert set(row) == set(SAMPLES.names)
    assert (row["tool_calls"], row["calls_run"], row["calls_failed"], row["calls_unread"]) == (7, 3, 2, 3)
    assert (row["response_tokens"], row["model_tokens"], row["right"]) == (9, 4, True)


def test_the_numbers_of_a_setting_weigh_each_problem_alike_and_leave_out_what_was_lost():
    rows = samples(
        "tools",
        trajectory(1.0, problem="a", calls=("ok", "error"), tokens=10),
        trajectory(0.0, problem="a", extracted="", stop="length", tokens=30),
        trajectory(0.0, problem="a", stop="turns", tokens=20),
        trajectory(1.0, problem="b", tokens=20),
        trajectory(0.0, problem="b", lost="the sandbox died"),
    )
    found = result(rows)
    assert (found["problems"], found["samples"], found["n_valid"], found["lost"], found["k"]) == (2, 5, 4, 1, 1)
    assert found["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["low"] <= found["mean"] <= found["high"]
    assert found["pass_at_k"] == {"1": pytest.approx((1 / 3 + 1) / 2)}
    assert (found["truncated_ratio"], found["out_of_turns_ratio"], found["no_answer_ratio"]) == (0.25, 0.25, 0.25)
    assert (found["tool_calls"], found["tool_use_ratio"], found["tool_error_ratio"]) == (0.5, 0.25, 0.5)
    assert found["response_tokens"] == {"mean": 20, "p50": 20, "p95": pytest.approx(28.5), "max": 30}
    assert found["verdicts"] == {"equal": 2, "different": 2}


def test_right_answers_are_one_answer_however_they_are_spelled():
    rows = samples(
        "tools",
        trajectory(1.0, extracted="42"),
        trajectory(1.0, extracted="84/2"),
        trajectory(0.0, extracted="7"),
        trajectory(0.0, extracted=""),
        trajectory(0.0, extracted=""),
        trajectory(0.0, extracted=""),
    )
    assert result(rows)["majority_at_k"]["6"] == 1.0
    [problem] = problem_rows(rows)
    assert (problem["majority_answer"], problem["majority_right"]) == ("42", True)


def test_where_everything_was_lost_there_is_no_number_and_the_summary_is_still_json(tmp_path: Path):
    rows = samples("tools", trajectory(0.0, lost="gone"))
    summary = write_results(tmp_path, {"id": "e"}, rows)
    [entry] = summary["results"]
    assert (entry["mean"], entry["problems"], entry["lost"], entry["pass_at_k"]) == (None, 0, 1, {})
    assert json.loads((tmp_path / "summary.json").read_text())["results"][0]["response_tokens"]["mean"] is None


def test_differences_pair_the_problems_that_both_settings_have(tmp_path: Path):
    before = samples("no_tools", trajectory(0.0, problem="a"), trajectory(1.0, problem="b"))
    after = samples("trained", trajectory(1.0, problem="a"), trajectory(1.0, problem="c"))
    [difference] = write_results(tmp_path, {}, [*after, *before])["differences"]
    assert difference == {
        "data_source": "s", "from": "no_tools", "to": "trained", "problems": 1, "difference": 1.0, "low": 1.0,
        "high": 1.0,
    }  # fmt: skip


def test_the_files_have_the_schemas_that_are_promised(tmp_path: Path):
    write_results(tmp_path, {}, samples("tools", trajectory(1.0)))
    assert pq.read_schema(tmp_path / "samples.parquet").equals(SAMPLES)
    assert pq.read_schema(tmp_path / "problems.parquet").equals(PROBLEMS)
    assert not list(tmp_path.glob(".*"))


def test_a_sample_that_was_taken_again_counts_once_as_it_was_last(tmp_path: Path):
    assert next_part(tmp_path) == 1
    write_part(tmp_path, 1, samples("tools", trajectory(0.0, lost="gone")))
    write_part(tmp_path, 2, samples("tools", trajectory(1.0)))
    [row] = read_parts(tmp_path)
    assert (row["right"], row["infra_failed"], next_part(tmp_path)) == (True, False, 3)


def test_a_part_that_is_damaged_is_named_with_the_cure(tmp_path: Path):
    write_part(tmp_path, 1, samples("tools", trajectory(1.0)))
    path = tmp_path / "samples" / "part-000001.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"part-000001.parquet cannot be read .*delete it"):
        read_parts(tmp_path)


def test_what_was_kept_is_not_taken_again_and_the_rest_has_the_same_seeds():
    everything = [sample for part in parts(PLAN, "base", ROWS, set(), 1) for sample in part.samples]
    assert len(everything) == len({sample.key for sample in everything}) == 2 * 3 * 2
    done = {sample.key for sample in everything[:5]}
    left = parts(PLAN, "base", ROWS, done, 8)
    assert [part.number for part in left] == [8, 9]
    assert [sample for part in left for sample in part.samples] == everything[5:]
    # A key of a row on disk is the key of a sample.
    row = {"setting": "tools", "data_source": "s", "problem_id": "p1", "sample": 1}
    assert key_of(row) in {sample.key for sample in everything}


def test_a_part_has_samples_of_one_setting_and_not_too_many():
    rows = [{"data_source": "s", "extra_info": {"index": f"p{number}"}} for number in range(PART_SAMPLES)]
    found = parts(PLAN, "base", rows, set(), 1)
    assert {len(part.samples) for part in found} == {PART_SAMPLES}
    assert all(len({sample.setting for sample in part.samples}) == 1 for part in found)
    assert {sample.setting for part in parts(PLAN, "trained", rows, set(), 1) for sample in part.samples} == {"trained"}


def test_each_sample_has_a_seed_of_its_own_and_settings_share_them():
    seeds = {seed_of(1, problem, number) for problem in ("s/a", "s/b", "t/a") for number in range(50)}
    assert len(seeds) == 150
    assert seed_of(2, "s/a", 0) not in seeds
    assert max(seeds) + 1000 < 2**63


def test_an_evaluation_that_asks_for_something_else_does_not_go_on(tmp_path: Path):
    PLAN.write(tmp_path)
    kept = Plan.read(tmp_path)
    kept.refuse_change(PLAN)
    changed = Plan(**{**vars(PLAN), "n": 4, "content_sha256": "1"})
    with pytest.raises(ConfigurationError, match="choose another --run-id") as caught:
        kept.refuse_change(changed)
    assert "content_sha256 was 0 and is 1" in str(caught.value)
    assert "n was 2 and is 4" in str(caught.value)


def test_a_folder_that_is_no_evaluation_is_not_gone_on_with(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="is no evaluation"):
        Plan.read(tmp_path)
