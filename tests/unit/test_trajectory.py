"""verl_ext.trajectory: the record goes to disk and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.trajectory import SCHEMA, CallRecord, LoopRecord, TurnRecord, read_records, write_records

RECORD = LoopRecord(
    "train-1-p-0a",
    "answered",
    "",
    [
        TurnRecord("I ask.", 5, 0.5, [CallRecord("t", "{}", "ok", "1", 0.1), CallRecord("", "bad", "malformed", "no")]),
        TurnRecord("é \N{GRINNING FACE} \ud800", 3, 0.25),
    ],
)  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    call = {"name": "t", "arguments": "{}", "status": "ok", "response": "1", "elapsed_s": 0.5}
    turns = [
        {"text": "x", "tokens": 1, "generate_s": 0.5, "calls": [call]},
        {"text": "y", "tokens": 1, "generate_s": 0.5, "calls": []},
    ]
    values: dict[str, Any] = {
        "run_id": "r", "problem_id": "p", "data_source": "math", "group": "g", "trajectory_id": "t",
        "ground_truth": "42", "prompt": [{"role": "user", "content": "6 x 7?"}],
        "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "response_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25], "turns": turns, "final_text": "y", "reward": 1.0, "accuracy": 1.0,
        "verdict": "equal", "extracted": "42", "stop_reason": "answered", "infra_failed": False, "infra_error": "",
    }  # fmt: skip
    return values | changes


def test_a_loop_record_survives_json():
    text = RECORD.to_json()
    text.encode("ascii")
    assert LoopRecord.from_json(text) == RECORD


def test_what_is_graded_is_the_assistants_own_text():
    assert RECORD.final_text == "é \N{GRINNING FACE} \ud800"
    assert RECORD.assistant_text == "I ask.\né \N{GRINNING FACE} \ud800"
    assert [call.status for call in RECORD.calls()] == ["ok", "malformed"]
    assert LoopRecord("t").final_text == LoopRecord("t").assistant_text == ""


def test_rows_come_back_as_they_were_written(tmp_path: Path):
    rows = [row(), row(trajectory_id="u", rollout_log_probs=[], turns=[], infra_failed=True, infra_error="lost")]
    path = write_records(tmp_path, 12, False, rows)
    assert path == tmp_path / "rollouts" / "train-000012.parquet"
    assert list(read_records(tmp_path)) == [{**each, "step": 12, "validation": False} for each in rows]
    assert pq.read_schema(path).equals(SCHEMA)


def test_records_are_read_in_order_of_step_and_by_kind(tmp_path: Path):
    for step in (10, 2, 100):
        write_records(tmp_path, step, False, [row()])
    write_records(tmp_path, 2, True, [row()])
    assert [record["step"] for record in read_records(tmp_path, validation=False)] == [2, 10, 100]
    assert [record["step"] for record in read_records(tmp_path, validation=True)] == [2]
    assert [record["validation"] for record in read_records(tmp_path)] == [False, False, False, True]


def test_a_step_without_rows_is_an_empty_file(tmp_path: Path):
    write_records(tmp_path, 1, False, [])
    assert list(read_records(tmp_path)) == []
    assert list(read_records(tmp_path / "no run")) == []


def test_a_step_that_is_written_again_replaces_the_first(tmp_path: Path):
    write_records(tmp_path, 1, False, [row()])
    write_records(tmp_path, 1, False, [row(trajectory_id="second")])
    assert [record["trajectory_id"] for record in read_records(tmp_path)] == ["second"]


def test_rows_that_cannot_be_written_leave_the_old_file_whole(tmp_path: Path):
    write_records(tmp_path, 1, False, [row()])
    with pytest.raises((pa.ArrowException, TypeError, ValueError, OverflowError)):
        write_records(tmp_path, 1, False, [row(response_ids=["no number"])])
    assert [record["trajectory_id"] for record in read_records(tmp_path)] == ["t"]
