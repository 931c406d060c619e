"""verl_ext.progress: each phase and step is said once, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_ext.progress import Follower, validation_line
from verl_ext.runs import METRICS, PHASES

STEP = {
    "agent/reward_mean": 0.125, "agent/accuracy": 0.5, "agent/tool_use_ratio": 0.75, "agent/tool_error_ratio": 0.1,
    "agent/infra_failed": 2.0, "timing_s/step": 60.0, "timing_s/gen": 40.5, "timing_s/update_actor": 10.0,
}  # fmt: skip
VALIDATION = {"val-core/aime_2024/acc/mean@30": 0.25, "val-aux/aime_2024/x": 1.0, "val-agent/accuracy": 0.25}


class Said(list):
    """The lines of a follower over a run folder."""

    def __init__(self, folder: Path, total: int | None = None, **how: bool) -> None:
        self.folder = folder
        self.follower = Follower(folder, self.append, total, **how)

    def log(self, step: int, data: dict[str, Any], end: str = "\n") -> None:
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps({"step": step, "time_s": 0.0, "data": data}) + end)
        self.follower.poll()


@pytest.fixture
def said(tmp_path: Path) -> Said:
    return Said(tmp_path, 4)


def test_a_step_is_one_line_with_what_matters(said: Said):
    said.log(1, STEP)
    assert said == [
        "step 1/4  reward +0.125  accuracy 0.50  tool use 0.75  tool errors 0.10  lost 2  60.0 s "
        "(generate 40.5, update 10.0)  3:00 left"
    ]


def test_nothing_is_said_twice(said: Said):
    said.log(1, STEP)
    said.follower.poll()
    said.log(2, STEP)
    assert len(said) == 2


def test_half_a_line_is_waited_for(said: Said):
    said.log(1, STEP, end="")
    assert said == []
    with (said.folder / METRICS).open("a") as file:
        file.write("\n")
    said.follower.poll()
    assert len(said) == 1


def test_phases_are_said_with_the_seconds_since_the_first(said: Said):
    lines = [{"phase": "start", "time_s": 100.0}, {"phase": "Ray is up", "time_s": 112.4}]
    (said.folder / PHASES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    said.follower.poll()
    assert said == ["start (0 s)", "Ray is up (12 s)"]


def test_a_validation_has_a_line_of_its_own_also_within_a_step(said: Said):
    said.log(0, VALIDATION)
    said.log(4, STEP | VALIDATION)
    assert [line.split("  ")[0] for line in said] == ["validation at step 0", "step 4/4", "validation at step 4"]
    assert said[0] == "validation at step 0  aime_2024/acc/mean@30 0.250"


def test_what_was_no_number_is_shown_as_such(said: Said):
    said.log(1, dict.fromkeys(STEP))
    said.log(1, {"val-core/x/acc/mean@1": None})
    assert "reward +nan" in said[0]
    assert "nan" in said[1]


def test_a_score_that_is_missing_is_said_to_be():
    assert validation_line(3, {"val-aux/x": 1.0}) == "validation at step 3  no score"


def test_a_line_without_rollouts_is_no_step(said: Said):
    said.log(1, {"actor/lr": 1e-6})
    assert said == []


def test_without_a_total_no_end_is_promised(tmp_path: Path):
    said = Said(tmp_path)
    said.log(1, STEP)
    assert said[0].startswith("step 1  reward")
    assert "left" not in said[0]


def test_the_follower_knows_when_something_last_happened(said: Said):
    before = said.follower.last_change_s
    said.follower.poll()
    assert said.follower.last_change_s == before
    said.log(1, STEP)
    assert said.follower.last_change_s >= before
    assert said.follower.last_seen == said[-1]


def test_steps_that_an_earlier_attempt_said_are_not_said_again(said: Said):
    said.log(1, STEP)
    again = Said(said.folder, 4, resumed=True)
    again.log(2, STEP)
    assert [line.split("  ")[0] for line in again] == ["step 2/4"]
