"""verl_ext.alarms: each rule fires on the stream that it is for and on no healthy one, once, and ends once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_ext.alarms import ENDED, STARTED, AlarmLog, Alarms, Event, names_of, overview, read_events
from verl_ext.alarms.gauges import SinceBest, ToNormal, of, tokens_per_s
from verl_ext.alarms.rules import NAMES, RULES, Rule
from verl_ext.errors import AlarmStopError
from verl_ext.runs import ALARMS, read_jsonl

# 17 lines that `invoke smoke` wrote, without the keys that nobody here reads.
HEALTHY = read_jsonl(Path(__file__).parents[1] / "data" / "healthy_metrics.jsonl")
LATE = HEALTHY[-1]["data"]

Change = Callable[[dict[str, Any]], dict[str, Any]]


def put(**values: Any) -> Change:
    """Other values for metrics, `a__b` for `a/b`."""
    return lambda data: data | {name.replace("__", "/"): value for name, value in values.items()}


def times(key: str, factor: float) -> Change:
    return lambda data: data | {key: data[key] * factor}


# What is done to healthy steps so that the alarm must start, and nothing else of it.
WRONG: dict[str, Change] = {
    "tools-never-called": put(agent__tool_use_ratio=0.0, agent__tool_calls=0.0),
    "parse-failures": put(agent__parse_failure_ratio=0.4),
    "tool-errors": put(agent__tool_error_ratio=0.7),
    "infra-failures": put(agent__infra_failed=4.0),
    "no-signal": put(critic__advantages__max=0.0, critic__advantages__min=0.0),
    "reward-flat": put(agent__reward_mean=-0.4, agent__accuracy=0.3),
    "reward-collapsed": put(agent__reward_mean=-0.6, agent__accuracy=0.0),
    "entropy-collapse": put(actor__entropy=0.004),
    "length-explosion": times("agent/response_tokens", 2.5),
    "truncation": put(agent__truncated_ratio=0.5),
    "probability-difference": put(training__rollout_probs_diff_mean=0.02),
    "grad-norm": put(actor__grad_norm=500.0),
    "not-finite": put(actor__grad_norm=None),
    "sandbox-waiting": put(sandbox__waiting_share=0.8),
    "throughput-drop": times("timing_s/step", 4.0),
}


def run(alarms: Alarms, lines: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> list[Event]:
    return [event for line in lines for event in alarms.step(line["step"], line["data"])]


def going_on(first: int, count: int, change: Change = lambda data: data) -> list[dict[str, Any]]:
    """Steps after the healthy ones, each like their last but for the change."""
    return [{"step": step, "data": change(LATE)} for step in range(first, first + count)]


def test_every_rule_has_a_stream_here():
    assert set(WRONG) == set(NAMES)
    assert len(set(NAMES)) == len(RULES)


def test_a_healthy_run_raises_none():
    alarms = Alarms()
    assert run(alarms, HEALTHY) == []
    # The end of a run that has learned what there is to learn: it goes on like that.
    assert run(alarms, going_on(17, 200)) == []


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_once_and_ends_once(name: str):
    alarms = Alarms()
    run(alarms, HEALTHY)
    rule = next(rule for rule in RULES if rule.name == name)
    needed = 60 if name == "reward-flat" else 12
    wrong = run(alarms, going_on(17, needed, WRONG[name]))
    started = [event for event in wrong if event.alarm == name]
    assert [event.state for event in started] == [STARTED]
    assert rule.starts(started[0].value)
    assert (started[0].threshold, started[0].cause, started[0].cure) == (rule.start, rule.cause, rule.cure)
    assert name in alarms.on
    ended = [event for event in run(alarms, going_on(200, 30)) if event.alarm == name]
    assert [event.state for event in ended] == [ENDED]
    assert ended[0].threshold == rule.end
    assert rule.ends(ended[0].value)
    assert name not in alarms.on


@pytest.mark.parametrize("name", [rule.name for rule in RULES if rule.steps > 1])
def test_one_odd_step_is_none(name: str):
    alarms = Alarms()
    run(alarms, HEALTHY)
    assert name not in [event.alarm for event in run(alarms, going_on(17, 1, WRONG[name]))]
    assert name not in [event.alarm for event in run(alarms, going_on(18, 5))]


def level(**values: Any) -> Rule:
    from verl_ext.alarms.gauges import Level

    given = {"name": "x", "what": "x", "gauge": lambda: Level(of("x")), "start": 10.0, "end": 5.0, "steps": 2}
    return Rule(**{**given, "cause": "c", "cure": "d", "source": "s", **values})


def states(rule: Rule, values: list[Any]) -> list[tuple[int, str]]:
    alarms = Alarms([rule])
    return [(e.step, e.state) for step, value in enumerate(values) for e in alarms.step(step, {"x": value})]


def test_between_its_two_thresholds_an_alarm_stays_as_it_is():
    assert states(level(), [7, 7, 7]) == []
    assert states(level(), [11, 11, 7, 7, 7, 11, 7]) == [(1, STARTED)]
    assert states(level(), [11, 11, 7, 4, 7, 4, 4]) == [(1, STARTED), (6, ENDED)]
    assert states(level(), [11, 7, 11, 11]) == [(3, STARTED)]


def test_it_starts_again():
    assert states(level(steps=1), [11, 4, 11]) == [(0, STARTED), (1, ENDED), (2, STARTED)]


def test_below_is_the_same_the_other_way_round():
    assert states(level(below=True, start=1.0, end=2.0), [0, 0, 1.5, 2, 2]) == [(1, STARTED), (4, ENDED)]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "text", True])
def test_what_is_no_number_changes_nothing(missing: Any):
    assert states(level(), [11, missing, 11]) == [(2, STARTED)]
    assert states(level(), [11, 11, missing, 4, missing, 4]) == [(1, STARTED), (5, ENDED)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "not-finite"])
@pytest.mark.parametrize("gone", [None, math.nan, "missing"])
def test_no_rule_fires_or_fails_without_its_metrics(name: str, gone: Any):
    alarms = Alarms([rule for rule in RULES if rule.name == name])
    run(alarms, HEALTHY)
    nothing = {} if gone == "missing" else dict.fromkeys(LATE, gone)
    assert run(alarms, [{"step": step, "data": nothing} for step in range(17, 80)]) == []
    assert Alarms().step(1, {}) == []


def test_a_ratio_of_a_few_calls_says_nothing():
    alarms = Alarms()
    few = put(agent__parse_failure_ratio=1.0, agent__tool_error_ratio=1.0, agent__tool_calls=3.0)
    assert run(alarms, going_on(1, 5, few)) == []


def test_nan_and_null_are_what_not_finite_is_for():
    for value in (math.nan, math.inf, None):
        [event] = Alarms().step(1, {"actor/grad_norm": value, "actor/entropy": 0.1})
        assert (event.alarm, event.value) == ("not-finite", 1.0)


def test_what_goes_wrong_for_long_does_not_become_the_measure():
    gauge = ToNormal(of("x"), window=20, least=5)
    rule = level(gauge=lambda: gauge, start=2.0, end=1.5)
    alarms = Alarms([rule])
    events = [e for step in range(60) for e in alarms.step(step, {"x": 10.0 if step < 10 else 30.0})]
    assert [(event.step, event.state, event.value) for event in events] == [(11, STARTED, 3.0)]


def test_a_slow_change_is_no_jump():
    rule = level(gauge=lambda: ToNormal(of("x")), start=2.0, end=1.5)
    alarms = Alarms([rule])
    assert [e for step in range(200) for e in alarms.step(step, {"x": 100 * 1.02**step})] == []


def test_a_reward_that_rises_slowly_is_not_flat():
    gauge = SinceBest(of("x"), gain=0.01, done=of("accuracy"), enough=0.9)
    values = [gauge.read({"x": 0.001 * step}) for step in range(200)]
    assert max(value for value in values if value is not None) < 20


def test_throughput_leaves_out_validations_and_checkpoints():
    alarms = Alarms()
    run(alarms, HEALTHY)
    after = put(timing_s__testing=40.0, timing_s__save_checkpoint=20.0)
    assert run(alarms, going_on(17, 10, after)) == []
    assert tokens_per_s(after(LATE)) == LATE["perf/total_num_tokens"] / LATE["timing_s/step"]


# --- in the run folder


def test_a_line_of_the_file_has_what_the_report_reads(tmp_path: Path):
    log = AlarmLog(tmp_path)
    for line in [*going_on(1, 3, WRONG["truncation"]), *going_on(4, 3)]:
        log.step(line["step"], line["data"])
    first, second = (json.loads(line) for line in (tmp_path / ALARMS).read_text().splitlines())
    assert list(first) == ["step", "alarm", "state", "value", "threshold", "cause", "cure"]
    assert (first["step"], first["alarm"], first["state"], first["value"]) == (3, "truncation", "started", 0.5)
    assert (second["step"], second["alarm"], second["state"]) == (6, "truncation", "ended")
    assert [event.step for event in read_events(tmp_path)] == [3, 6]
    assert "Cure: raise data.max_response_length" in str(read_events(tmp_path)[0])


def test_without_an_alarm_there_is_no_file(tmp_path: Path):
    log = AlarmLog(tmp_path)
    for line in HEALTHY:
        log.step(line["step"], line["data"])
    assert list(tmp_path.iterdir()) == []
    assert read_events(tmp_path) == []


def test_an_alarm_that_is_named_ends_the_run_when_it_is_written(tmp_path: Path):
    log = AlarmLog(tmp_path, stop_on=["truncation"])
    lines = going_on(1, 3, WRONG["truncation"])
    for line in lines[:2]:
        log.heed(log.step(line["step"], line["data"]))
    events = log.step(3, lines[2]["data"])
    with pytest.raises(AlarmStopError, match="truncation at step 3") as raised:
        log.heed(events)
    assert "Cure" in str(raised.value)
    assert [event.alarm for event in read_events(tmp_path)] == ["truncation"]


def test_one_that_is_not_named_does_not(tmp_path: Path):
    log = AlarmLog(tmp_path, stop_on=["grad-norm"])
    for line in [*going_on(1, 5, WRONG["truncation"]), *going_on(6, 5)]:
        log.heed(log.step(line["step"], line["data"]))
    assert {event.alarm for event in read_events(tmp_path)} == {"truncation"}


def test_the_end_of_one_that_is_named_ends_nothing(tmp_path: Path):
    log = AlarmLog(tmp_path, stop_on=["truncation"], before=going_on(1, 4, WRONG["truncation"]))
    for line in going_on(5, 4):
        log.heed(log.step(line["step"], line["data"]))
    assert [event.state for event in read_events(tmp_path)] == [ENDED]


def test_names_are_given_as_a_list_or_with_commas():
    assert names_of("truncation, grad-norm") == names_of(["truncation", "grad-norm"]) == ["truncation", "grad-norm"]
    assert names_of([]) == names_of(None) == []
    assert names_of("truncation,") == ["truncation", ""], "a name is missing: for preflight to say"


def test_the_end_of_a_run_says_what_there_was():
    assert overview([]) == "alarms: none"
    given = {"value": 1.0, "threshold": 1.0, "cause": "c"}
    events = [
        Event(3, "truncation", STARTED, cure="a", **given), Event(4, "grad-norm", STARTED, cure="b", **given),
        Event(6, "truncation", ENDED, cure="a", **given), Event(9, "truncation", STARTED, cure="a", **given),
    ]  # fmt: skip
    assert overview(events).splitlines() == [
        "alarms: 3",
        "  truncation, from step 3 to 6: a",
        "  grad-norm, from step 4 on, not ended: b",
        "  truncation, from step 9 on, not ended: a",
    ]


def test_a_run_that_goes_on_in_its_folder_says_nothing_twice(tmp_path: Path):
    wrong = going_on(1, 4, WRONG["truncation"])
    first = AlarmLog(tmp_path)
    for line in wrong:
        first.step(line["step"], line["data"])
    again = AlarmLog(tmp_path, stop_on=["truncation"], before=wrong)
    for line in [*going_on(5, 2, WRONG["truncation"]), *going_on(7, 3)]:
        again.step(line["step"], line["data"])
    assert [(event.step, event.state) for event in read_events(tmp_path)] == [(3, STARTED), (9, ENDED)]
