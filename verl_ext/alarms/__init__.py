"""Alarms while training: stated rules on the metric stream, each said once when it starts and once when it ends.

    metrics of a step -> Alarms.step -> events -> alarms.jsonl in the run folder, and an end of the run if
                                                  `verl_ext.stop_on` names the alarm

`rules.RULES` is the table; README.md in this folder is the same for people: what to watch, what to do.

alarms.jsonl has one object a line:

    step       the step whose metrics decided it
    alarm      the rule's name
    state      "started" or "ended"
    value      the rule's number at that step
    threshold  what it crossed: the rule's start, or its end
    cause      what is likely wrong
    cure       what to do
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.alarms.gauges import Gauge, Step
from verl_ext.alarms.rules import RULES, Rule
from verl_ext.errors import AlarmStopError
from verl_ext.runs import ALARMS, read_jsonl

STARTED, ENDED = "started", "ended"


@dataclass(frozen=True)
class Event:
    """An alarm that started or ended; a line of alarms.jsonl."""

    step: int
    alarm: str
    state: str
    value: float
    threshold: float
    cause: str
    cure: str

    def __str__(self) -> str:
        if self.state == ENDED:
            return f"alarm {self.alarm} ended at step {self.step}: {self.value:.4g}"
        return (
            f"ALARM {self.alarm} at step {self.step}: {self.value:.4g}, threshold {self.threshold:g}. "
            f"Cause: {self.cause}. Cure: {self.cure}"
        )


@dataclass
class _Watch:
    """One rule in one run."""

    rule: Rule
    gauge: Gauge
    on: bool = False
    in_a_row: int = 0  # steps that say otherwise than `on`

    def event(self, step: int, metrics: Step) -> Event | None:
        value = self.gauge.read(metrics)
        if value is None:  # a step that does not say leaves everything as it is
            return None
        rule = self.rule
        turns = rule.ends(value) if self.on else rule.starts(value)
        # Beside an alarm that is on, only what ends it is normal; else everything that does not start one.
        self.gauge.settle(normal=turns if self.on else not turns)
        self.in_a_row = self.in_a_row + 1 if turns else 0
        if self.in_a_row < rule.steps:
            return None
        self.on, self.in_a_row = not self.on, 0
        state, threshold = (STARTED, rule.start) if self.on else (ENDED, rule.end)
        return Event(step, rule.name, state, value, threshold, rule.cause, rule.cure)


@dataclass
class Alarms:
    """All rules over one run's metric stream."""

    rules: Sequence[Rule] = RULES
    _watches: list[_Watch] = field(init=False)

    def __post_init__(self) -> None:
        self._watches = [_Watch(rule, rule.gauge()) for rule in self.rules]

    def step(self, step: int, metrics: Step) -> list[Event]:
        """What starts and what ends with the metrics of a step."""
        events = (watch.event(step, metrics) for watch in self._watches)
        return [event for event in events if event is not None]

    @property
    def on(self) -> list[str]:
        """The alarms that are on now."""
        return [watch.rule.name for watch in self._watches if watch.on]


class AlarmLog:
    """The alarms of a run, written to its folder.

    Args:
        run_dir: the run's folder.
        stop_on: alarms that end the run.
        before: steps that the run has logged already, lines of metrics.jsonl: a run that goes on in its folder.
    """

    def __init__(self, run_dir: Path, stop_on: Iterable[str] = (), before: Iterable[Step] = ()) -> None:
        self._path = run_dir / ALARMS
        self._stop_on = frozenset(stop_on)
        self._alarms = Alarms()
        for line in before:
            self._alarms.step(line["step"], line["data"])

    def step(self, step: int, metrics: Step) -> list[Event]:
        """Write what starts and what ends with the metrics of a step; the same is returned."""
        events = self._alarms.step(step, metrics)
        if events:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(event)) + "\n" for event in events)
        return events

    def heed(self, events: Iterable[Event]) -> None:
        """End the run if one of these started and is to end it.

        Raises:
            AlarmStopError: with the alarm.
        """
        stopping = [event for event in events if event.state == STARTED and event.alarm in self._stop_on]
        if stopping:
            raise AlarmStopError("\n".join(map(str, stopping)))


def names_of(stop_on: Any) -> list[str]:
    """The names in `verl_ext.stop_on`: a list of them, or text with commas between."""
    return [str(name).strip() for name in (stop_on.split(",") if isinstance(stop_on, str) else stop_on or [])]


def read_events(run_dir: Path) -> list[Event]:
    """The complete lines of a run's alarms.jsonl; empty if no alarm has started yet."""
    return [Event(**line) for line in read_jsonl(run_dir / ALARMS)]


def overview(events: Sequence[Event]) -> str:
    """What a run's alarms were, one line each, for its end."""
    if not events:
        return "alarms: none"
    lines = []
    for place, event in enumerate(events):
        if event.state == STARTED:
            later = events[place + 1 :]
            ended = next((other.step for other in later if other.alarm == event.alarm), None)
            until = f"to {ended}" if ended is not None else "on, not ended"
            lines.append(f"  {event.alarm}, from step {event.step} {until}: {event.cure}")
    return "\n".join([f"alarms: {len(lines)}", *lines])
