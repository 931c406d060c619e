"""One line a step for a person to read, or one object a step for a program, followed from the run folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_ext.alarms import STARTED, Event, read_events
from verl_ext.alarms.gauges import number, tokens_per_s
from verl_ext.runs import METRICS, PHASES, note_phase, read_jsonl

# Steps that the time left is reckoned from: enough to hold a validation where one comes every few steps.
ETA_STEPS = 20
# verl's timer of a step ends before what follows it (0.6.1 trainer/ppo/ray_trainer.py fit).
_WHOLE_STEP = ("step", "testing", "save_checkpoint")
# Our names of a step's numbers, and verl's and ours in metrics.jsonl, which trackers and reports show.
STEP_NUMBERS = {
    "reward": "agent/reward_mean",
    "accuracy": "agent/accuracy",
    "tool_use": "agent/tool_use_ratio",
    "tool_errors": "agent/tool_error_ratio",
    "lost": "agent/infra_failed",
    "response_tokens": "agent/response_tokens",
    "step_s": "timing_s/step",
    "generate_s": "timing_s/gen",
    "update_s": "timing_s/update_actor",
}


class Follower:
    """Says what is new in a run folder each time it is asked.

    Args:
        run_dir: the run's folder.
        say: called with each line.
        total_steps: for "step 3/24" and the time left; None if unknown.
        tell: called with each step as an object, see `step_object`.
        resumed: whether the steps that are there already were said by an earlier attempt.
    """

    def __init__(
        self,
        run_dir: Path,
        say: Callable[[str], None],
        total_steps: int | None,
        tell: Callable[[dict[str, Any]], None] = lambda step: None,
        *,
        resumed: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._say = say
        self._tell = tell
        self._total_steps = total_steps
        self._phases = 0
        self._metrics = len(read_jsonl(run_dir / METRICS)) if resumed else 0
        self._events = len(read_events(run_dir)) if resumed else 0
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._on: list[str] = []
        self.last_change_s = time.monotonic()
        self.last_seen = "starting"

    def poll(self) -> None:
        """Say every phase, step and alarm that was written since the last call."""
        phases, metrics = read_jsonl(self._run_dir / PHASES), read_jsonl(self._run_dir / METRICS)
        # Read last: a step's alarms are written before its metrics.
        events = read_events(self._run_dir)
        for entry in phases[self._phases :]:
            # Since the first phase, which is noted before a sandbox server starts and anybody can follow.
            self._changed(f"{entry['phase']} ({entry['time_s'] - phases[0]['time_s']:.0f} s)")
        for entry in metrics[self._metrics :]:
            news = [event for event in events[self._events :] if event.step <= entry["step"]]
            self._events += len(news)
            self._entry(entry, news)
        self._phases, self._metrics = len(phases), len(metrics)

    def note(self, line: str) -> None:
        """Say what the run's own process saw, and keep it among the phases."""
        note_phase(self._run_dir, line)
        self.poll()

    def _entry(self, entry: dict[str, Any], news: list[Event]) -> None:
        for event in news:
            self._on = [name for name in self._on if name != event.alarm]
            self._on += [event.alarm] if event.state == STARTED else []
        trained = "agent/reward_mean" in entry["data"]
        validated = any(name.startswith("val-") for name in entry["data"])
        if trained:
            self._step_s.append(sum(number(entry["data"], f"timing_s/{part}") or 0.0 for part in _WHOLE_STEP))
        step = step_object(entry, self._total_steps, self._left_s(entry["step"]), self._on)
        if trained:
            self._changed(step_line(step))
        if validated:
            self._changed(validation_line(step))
        for event in news:
            self._changed(str(event))
        if trained or validated:
            self._tell(step)

    def _changed(self, line: str) -> None:
        self.last_change_s = time.monotonic()
        self.last_seen = line
        self._say(line)

    def _left_s(self, step: int) -> float | None:
        """Seconds to the end, if the steps to come take what the last ones took; None if nobody can know."""
        if not self._total_steps or not self._step_s:
            return None
        return max(0, self._total_steps - step) * fmean(self._step_s)


def step_object(
    entry: dict[str, Any], total_steps: int | None, left_s: float | None, alarms: list[str]
) -> dict[str, Any]:
    """A step as an object of numbers; what a step does not have, or what is no number, is None.

    Args:
        entry: a line of metrics.jsonl.
        total_steps: of the run.
        left_s: seconds to the end.
        alarms: names of those that are on.
    """
    data = entry["data"]
    scores = {
        name.removeprefix("val-core/"): number(data, name)
        for name in data
        if name.startswith("val-core/") and "/mean@" in name
    }
    return {
        "step": entry["step"],
        "total_steps": total_steps,
        "time_s": entry["time_s"],
        **{name: number(data, key) for name, key in STEP_NUMBERS.items()},
        "tokens_per_s": tokens_per_s(data),
        "left_s": left_s,
        "validation": scores if any(name.startswith("val-") for name in data) else None,
        "alarms": list(alarms),
    }


def step_line(step: dict[str, Any]) -> str:
    """One line for a step of training."""
    shown = {name: float("nan") if step[name] is None else step[name] for name in (*STEP_NUMBERS, "tokens_per_s")}
    total = f"/{step['total_steps']}" if step["total_steps"] else ""
    line = (
        f"step {step['step']}{total}  reward {shown['reward']:+.3f}  accuracy {shown['accuracy']:.2f}  "
        f"tool use {shown['tool_use']:.2f}  tool errors {shown['tool_errors']:.2f}  lost {shown['lost']:.0f}  "
        f"{shown['tokens_per_s']:,.0f} tokens/s  {shown['step_s']:.1f} s "
        f"(generate {shown['generate_s']:.1f}, update {shown['update_s']:.1f})"
    )
    return f"{line}  {clock(step['left_s'])} left" if step["left_s"] else line


def validation_line(step: dict[str, Any]) -> str:
    """One line for a validation."""
    scores = "  ".join(
        f"{name} {float('nan') if value is None else value:.3f}" for name, value in step["validation"].items()
    )
    return f"validation at step {step['step']}  {scores or 'no score'}"


def clock(seconds: float) -> str:
    """Seconds as 3:05, or 1:03:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
