"""Samples on disk, part by part, and the numbers over them. Schemas; what they mean together is in the package."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.errors import DataError
from verl_ext.evaluation.plan import SETTINGS
from verl_ext.evaluation.statistics import (
    BOOTSTRAP_SEED,
    CONFIDENCE,
    RESAMPLES,
    bootstrap_mean,
    ks_up_to,
    majority_at_k,
    pass_at_k,
)
from verl_ext.runs import without_nan

SUMMARY, SAMPLES_FILE, PROBLEMS_FILE, PARTS = "summary.json", "samples.parquet", "problems.parquet", "samples"
FORMAT = 1

SAMPLES = pa.schema(
    [
        ("setting", pa.string()),
        ("data_source", pa.string()),
        ("problem_id", pa.string()),
        ("sample", pa.int32()),  # 0 to n - 1
        ("seed", pa.int64()),  # of its first turn; each further turn's is one more
        ("ground_truth", pa.string()),
        ("right", pa.bool_()),
        ("extracted", pa.string()),  # the answer that was found, "" for none
        ("verdict", pa.string()),
        ("assistant_turns", pa.int32()),
        ("tool_calls", pa.int32()),
        ("calls_run", pa.int32()),  # that came to a sandbox: ok, error or timeout
        ("calls_failed", pa.int32()),  # of these, error or timeout
        ("calls_unread", pa.int32()),  # malformed, or of no such tool, or with wrong arguments
        ("response_tokens", pa.int32()),
        ("model_tokens", pa.int32()),
        ("stop_reason", pa.string()),
        ("infra_failed", pa.bool_()),  # lost: in no number
        ("infra_error", pa.string()),
        ("part", pa.int32()),  # rollouts/val-<part>.parquet has the trajectory
        ("trajectory_id", pa.string()),
    ]
)
PROBLEMS = pa.schema(
    [
        ("setting", pa.string()),
        ("data_source", pa.string()),
        ("problem_id", pa.string()),
        ("ground_truth", pa.string()),
        ("samples", pa.int32()),
        ("n_valid", pa.int32()),
        ("right", pa.int32()),
        ("mean", pa.float64()),  # null where no sample counts
        ("majority_answer", pa.string()),  # of all samples that count; the first found of equals; "" for none
        ("majority_right", pa.bool_()),
        ("tool_calls", pa.float64()),
        ("response_tokens", pa.float64()),
        ("truncated", pa.int32()),
    ]
)
_RIGHT = object()  # right answers are one answer, however they are spelled


def sample_row(setting: str, sample: int, seed: int, part: int, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """The row of `SAMPLES` that a trajectory (verl_ext.trajectory.SCHEMA) comes to."""
    statuses = Counter(call["status"] for turn in trajectory["turns"] for call in turn["calls"])
    failed = statuses["error"] + statuses["timeout"]
    same = ("data_source", "problem_id", "ground_truth", "extracted", "verdict", "stop_reason", "infra_failed",
            "infra_error", "trajectory_id")  # fmt: skip
    return {
        **{name: trajectory[name] for name in same},
        "setting": setting,
        "sample": sample,
        "seed": seed,
        "right": trajectory["accuracy"] == 1.0,
        "assistant_turns": len(trajectory["turns"]),
        "tool_calls": statuses.total(),
        "calls_run": statuses["ok"] + failed,
        "calls_failed": failed,
        "calls_unread": statuses["malformed"] + statuses["unknown_tool"] + statuses["bad_arguments"],
        "response_tokens": len(trajectory["response_ids"]),
        "model_tokens": sum(turn["tokens"] for turn in trajectory["turns"]),
        "part": part,
    }


def write_part(folder: Path, part: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keep the samples of one part; the file appears whole or not at all, and what is in it is not taken again."""
    (folder / PARTS).mkdir(exist_ok=True)
    _write(folder / PARTS / f"part-{part:06d}.parquet", rows, SAMPLES)


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """Every sample that was kept, in the order of taking; of one that was taken again, the last.

    Raises:
        DataError: a part cannot be read.
    """
    found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for path in sorted((folder / PARTS).glob("part-*.parquet")):
        try:
            rows = pq.read_table(path, schema=SAMPLES).to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read ({error}): delete it, and its samples are taken again") from error
        for row in rows:
            found[key_of(row)] = row
    return list(found.values())


