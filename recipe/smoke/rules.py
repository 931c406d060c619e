"""What "it learned" means, held against the files that a run left, and the report that a person reads.

The rule has six parts; all must hold:

1. Reward rose: mean accuracy of the last quarter of the steps is at least `RISE` above that of the first eighth,
   which is short because learning is quick: by a quarter of the way most of it has happened.
2. The tool is what was learned: at least half of the trajectories of the last quarter call it.
3. The task needs the tool: trajectories that called none, over the whole run, are right in under 5 %.
4. What the tool said is never trained on: in every recorded batch the mask is 0 on exactly the environment's
   tokens and 1 on exactly the model's.
5. The engine has the trained weights: the mean absolute difference between the engine's and the trainer's
   probability of the sampled tokens is below `PROBABILITY_BAND` at the *last* step.
6. Nothing is left: no sandbox of the run is alive.

The three controls (`invoke smoke --control ...`) must each fail it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from verl_ext.alarms import read_events
from verl_ext.launch import RunResult
from verl_ext.runs import METRICS, PHASES, read_jsonl
from verl_ext.trajectory import read_records

RISE = 0.25
MIN_TOOL_USE = 0.5
MAX_ACCURACY_WITHOUT_TOOL = 0.05
# verl's own advice: below 0.005 is good, above 0.01 is bad (docs/faq, v0.6.1).
PROBABILITY_BAND = 0.01


@dataclass(frozen=True)
class Check:
    """One part of the rule: what was asked, what was found."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Report:
    """The run in numbers, and the checks."""

    numbers: dict[str, Any]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether every part holds."""
        return all(check.passed for check in self.checks)

    def render(self) -> str:
        """The report as text of at most 116 columns."""
        # Not quiet=True, which records nothing.
        console = Console(width=116, record=True, file=io.StringIO(), force_terminal=False)
        console.print(_steps_table(self.numbers["steps"]))
        console.print(_numbers_table(self.numbers))
        rule = Table(
            "rule", "found", "", title="it learned" if self.passed else "it did NOT learn", title_justify="left"
        )
        for check in self.checks:
            rule.add_row(check.name, check.found, "yes" if check.passed else "NO")
        console.print(rule)
        return console.export_text()


def report(result: RunResult, verified: dict[str, Any], seconds: dict[str, float]) -> Report:
    """The report of a finished run.

    Args:
        result: what the launcher gave.
        verified: what `verl_ext.export --verify` found; {} if the checkpoint was not looked at.
        seconds: of the parts around the run.
    """
    steps = [entry for entry in read_jsonl(result.run_dir / METRICS) if "agent/accuracy" in entry["data"]]
    first, last = steps[: max(1, len(steps) // 8)], steps[-max(1, len(steps) // 4) :]
    records = list(read_records(result.run_dir, validation=False))
    numbers: dict[str, Any] = {
        "steps": [_step_numbers(entry) for entry in steps],
        "accuracy_first": _mean(first, "agent/accuracy"),
        "accuracy_last": _mean(last, "agent/accuracy"),
        "reward_first": _mean(first, "agent/reward_mean"),
        "reward_last": _mean(last, "agent/reward_mean"),
        "tool_use_last": _mean(last, "agent/tool_use_ratio"),
        "tool_calls": sum(entry["data"]["agent/tool_calls"] for entry in steps),
        "tool_error_ratio": _mean(steps, "agent/tool_error_ratio"),
        "parse_failure_ratio": _mean(steps, "agent/parse_failure_ratio"),
        "turns": _mean(steps, "agent/assistant_turns"),
        "accuracy_without_tool": _weighted_accuracy_without_tool(steps),
        "probability_difference_last": _mean(last[-1:], "training/rollout_probs_diff_mean"),
        "mask_errors": mask_errors(records),
        "mask_rows": len(records),
        "alarms": [asdict(event) for event in read_events(result.run_dir)],
        "validation": _validations(read_jsonl(result.run_dir / METRICS)),
        "server": result.server_stats,
        "swept": result.swept,
        "left": result.left,
        "start_phases": _phases(read_jsonl(result.run_dir / PHASES)),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "export": verified,
    }
    return Report(numbers, checks(numbers))


def checks(numbers: dict[str, Any]) -> list[Check]:
    """The rule, part by part."""
    first, last = numbers["accuracy_first"], numbers["accuracy_last"]
    difference = numbers["probability_difference_last"]
    without = numbers["accuracy_without_tool"]
    found = [
        Check(f"accuracy rises by {RISE:g} or more", last - first >= RISE, f"{first:.3f} -> {last:.3f}"),
        Check(
            "half of the last trajectories call the tool",
            numbers["tool_use_last"] >= MIN_TOOL_USE,
            f"{numbers['tool_use_last']:.2f}",
        ),
        Check(
            f"without the tool, under {MAX_ACCURACY_WITHOUT_TOOL:.0%} are right",
            without["accuracy"] < MAX_ACCURACY_WITHOUT_TOOL and without["trajectories"] > 0,
            f"{without['accuracy']:.1%} of {without['trajectories']:.0f}",
        ),
        Check(
            "the tool's tokens are masked",
            numbers["mask_errors"] == 0 and numbers["mask_rows"] > 0,
            f"{numbers['mask_errors']} of {numbers['mask_rows']} rows wrong",
        ),
        Check(
            f"engine and trainer agree at the last step, under {PROBABILITY_BAND:g}",
            bool(difference < PROBABILITY_BAND),
            f"{difference:.4f}",
        ),
        Check("no sandbox is left", numbers["left"] == 0, f"{numbers['left']} alive"),
    ]
    if export := numbers["export"]:
        good = bool(export.get("ok"))
        words = export.get("error") or ", ".join(
            f"{key} {value:.2g}" for key, value in export.get("differences", {}).items()
        )
        found.append(Check("the exported model has the trainer's logits", good, words))
    return found


def mask_errors(records: Iterable[dict[str, Any]]) -> int:
    """How many trajectories have a mask that is not 1 on exactly the model's tokens.

    The model's tokens are counted turn by turn from the record, which the mask had no part in.
    """
    return sum(_has_wrong_mask(record) for record in records)


def _has_wrong_mask(record: dict[str, Any]) -> bool:
    mask = np.asarray(record["response_mask"], dtype=np.int8)
    log_probs = np.asarray(record["rollout_log_probs"], dtype=np.float32)
    if not len(mask) or len(log_probs) != len(mask):
        return True
    if record["infra_failed"]:
        return bool(mask.any())
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    trained = (edges[1::2] - edges[::2]).tolist()  # lengths of the runs of ones, in order
    # Environment tokens have no log-prob of the engine (0.0); sampled ones nearly always do.
    shifted = not mask[0] or bool(np.any(log_probs[mask == 0]))
    return shifted or trained != [turn["tokens"] for turn in record["turns"]]


def _mean(entries: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([_float(entry["data"].get(name)) for entry in entries])) if entries else float("nan")


def _float(value: Any) -> float:
    """The logged number; null in the file stands for what was no number."""
    return float("nan") if value is None else float(value)


def _weighted_accuracy_without_tool(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    counts = [entry["data"]["agent/trajectories_without_tool"] for entry in steps]
    right = [
        _float(entry["data"]["agent/accuracy_without_tool"]) * count for entry, count in zip(steps, counts, strict=True)
    ]
    return {"trajectories": float(sum(counts)), "accuracy": float(sum(right) / max(1.0, sum(counts)))}


def _step_numbers(entry: dict[str, Any]) -> dict[str, float]:
    data = entry["data"]
    names = {
        "reward": "agent/reward_mean",
        "accuracy": "agent/accuracy",
        "tool_use": "agent/tool_use_ratio",
        "tool_errors": "agent/tool_error_ratio",
        "parse_failures": "agent/parse_failure_ratio",
        "turns": "agent/assistant_turns",
        "entropy": "actor/entropy",
        "difference": "training/rollout_probs_diff_mean",
        "step_s": "timing_s/step",
        "generate_s": "timing_s/gen",
        "log_prob_s": "timing_s/old_log_prob",
        "update_s": "timing_s/update_actor",
    }
    return {"step": entry["step"]} | {name: _float(data.get(key)) for name, key in names.items()}


def _validations(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        str(entry["step"]): _float(value)
        for entry in entries
        for name, value in entry["data"].items()
        if name.startswith("val-core/") and "/acc/mean@" in name
    }


def _phases(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {entry["phase"]: round(entry["time_s"] - entries[0]["time_s"], 1) for entry in entries}


def _steps_table(steps: Sequence[dict[str, float]]) -> Table:
    names = {
        "reward": "reward",
        "accuracy": "accuracy",
        "tool_use": "tool use",
        "tool_errors": "errors",
        "parse_failures": "unread",
        "turns": "turns",
        "entropy": "entropy",
        "difference": "differ",
    }
    seconds = {"step_s": "step s", "generate_s": "gen", "log_prob_s": "log-p", "update_s": "update"}
    table = Table("step", *names.values(), *seconds.values(), title="steps", title_justify="left")
    for step in steps:
        cells = [f"{step[name]:.3f}" for name in names] + [f"{step[name]:.1f}" for name in seconds]
        table.add_row(f"{step['step']:.0f}", *cells)
    return table


def _numbers_table(numbers: dict[str, Any]) -> Table:
    table = Table("", "", title="run", title_justify="left", show_header=False)
    server = numbers["server"]
    rows = {
        "accuracy, first eighth and last quarter": f"{numbers['accuracy_first']:.3f}, {numbers['accuracy_last']:.3f}",
        "reward, first eighth and last quarter": f"{numbers['reward_first']:+.3f}, {numbers['reward_last']:+.3f}",
        "validation accuracy by step": ", ".join(
            f"{step}: {value:.3f}" for step, value in numbers["validation"].items()
        ),
        "tool calls": f"{numbers['tool_calls']:.0f}",
        "tool error ratio": f"{numbers['tool_error_ratio']:.3f}",
        "parse failure ratio": f"{numbers['parse_failure_ratio']:.3f}",
        "assistant turns per trajectory": f"{numbers['turns']:.2f}",
        "alarms": ", ".join(f"{event['alarm']} {event['state']} at {event['step']}" for event in numbers["alarms"])
        or "none",
        "sandboxes created, ended, left": (
            f"{server.get('created', '?')}, {server.get('killed', '?')}, {numbers['left']}"
        ),
        "start, seconds since the request": ", ".join(
            f"{name} {at:.0f}" for name, at in numbers["start_phases"].items()
        ),
        "seconds": ", ".join(f"{name} {value:.0f}" for name, value in numbers["seconds"].items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
