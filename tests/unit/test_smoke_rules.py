"""recipe.smoke.rules: each part of "it learned" fails alone, and a mask that is off by one is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.smoke import rules
from recipe.smoke.rules import checks, mask_errors
from verl_ext.runs import METRICS, PHASES
from verl_ext.trajectory import write_records

GOOD: dict[str, Any] = {
    "accuracy_first": 0.25, "accuracy_last": 0.75, "tool_use_last": 0.9, "mask_errors": 0, "mask_rows": 128, "left": 0,
    "accuracy_without_tool": {"accuracy": 0.01, "trajectories": 90.0}, "probability_difference_last": 0.004,
    "export": {"ok": True, "differences": {"largest logit difference": 0.001}},
}  # fmt: skip
NAN = float("nan")


def failed(**changes: Any) -> list[str]:
    return [check.name for check in checks(GOOD | changes) if not check.passed]


def test_a_good_run_passes():
    assert failed() == []
    assert failed(export={}) == []
    assert len(checks(GOOD)) == 7
    assert len(checks(GOOD | {"export": {}})) == 6


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"accuracy_last": 0.49}, "accuracy rises by 0.25 or more"),
        ({"accuracy_last": NAN}, "accuracy rises by 0.25 or more"),
        ({"accuracy_first": NAN}, "accuracy rises by 0.25 or more"),
        ({"tool_use_last": 0.49}, "half of the last trajectories call the tool"),
        ({"tool_use_last": NAN}, "half of the last trajectories call the tool"),
        ({"accuracy_without_tool": {"accuracy": 0.05, "trajectories": 90.0}}, "without the tool, under 5% are right"),
        ({"accuracy_without_tool": {"accuracy": 0.0, "trajectories": 0.0}}, "without the tool, under 5% are right"),
        ({"accuracy_without_tool": {"accuracy": NAN, "trajectories": 9.0}}, "without the tool, under 5% are right"),
        ({"mask_errors": 1}, "the tool's tokens are masked"),
        ({"mask_rows": 0}, "the tool's tokens are masked"),
        ({"probability_difference_last": 0.01}, "engine and trainer agree at the last step, under 0.01"),
        ({"probability_difference_last": NAN}, "engine and trainer agree at the last step, under 0.01"),
        ({"left": 1}, "no sandbox is left"),
        ({"export": {"ok": False, "differences": {"x": 1.0}}}, "the exported model has the trainer's logits"),
        ({"export": {"error": "export failed"}}, "the exported model has the trainer's logits"),
    ],
)
def test_each_part_fails_alone(changes: dict[str, Any], name: str):
    assert failed(**changes) == [name]


def record(**changes: Any) -> dict[str, Any]:
    """Turns of 3 and 2 tokens with 4 of the environment between them."""
    values: dict[str, Any] = {
        "response_mask": [1, 1, 1, 0, 0, 0, 0, 1, 1],
        "rollout_log_probs": [-0.5, -0.25, -1.0, 0.0, 0.0, 0.0, 0.0, -0.125, -2.0],
        "turns": [{"tokens": 3}, {"tokens": 2}],
        "infra_failed": False,
    }
    return values | changes


LOST = {"response_mask": [0] * 9, "infra_failed": True}


@pytest.mark.parametrize(
    "good",
    [
        record(),
        record(**LOST),
        record(**LOST, turns=[]),
        record(response_mask=[1], rollout_log_probs=[-0.5], turns=[{"tokens": 1}]),
        record(response_mask=[1, 1, 1, 0, 0], rollout_log_probs=[-1.0, -1.0, -1.0, 0.0, 0.0], turns=[{"tokens": 3}]),
    ],
)
def test_a_right_mask_is_no_error(good: dict[str, Any]):
    assert mask_errors([good]) == 0


@pytest.mark.parametrize(
    "tampered",
    [
        record(response_mask=[1] * 9),
        record(response_mask=[0] * 9),
        record(response_mask=[1, 1, 1, 1, 0, 0, 0, 0, 1]),
        record(response_mask=[1, 1, 0, 0, 0, 0, 1, 1, 1]),
        record(response_mask=[0, 1, 1, 1, 0, 0, 0, 1, 1]),
        record(response_mask=[1, 1, 1, 0, 1, 0, 0, 0, 1]),
        record(response_mask=[0, 0, 0, 1, 1, 1, 1, 0, 0]),
        record(response_mask=[]),
        record(rollout_log_probs=[]),
        record(rollout_log_probs=[-0.5] * 9),
        record(turns=[{"tokens": 2}, {"tokens": 3}]),
        record(turns=[{"tokens": 5}]),
        record(turns=[]),
        record(infra_failed=True),
    ],
)
def test_a_tampered_mask_is_an_error(tampered: dict[str, Any]):
    assert mask_errors([record(), tampered, record()]) == 1


# --- the report of a whole run folder


class Result:
    """What the launcher gives, as far as the report reads it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.server_stats, self.swept, self.left = run_dir, {"created": 9, "killed": 9}, 0, 0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with (tmp_path / METRICS).open("w") as file:
        file.write(json.dumps({"step": 0, "data": {"val-core/arithmetic/acc/mean@1": 0.1}}) + "\n")
        for step in range(1, 9):
            data = {
                "agent/accuracy": step / 8, "agent/reward_mean": step / 4 - 1, "agent/tool_use_ratio": step / 8,
                "agent/tool_calls": 4.0, "agent/tool_error_ratio": 0.0, "agent/parse_failure_ratio": 0.0,
                "agent/assistant_turns": 2.0, "agent/trajectories_without_tool": 8.0 - step,
                "agent/accuracy_without_tool": 0.0, "training/rollout_probs_diff_mean": 0.004,
            }  # fmt: skip
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    (tmp_path / PHASES).write_text('{"phase": "start", "time_s": 1.0}\n{"phase": "Ray is up", "time_s": 4.5}\n')
    row = record() | {"trajectory_id": "t", "response_ids": [1] * 9, "turns": [
        {"text": "", "tokens": tokens, "generate_s": 0.0, "calls": []} for tokens in (3, 2)]}  # fmt: skip
    write_records(tmp_path, 1, False, [row])
    return tmp_path


def test_a_run_folder_becomes_numbers_and_a_page(run_dir: Path):
    report = rules.report(Result(run_dir), {}, {"train": 12.34})
    numbers = report.numbers
    assert (numbers["accuracy_first"], numbers["accuracy_last"]) == (1 / 8, pytest.approx(7.5 / 8))
    assert numbers["accuracy_without_tool"] == {"trajectories": 28.0, "accuracy": 0.0}
    assert numbers["validation"] == {"0": 0.1}
    assert numbers["start_phases"] == {"start": 0.0, "Ray is up": 3.5}
    assert (numbers["mask_errors"], numbers["mask_rows"]) == (0, 1)
    assert report.passed
    text = report.render()
    assert "it learned" in text
    assert max(map(len, text.splitlines())) <= 116


def test_what_was_no_number_fails_and_is_shown(run_dir: Path):
    text = (run_dir / METRICS).read_text().replace('"agent/accuracy": 1.0', '"agent/accuracy": null')
    (run_dir / METRICS).write_text(text.replace('"training/rollout_probs_diff_mean": 0.004', '"x": 0'))
    report = rules.report(Result(run_dir), {}, {})
    assert not report.passed
    assert "nan" in report.render()


def test_a_run_that_logged_nothing_did_not_learn(tmp_path: Path):
    report = rules.report(Result(tmp_path), {}, {})
    assert not report.passed
    assert "it did NOT learn" in report.render()
