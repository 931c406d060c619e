"""The record of a trajectory: one schema for rollout files, reports, grading, evaluation and tests.

One parquet file for each step, `rollouts/train-000012.parquet` or `rollouts/val-000012.parquet`, one row a
trajectory. verl's own dump has no mask, no ids and no turns, and fails on numpy values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROLLOUTS = "rollouts"


@dataclass(frozen=True)
class CallRecord:
    """One tool call of a turn.

    Attributes:
        name: the tool, or "" when the call could not be read.
        arguments: JSON text of the arguments, or the reason why the call could not be read.
        status: ok, error, timeout, bad_arguments, unknown_tool, malformed, not_run or infra_failed.
        response: what the model was shown.
        elapsed_s: seconds the call took, waiting for a sandbox included.
    """

    name: str
    arguments: str
    status: str
    response: str
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class TurnRecord:
    """One assistant turn: its own text and the calls in it."""

    text: str
    tokens: int
    generate_s: float
    calls: list[CallRecord] = field(default_factory=list)


@dataclass
class LoopRecord:
    """What the agent loop knows of a trajectory when it ends; travels as JSON in verl's extra fields.

    Attributes:
        stop_reason: answered, length, turns, aborted, deadline or infra_failed.
        infra_error: why the trajectory is masked, or "".
    """

    trajectory_id: str
    stop_reason: str = ""
    infra_error: str = ""
    turns: list[TurnRecord] = field(default_factory=list)

    def to_json(self) -> str:
        """The record as JSON text; lone surrogates are replaced so that it can be stored."""
        return json.dumps(asdict(self), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> LoopRecord:
        """The record that `to_json` wrote."""
        value = json.loads(text)
        turns = [TurnRecord(**{**turn, "calls": [CallRecord(**c) for c in turn["calls"]]}) for turn in value["turns"]]
        return cls(**{**value, "turns": turns})

    def calls(self) -> Iterator[CallRecord]:
        """All calls of all turns, in order."""
        return (call for turn in self.turns for call in turn.calls)

    @property
    def assistant_text(self) -> str:
        """The assistant's own text, turns joined by newlines: never tool output, never the prompt."""
        return "\n".join(turn.text for turn in self.turns)

    @property
    def final_text(self) -> str:
        """The assistant's last turn, "" if there is none."""
        return self.turns[-1].text if self.turns else ""


_CALL = pa.struct(
    [
        ("name", pa.string()),
        ("arguments", pa.string()),
        ("status", pa.string()),
        ("response", pa.string()),
        ("elapsed_s", pa.float64()),
    ]
)
_TURN = pa.struct(
    [("text", pa.string()), ("tokens", pa.int32()), ("generate_s", pa.float64()), ("calls", pa.list_(_CALL))]
)
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("step", pa.int32()),
        ("validation", pa.bool_()),
        ("problem_id", pa.string()),
        ("data_source", pa.string()),
        ("group", pa.string()),  # trajectories of one prompt share it: verl's uid
        ("trajectory_id", pa.string()),
        ("ground_truth", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),  # as the data has it, before the chat template adds the tool's schema
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.int8())),  # 1 = sampled by the model and trained on
        ("rollout_log_probs", pa.list_(pa.float32())),  # empty unless calculate_log_probs
        ("turns", pa.list_(_TURN)),
        ("final_text", pa.string()),
        ("reward", pa.float32()),
        ("accuracy", pa.float32()),
        ("verdict", pa.string()),
        ("extracted", pa.string()),
        ("stop_reason", pa.string()),
        ("infra_failed", pa.bool_()),
        ("infra_error", pa.string()),
    ]
)
_SMALL_NUMBERS = ["prompt_ids.list.element", "response_ids.list.element", "response_mask.list.element"]


def write_records(run_dir: Path, step: int, validation: bool, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the rows of one step; the file appears whole or not at all.

    Args:
        run_dir: the run's folder.
        step: of the training.
        validation: whether these are a validation's.
        rows: one dict a trajectory, with the names of `SCHEMA`; `step` and `validation` are added. Numbers of
            tokens may be lists, or numpy arrays of the schema's types, which take half the time.
    """
    folder = run_dir / ROLLOUTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'val' if validation else 'train'}-{step:06d}.parquet"
    table = pa.Table.from_pylist([{**row, "step": step, "validation": validation} for row in rows], schema=SCHEMA)
    scratch = path.with_suffix(".tmp")
    pq.write_table(
        table,
        scratch,
        compression="zstd",
        # A sixth smaller and a third faster than pyarrow's default, which tries a dictionary of every float.
        use_dictionary=_SMALL_NUMBERS,  # pyright: ignore[reportArgumentType] - its stub knows a flag only
        use_byte_stream_split=["rollout_log_probs.list.element"],  # pyright: ignore[reportArgumentType]
    )
    scratch.replace(path)
    return path


def read_records(run_dir: Path, *, validation: bool | None = None) -> Iterable[dict[str, Any]]:
    """The records of a run in order of step; only training or only validation if asked."""
    kinds = {None: ("train", "val"), True: ("val",), False: ("train",)}[validation]
    for kind in kinds:
        for path in sorted((run_dir / ROLLOUTS).glob(f"{kind}-*.parquet")):
            yield from pq.read_table(path).to_pylist()
