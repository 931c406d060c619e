"""What comes out of a rollout besides the batch: records on disk, and numbers for the logger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from verl.protocol import DataProto

from verl_ext.agent_loop.loop import RECORD_FIELD
from verl_ext.trajectory import CallRecord, LoopRecord, write_records

# Ours, taken out of the batch once they are recorded: verl would carry them to every worker and back.
LOOP_FIELDS = (
    "final_text",
    "assistant_text",
    "tool_calls",
    "tool_errors",
    "parse_failures",
    "num_turns",
    "infra_failed",
    RECORD_FIELD,
)


@dataclass(frozen=True)
class Taken:
    """What `take_records` found.

    Attributes:
        numbers: by name, without a prefix.
        lost: for each row that is no padding, in order: whether our infrastructure lost it.
        rows: the trajectories as they were written (verl_ext.trajectory.SCHEMA), in order.
    """

    numbers: dict[str, float]
    lost: list[bool]
    rows: list[dict[str, Any]]


def take_records(prompts: DataProto, output: DataProto, *, run_dir: Path, run_id: str, copies: int) -> Taken:
    """Write the batch's trajectories to the run folder, strip what only we need, and sum them up.

    Args:
        prompts: what verl asked for; rows in the same order as `output`.
        output: what the workers gave; `LOOP_FIELDS` are removed from it.
        run_dir: the run's folder.
        run_id: the run's id.
        copies: trajectories per prompt. verl pads a validation batch to a multiple of the workers by
            repeating rows; what goes beyond `copies` of one prompt is such padding and is not recorded.
    """
    validation = bool(prompts.meta_info.get("validate", False))
    step = int(prompts.meta_info.get("global_steps", -1))
    columns = {name: output.non_tensor_batch.pop(name) for name in LOOP_FIELDS if name in output.non_tensor_batch}
    records = [LoopRecord.from_json(text) for text in columns[RECORD_FIELD]]
    seen: Counter[Any] = Counter()
    rows = []
    for index, record in enumerate(records):
        group = _field(prompts, "uid", index, default=index)
        seen[group] += 1
        if seen[group] <= copies:
            rows.append(_row(prompts, output, index, record, run_id, str(group)))
    write_records(run_dir, step, validation, rows)
    return Taken(summary(rows), [row["infra_failed"] for row in rows], rows)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Numbers over trajectories, those lost to our infrastructure counted but left out of the rest."""
    valid = [row for row in rows if not row["infra_failed"]]
    calls = [call for row in valid for turn in row["turns"] for call in turn["calls"]]
    without_tool = [row for row in valid if not any(turn["calls"] for turn in row["turns"])]
    statuses = Counter(call["status"] for call in calls)
    stops = Counter(row["stop_reason"] for row in valid)
    ran = sum(statuses[name] for name in ("ok", "error", "timeout"))
    numbers = {
        "trajectories": len(rows),
        "infra_failed": len(rows) - len(valid),
        "n_valid": len(valid),
        "reward_mean": _mean([row["reward"] for row in valid]),
        "accuracy": _mean([row["accuracy"] for row in valid]),
        "tool_calls": len(calls),
        "tool_calls_per_trajectory": len(calls) / max(1, len(valid)),
        "tool_use_ratio": 1.0 - len(without_tool) / max(1, len(valid)),
        "tool_error_ratio": (statuses["error"] + statuses["timeout"]) / max(1, ran),
        "tool_timeout_ratio": statuses["timeout"] / max(1, ran),
        "parse_failure_ratio": (statuses["malformed"] + statuses["unknown_tool"] + statuses["bad_arguments"])
        / max(1, len(calls)),
        "accuracy_without_tool": _mean([row["accuracy"] for row in without_tool]),
        "trajectories_without_tool": len(without_tool),
        "assistant_turns": _mean([len(row["turns"]) for row in valid]),
        "truncated_ratio": stops["length"] / max(1, len(valid)),
        "out_of_turns_ratio": stops["turns"] / max(1, len(valid)),
        "response_tokens": _mean([len(row["response_ids"]) for row in valid]),
        "trained_tokens": _mean([int(np.sum(row["response_mask"])) for row in valid]),
    }
    return {name: float(value) for name, value in numbers.items()}


def _row(
    prompts: DataProto, output: DataProto, index: int, record: LoopRecord, run_id: str, group: str
) -> dict[str, Any]:
    batch = output.batch
    width = batch["prompts"].shape[1]
    attention = batch["attention_mask"][index].bool()
    length = int(attention[width:].sum())
    extra_info = _field(prompts, "extra_info", index, default={}) or {}
    extra = output.non_tensor_batch
    log_probs = batch["rollout_log_probs"][index, :length].float().numpy() if "rollout_log_probs" in batch else []
    return {
        "run_id": run_id,
        "problem_id": str(extra_info.get("index", "")),
        "data_source": str(_field(prompts, "data_source", index, default="")),
        "group": group,
        "trajectory_id": record.trajectory_id,
        "ground_truth": str((_field(prompts, "reward_model", index, default={}) or {}).get("ground_truth", "")),
        "prompt": [
            {"role": str(message["role"]), "content": _storable(str(message["content"]))}
            for message in _field(prompts, "raw_prompt", index, default=())
        ],
        "prompt_ids": batch["prompts"][index][attention[:width]].int().numpy(),
        "response_ids": batch["responses"][index, :length].int().numpy(),
        "response_mask": batch["response_mask"][index, :length].char().numpy(),
        "rollout_log_probs": log_probs,
        "turns": [
            {**vars(turn), "text": _storable(turn.text), "calls": [_call_row(call) for call in turn.calls]}
            for turn in record.turns
        ],
        "final_text": _storable(record.final_text),
        "reward": float(batch["rm_scores"][index].sum()) if "rm_scores" in batch else float("nan"),
        "accuracy": float(extra["acc"][index]) if "acc" in extra else float("nan"),
        "verdict": str(extra["verdict"][index]) if "verdict" in extra else "",
        "extracted": str(extra["extracted"][index]) if "extracted" in extra else "",
        "stop_reason": record.stop_reason,
        "infra_failed": bool(record.infra_error),
        "infra_error": record.infra_error,
    }


def _call_row(call: CallRecord) -> dict[str, Any]:
    texts = {name: _storable(getattr(call, name)) for name in ("name", "arguments", "status", "response")}
    return {**texts, "elapsed_s": call.elapsed_s}


def _field(data: DataProto, name: str, index: int, *, default: Any) -> Any:
    column = data.non_tensor_batch.get(name)
    return default if column is None else column[index]


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
