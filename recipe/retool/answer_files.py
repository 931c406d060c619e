"""Texts with known answers, from a run's trajectories, verl's dump of rollouts, or any table of answers."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.errors import DataError
from verl_ext.trajectory import ROLLOUTS

_TEXTS = ("final_text", "text", "response", "output", "completion", "solution_str", "prediction")
_TRUTHS = ("ground_truth", "gts", "gold", "answer", "expected", "target")
_LABELS = ("correct", "label", "is_correct")
_IDS = ("id", "trajectory_id", "problem_id", "index", "unique_id")


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """One text to grade.

    Attributes:
        key: what the file calls it, or its place in the file.
        text: the model's own last text, or all that the file has.
        response: the whole response with the tools' output, as verl's graders see it.
        truth: the known answer.
        correct: a person's verdict, where the file has one.
    """

    key: str
    text: Any
    response: Any
    truth: Any
    correct: bool | None


def read_answers(path: Path) -> Iterator[GivenAnswer]:
    """The texts of a jsonl or parquet file, of a folder of such files, or of a run's folder.

    Raises:
        DataError: nothing there, a line that is no JSON, or no column with texts or known answers.
    """
    for file in _files(path):
        for place, row in enumerate(_rows(file), 1):
            yield _given(row, f"{file.stem}:{place}", file)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    folder = path / ROLLOUTS if (path / ROLLOUTS).is_dir() else path
    files = sorted(file for suffix in ("parquet", "jsonl") for file in folder.glob(f"*.{suffix}"))
    if not files:
        raise DataError(f"no parquet or jsonl file in {folder}: give a file of answers, or a run's folder.")
    return files


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as parquet:
                for batch in parquet.iter_batches(1024):
                    yield from batch.to_pylist()
            return
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DataError(f"line {number} of {file} is no JSON object: write one object per line.")
                    yield row
    except DataError:
        raise
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise DataError(f"cannot read {file}: {error}. Give a parquet or jsonl file of answers.") from error


def _given(row: Mapping[str, Any], place: str, file: Path) -> GivenAnswer:
    text_name, truth_name = _first(row, _TEXTS), _first(row, _TRUTHS)
    if text_name is None or truth_name is None:
        missing, names = ("text", _TEXTS) if text_name is None else ("known answer", _TRUTHS)
        raise DataError(
            f"no column with the {missing} in {file}: found {', '.join(row) or 'none'}. "
            f"Name it one of {', '.join(names)}."
        )
    label_name, key_name = _first(row, _LABELS), _first(row, _IDS)
    label = row[label_name] if label_name else None
    return GivenAnswer(
        key=str(row[key_name]) if key_name else place,
        text=row[text_name],
        response=_whole_response(row.get("turns")) or row[text_name],
        truth=row[truth_name],
        correct=label if isinstance(label, bool) else None,
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _whole_response(turns: Any) -> str:
    """The turns of a trajectory as verl decodes a response: the model's text and the tools' output in between."""
    if not isinstance(turns, list):
        return ""
    parts = []
    for turn in turns:
        parts.append(turn["text"])
        parts += [f"\n<tool_response>\n{call['response']}\n</tool_response>\n" for call in turn.get("calls") or []]
    return "".join(parts)
