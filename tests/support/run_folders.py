"""Run folders made without a run: what training leaves, with trajectories of any size and any text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_ext import runs
from verl_ext.trajectory import write_records

START_S = 1_796_000_000.0


def trajectory(
    problem: str = "p1",
    *,
    turns: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = (("The answer is \\boxed{42}.", ()),),
    **changes: Any,
) -> dict[str, Any]:
    """A row of a rollout file. `turns`: the assistant's text, and of each call code, status and response."""
    made, mask = [], []
    for text, calls in turns:
        tokens = max(1, len(text) // 4)
        mask += [1] * tokens + [0] * (5 if calls else 0)
        made.append({"text": text, "tokens": tokens, "generate_s": 0.5, "calls": [
            {"name": "code_interpreter", "arguments": json.dumps({"code": code}), "status": status,
             "response": response, "elapsed_s": 0.1} for code, status, response in calls]})  # fmt: skip
    values = {
        "run_id": "r", "problem_id": problem, "data_source": "math_dapo", "group": f"g-{problem}",
        "trajectory_id": f"train-1-{problem}", "ground_truth": "42",
        "prompt": [{"role": "user", "content": f"What is 6 x 7? ({problem})"}], "prompt_ids": [1, 2, 3],
        "response_ids": [7] * len(mask), "response_mask": mask, "rollout_log_probs": [-0.5] * len(mask),
        "turns": made, "final_text": made[-1]["text"] if made else "", "reward": 1.0, "accuracy": 1.0,
        "verdict": "equal", "extracted": "42", "stop_reason": "answered", "infra_failed": False, "infra_error": "",
    }  # fmt: skip
    return {**values, **changes}


def step_metrics(step: int) -> dict[str, float]:
    """What a training step logs, as far as a report draws it."""
    better = 1 - math.exp(-step / 10)
    return {
        "agent/reward_mean": 2 * better - 1, "agent/accuracy": better, "agent/response_tokens": 30 + step,
        "agent/trained_tokens": 20 + step, "agent/assistant_turns": 1 + better, "agent/tool_use_ratio": better,
        "agent/tool_calls_per_trajectory": better, "agent/tool_error_ratio": 0.1 * (1 - better),
        "agent/tool_timeout_ratio": 0.0, "agent/parse_failure_ratio": 0.05, "agent/truncated_ratio": 0.01,
        "agent/out_of_turns_ratio": 0.0, "agent/infra_failed": 0.0, "agent/trajectories": 8.0,
        "actor/entropy": 0.5 - 0.3 * better, "actor/ppo_kl": 0.001, "actor/grad_norm": 1.0,
        "training/rollout_probs_diff_mean": 0.003, "training/rollout_probs_diff_max": 0.02,
        "perf/throughput": 1000.0, "timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 2.5,
        "timing_s/old_log_prob": 0.5, "sandbox/wait_s/p50": 0.01, "sandbox/wait_s/p95": 0.1,
        "sandbox/waiting_share": 0.002,
    }  # fmt: skip


def write_run(
    folder: Path, *, steps: int = 3, rows: Sequence[dict[str, Any]] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A run folder of so many steps, each with the same trajectories, and a validation before the first.

    Args:
        folder: made.
        steps: of training; 0 leaves what there is before the first one.
        rows: of every step; two samples of one prompt, one right and one wrong, if None.
        config: over the little that is in it.
    """
    folder.mkdir(parents=True)
    known = {"trainer": {"total_training_steps": steps}, "verl_ext": {"run_id": folder.name}}
    (folder / runs.CONFIG).write_text(yaml.safe_dump(known | (config or {})))
    manifest = {"versions": {"verl": "0.6.1"}, "data": {"/d/train.parquet": "ab" * 32}, "command": ["x"]}
    (folder / runs.MANIFEST).write_text(json.dumps(manifest))
    (folder / runs.PHASES).write_text(json.dumps({"phase": "start", "time_s": START_S}) + "\n")
    wrong = {"reward": -1.0, "accuracy": 0.0, "verdict": "different", "extracted": "41"}
    chosen = [trajectory(), trajectory(**wrong)] if rows is None else rows
    lines = []
    if steps:
        write_records(folder, 0, True, chosen)
        score = {"val-core/math_dapo/acc/mean@1": 0.25, "val-agent/reward_mean": -0.5}
        lines.append({"step": 0, "time_s": START_S + 1, "data": score})
    for step in range(1, steps + 1):
        write_records(folder, step, False, chosen)
        lines.append({"step": step, "time_s": START_S + 60 * step, "data": step_metrics(step)})
    (folder / runs.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
