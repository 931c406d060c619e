"""verl_ext.rollout.summary: the numbers of a step, lost trajectories counted but left out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    from verl_ext.rollout import summary


def row(*statuses: str, **changes: Any) -> dict[str, Any]:
    """A trajectory whose first turn made calls with these statuses."""
    calls = [{"status": status} for status in statuses]
    turns = [{"calls": calls}, {"calls": []}] if calls else [{"calls": []}]
    values = {
        "turns": turns, "infra_failed": False, "reward": 1.0, "accuracy": 1.0, "stop_reason": "answered",
        "response_ids": [1] * 10, "response_mask": [1] * 6 + [0] * 4,
    }  # fmt: skip
    return values | changes


def test_each_number_means_what_it_says():
    numbers = summary(
        [
            row("ok", "error"),
            row("timeout", "malformed", "not_run", reward=-1.0, accuracy=0.0, stop_reason="length"),
            row(reward=-1.0, accuracy=0.0, stop_reason="turns"),
            row(),
        ]
    )
    assert numbers == {
        "trajectories": 4, "infra_failed": 0, "n_valid": 4, "reward_mean": 0.0, "accuracy": 0.5, "tool_calls": 5,
        "tool_calls_per_trajectory": 1.25, "tool_use_ratio": 0.5, "tool_error_ratio": pytest.approx(2 / 3),
        "tool_timeout_ratio": pytest.approx(1 / 3), "parse_failure_ratio": 0.2, "accuracy_without_tool": 0.5,
        "trajectories_without_tool": 2, "assistant_turns": 1.5, "truncated_ratio": 0.25, "out_of_turns_ratio": 0.25,
        "response_tokens": 10, "trained_tokens": 6,
    }  # fmt: skip
    assert all(type(value) is float for value in numbers.values())


def test_a_lost_trajectory_is_counted_and_left_out():
    lost = row("infra_failed", infra_failed=True, reward=0.0, accuracy=0.0, response_mask=[0] * 10)
    numbers = summary([row("ok"), lost])
    clean = summary([row("ok")])
    assert (numbers.pop("trajectories"), numbers.pop("infra_failed")) == (2, 1)
    assert numbers == {name: value for name, value in clean.items() if name not in ("trajectories", "infra_failed")}


@pytest.mark.parametrize("rows", [[], [row(infra_failed=True)]])
def test_nothing_valid_gives_zeros_and_no_division_by_zero(rows: list[dict[str, Any]]):
    numbers = summary(rows)
    assert numbers["reward_mean"] == numbers["accuracy"] == 0.0
    assert all(value == value for value in numbers.values())