def key_of(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    """What names a sample: setting, data source, problem, number."""
    return row["setting"], row["data_source"], row["problem_id"], row["sample"]


def next_part(folder: Path) -> int:
    """The number of the next part."""
    return max((int(path.stem.partition("-")[2]) for path in (folder / PARTS).glob("part-*.parquet")), default=0) + 1


def write_results(folder: Path, facts: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write summary.json, problems.parquet and samples.parquet; gives the summary.

    Args:
        folder: the evaluation's.
        facts: what the summary says besides its numbers.
        samples: from `read_parts`.
    """
    problems = problem_rows(samples)
    summary = {
        "format": FORMAT,
        "kind": "evaluation",
        **facts,
        "statistics": {"resamples": RESAMPLES, "seed": BOOTSTRAP_SEED, "confidence": CONFIDENCE},
        "results": [result(rows) for rows in _grouped(samples, "setting", "data_source").values()],
        "differences": list(differences(problems)),
    }
    _write(folder / SAMPLES_FILE, samples, SAMPLES)
    _write(folder / PROBLEMS_FILE, problems, PROBLEMS)
    text = json.dumps(without_nan(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    scratch = folder / f".{SUMMARY}.{os.getpid()}.tmp"
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(folder / SUMMARY)
    return summary


def problem_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `PROBLEMS`, in the order of the samples."""
    rows = []
    for (setting, data_source, problem_id), group in _grouped(samples, "setting", "data_source", "problem_id").items():
        valid = [row for row in group if not row["infra_failed"]]
        votes = Counter(vote for vote in map(_vote, valid) if vote is not None)
        majority = votes.most_common(1)[0][0] if votes else None
        answers = (row["extracted"] for row in valid if _vote(row) == majority)
        rows.append(
            {
                "setting": setting,
                "data_source": data_source,
                "problem_id": problem_id,
                "ground_truth": group[0]["ground_truth"],
                "samples": len(group),
                "n_valid": len(valid),
                "right": sum(row["right"] for row in valid),
                "mean": sum(row["right"] for row in valid) / len(valid) if valid else None,
                "majority_answer": next(answers, "") if majority is not None else "",
                "majority_right": majority is _RIGHT,
                "tool_calls": _mean(valid, "tool_calls"),
                "response_tokens": _mean(valid, "response_tokens"),
                "truncated": sum(row["stop_reason"] == "length" for row in valid),
            }
        )
    return rows


def result(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of `results` for the samples of one setting and data source; the package says what each name means."""
    valid = [row for row in samples if not row["infra_failed"]]
    by_problem = list(_grouped(valid, "problem_id").values())
    most = min(map(len, by_problem), default=0)
    counts = {name: sum(row[name] for row in valid) for name in ("tool_calls", "calls_run", "calls_failed",
                                                                  "calls_unread")}  # fmt: skip
    stops = Counter(row["stop_reason"] for row in valid)
    lengths = np.array([row["response_tokens"] for row in valid] or [np.nan], dtype=np.float64)
    interval = bootstrap_mean([_mean(rows, "right") for rows in by_problem]) if by_problem else None
    return {
        "setting": samples[0]["setting"],
        "model": SETTINGS[samples[0]["setting"]][0],
        "data_source": samples[0]["data_source"],
        "problems": len(by_problem),
        "samples": len(samples),
        "n_valid": len(valid),
        "lost": len(samples) - len(valid),
        "mean": interval and interval.mean,
        "low": interval and interval.low,
        "high": interval and interval.high,
        "k": most,
        "pass_at_k": {str(k): _over(by_problem, _pass_at, k) for k in ks_up_to(most)},
        "majority_at_k": {str(k): _over(by_problem, _majority_at, k) for k in ks_up_to(most)},
        "turns": _mean(valid, "assistant_turns"),
        "tool_calls": _mean(valid, "tool_calls"),
        "tool_use_ratio": _share(row["tool_calls"] > 0 for row in valid),
        "tool_error_ratio": counts["calls_failed"] / max(1, counts["calls_run"]),
        "parse_failure_ratio": counts["calls_unread"] / max(1, counts["tool_calls"]),
        "truncated_ratio": stops["length"] / max(1, len(valid)),
        "out_of_turns_ratio": stops["turns"] / max(1, len(valid)),
        "no_answer_ratio": _share(not row["extracted"] for row in valid),
        "response_tokens": {
            "mean": float(lengths.mean()),
            "p50": float(np.quantile(lengths, 0.5)),
            "p95": float(np.quantile(lengths, 0.95)),
            "max": float(lengths.max()),
        },
        "model_tokens": _mean(valid, "model_tokens"),
        "verdicts": dict(Counter(row["verdict"] for row in valid).most_common()),
    }


def differences(problems: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries of `differences`: each two settings on the problems that both have, in the order of `SETTINGS`."""
    for (data_source,), rows in _grouped(problems, "data_source").items():
        means = {
            setting: {row["problem_id"]: row["mean"] for row in group if row["mean"] is not None}
            for (setting,), group in _grouped(rows, "setting").items()
        }
        for before, after in combinations([name for name in SETTINGS if name in means], 2):
            shared = [problem for problem in means[before] if problem in means[after]]
            if shared:
                interval = bootstrap_mean([means[after][one] - means[before][one] for one in shared])
                yield {
                    "data_source": data_source,
                    "from": before,
                    "to": after,
                    "problems": len(shared),
                    "difference": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                }


def _vote(row: Mapping[str, Any]) -> object:
    return _RIGHT if row["right"] else row["extracted"] or None


def _pass_at(rows: Sequence[Mapping[str, Any]], k: int) -> float:
    return pass_at_k(len(rows), sum(row["right"] for row in rows), k)


def _majority_at(rows: Sequence[Mapping[str, Any]], k: int) -> float:
    return majority_at_k([_vote(row) for row in rows], _RIGHT, k)


def _over(by_problem: Sequence[Sequence[Mapping[str, Any]]], at_k: Any, k: int) -> float:
    return float(np.mean([at_k(rows, k) for rows in by_problem]))


def _grouped(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows) if rows else 0.0


def _share(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _write(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), scratch, compression="zstd")
    scratch.replace(path)
