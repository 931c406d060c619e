"""One line a step for a person to read, followed from the run folder while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_ext.runs import METRICS, PHASES, read_jsonl


class Follower:
    """Says what is new in a run folder each time it is asked.

    Args:
        run_dir: the run's folder.
        say: called with each line.
        total_steps: for "step 3/24" and the time left; None if unknown.
        resumed: whether the steps that are there already were said by an earlier attempt.
    """

    def __init__(
        self, run_dir: Path, say: Callable[[str], None], total_steps: int | None, *, resumed: bool = False
    ) -> None:
        self._run_dir = run_dir
        self._say = say
        self._total_steps = total_steps
        self._phases = 0
        self._metrics = len(read_jsonl(run_dir / METRICS)) if resumed else 0
        self._step_s: list[float] = []
        self.last_change_s = time.monotonic()
        self.last_seen = "starting"

    def poll(self) -> None:
        """Say every phase and step that was written since the last call."""
        phases, metrics = read_jsonl(self._run_dir / PHASES), read_jsonl(self._run_dir / METRICS)
        for entry in phases[self._phases :]:
            # Since the first phase, which is noted before a sandbox server starts and anybody can follow.
            self._changed(f"{entry['phase']} ({entry['time_s'] - phases[0]['time_s']:.0f} s)")
        for entry in metrics[self._metrics :]:
            if "agent/reward_mean" in entry["data"]:
                self._changed(self._line(entry))
            if any(name.startswith("val-") for name in entry["data"]):
                self._changed(validation_line(entry["step"], entry["data"]))
        self._phases, self._metrics = len(phases), len(metrics)

    def _changed(self, line: str) -> None:
        self.last_change_s = time.monotonic()
        self.last_seen = line
        self._say(line)

    def _line(self, entry: dict[str, Any]) -> str:
        # None stands for what is no number, see AgsTracking.
        data = {name: float("nan") if value is None else value for name, value in entry["data"].items()}
        step = entry["step"]
        total = f"/{self._total_steps}" if self._total_steps else ""
        seconds = float(data.get("timing_s/step", 0.0))
        self._step_s.append(seconds)
        line = (
            f"step {step}{total}  reward {data['agent/reward_mean']:+.3f}  accuracy {data['agent/accuracy']:.2f}  "
            f"tool use {data['agent/tool_use_ratio']:.2f}  tool errors {data['agent/tool_error_ratio']:.2f}  "
            f"lost {data['agent/infra_failed']:.0f}  {seconds:.1f} s "
            f"(generate {data.get('timing_s/gen', 0.0):.1f}, update {data.get('timing_s/update_actor', 0.0):.1f})"
        )
        if self._total_steps and step < self._total_steps:
            recent = self._step_s[-5:]
            left_s = (self._total_steps - step) * sum(recent) / len(recent)
            line += f"  {left_s // 60:.0f}:{left_s % 60:02.0f} left"
        return line


def validation_line(step: int, data: dict[str, Any]) -> str:
    """One line for a validation."""
    core = {name: value for name, value in data.items() if name.startswith("val-core/") and "/mean@" in name}
    scores = "  ".join(
        f"{name.removeprefix('val-core/')} {float('nan') if value is None else value:.3f}"
        for name, value in core.items()
    )
    return f"validation at step {step}  {scores or 'no score'}"
