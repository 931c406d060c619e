"""verl_ext.progress: each phase, step and alarm is said once, in one line; a step also as an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_ext.alarms import ENDED, STARTED, Event
from verl_ext.progress import Follower, clock, step_object, validation_line
from verl_ext.runs import ALARMS, METRICS, PHASES

STEP = {
    "agent/reward_mean": 0.125, "agent/accuracy": 0.5, "agent/tool_use_ratio": 0.75, "agent/tool_error_ratio": 0.1,
    "agent/infra_failed": 2.0, "timing_s/step": 60.0, "timing_s/gen": 40.5, "timing_s/update_actor": 10.0,
    "perf/total_num_tokens": 72000, "agent/response_tokens": 500.0,
}  # fmt: skip
VALIDATION = {"val-core/aime_2024/acc/mean@30": 0.25, "val-aux/aime_2024/x": 1.0, "val-agent/accuracy": 0.25}


class Said(list):
    """The lines of a follower over a run folder."""

    def __init__(self, folder: Path, total: int | None = None, **how: bool) -> None:
        self.folder = folder
        self.told: list[dict[str, Any]] = []
        self.follower = Follower(folder, self.append, total, self.told.append, **how)

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
        "step 1/4  reward +0.125  accuracy 0.50  tool use 0.75  tool errors 0.10  lost 2  1,200 tokens/s  60.0 s "
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
    entry = {"step": 3, "time_s": 0.0, "data": {"val-aux/x": 1.0}}
    assert validation_line(step_object(entry, None, None, [])) == "validation at step 3  no score"


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


def test_the_time_left_is_that_of_the_last_steps_validations_in_them(said: Said):
    said.follower._total_steps = 100
    for step in range(1, 41):
        after = {"timing_s/testing": 150.0, "timing_s/save_checkpoint": 50.0} if step % 5 == 0 else {}
        said.log(step, STEP | {"timing_s/step": 1000.0 if step <= 20 else 60.0} | after)
    assert said[-1].endswith("1:40:00 left"), said[-1]  # 60 steps of 100 s
    assert "  1,200 tokens/s  60.0 s " in said[-1], "a validation after the step is no time of the step"


def test_a_clock_has_hours_from_an_hour_on():
    assert [clock(0), clock(59.6), clock(185), clock(3600), clock(90061)] == [
        "0:00", "1:00", "3:05", "1:00:00", "25:01:01",
    ]  # fmt: skip


def test_a_step_is_also_an_object_that_is_json(said: Said):
    said.log(0, VALIDATION)
    said.log(1, STEP)
    said.log(2, dict.fromkeys(STEP) | VALIDATION)
    first, second, third = (json.loads(json.dumps(step, allow_nan=False)) for step in said.told)
    assert second == {
        "step": 1, "total_steps": 4, "time_s": 0.0, "reward": 0.125, "accuracy": 0.5, "tool_use": 0.75,
        "tool_errors": 0.1, "lost": 2.0, "response_tokens": 500.0, "step_s": 60.0, "generate_s": 40.5,
        "update_s": 10.0, "tokens_per_s": 1200.0, "left_s": 180.0, "validation": None, "alarms": [],
    }  # fmt: skip
    assert list(first) == list(second) == list(third)
    assert (first["step"], first["reward"], first["left_s"]) == (0, None, None)
    assert first["validation"] == third["validation"] == {"aime_2024/acc/mean@30": 0.25}
    assert (third["reward"], third["tokens_per_s"]) == (None, None)


def raise_alarm(folder: Path, step: int, state: str) -> None:
    event = Event(step, "truncation", state, 0.5, 0.2, "too short", "raise it")
    with (folder / ALARMS).open("a") as file:
        file.write(json.dumps(vars(event)) + "\n")


def test_an_alarm_is_said_behind_its_step_once_when_it_starts_and_once_when_it_ends(said: Said):
    raise_alarm(said.folder, 2, STARTED)
    said.follower.poll()
    assert said == []  # its step is not there yet
    for step in (1, 2, 3):
        said.log(step, STEP)
    raise_alarm(said.folder, 4, ENDED)
    said.log(4, STEP)
    alarms = [(place, line.split(":")[0]) for place, line in enumerate(said) if "alarm" in line.lower()]
    assert alarms == [(2, "ALARM truncation at step 2"), (5, "alarm truncation ended at step 4")]
    assert "Cause: too short. Cure: raise it" in said[2]
    assert [step["alarms"] for step in said.told] == [[], ["truncation"], ["truncation"], []]


def test_steps_that_an_earlier_attempt_said_are_not_said_again(said: Said):
    said.log(1, STEP)
    again = Said(said.folder, 4, resumed=True)
    again.log(2, STEP)
    assert [line.split("  ")[0] for line in again] == ["step 2/4"]
