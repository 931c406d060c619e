"""Where rows come from: finding the files, recognising their columns, mapping them to one shape.

A data set is known by its columns, never by its path: a renamed folder, a trailing slash or a path into
the hub's cache cannot change how it is read. A new data set is one more entry in `SCHEMAS`.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_ext.errors import DataError

BATCH_ROWS = 65_536
"""Rows in memory at a time. 64 Ki rows of DAPO are about 50 MB."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of any data set in one shape: four string arrays of equal length, any of them with nulls."""

    prompt: pa.StringArray
    answer: pa.StringArray
    problem_id: pa.StringArray
    data_source: pa.StringArray


@dataclass(frozen=True, slots=True)
class Schema:
    """A table layout that we can read.

    Attributes:
        name: What the report and the messages call it.
        columns: Columns that must be there; others are ignored and not read.
        to_rows: Maps a record batch of exactly these columns.
        absent: Columns whose presence means that it is another schema.
    """

    name: str
    columns: tuple[str, ...]
    to_rows: Callable[[pa.RecordBatch], RowBatch]
    absent: tuple[str, ...] = ()


def _as_strings(array: pa.Array) -> pa.StringArray:
    """Any scalar column as strings; 33.0 in a float column (pandas with a gap) is the integer 33."""
    if pa.types.is_floating(array.type):
        array = pc.cast(array, pa.int64())  # refuses 0.5 instead of rounding it
    return pc.cast(array, pa.string())


def _field(batch: pa.RecordBatch, column: str, field: str) -> pa.StringArray:
    return _as_strings(pc.struct_field(batch.column(column), field))


def _user_text(prompt: pa.Array) -> pa.StringArray:
    """Content of the last user message of each conversation; null where there is none."""
    lengths = pc.list_value_length(prompt)
    if prompt.null_count == 0 and pc.all(pc.equal(lengths, 1)).as_py():
        messages = prompt.flatten()
        is_user = pc.equal(pc.struct_field(messages, "role"), "user")
        return pc.if_else(is_user, _as_strings(pc.struct_field(messages, "content")), pa.scalar(None, pa.string()))
    texts = [
        next((message["content"] for message in reversed(row or []) if message and message["role"] == "user"), None)
        for row in prompt.to_pylist()
    ]
    return pa.array(texts, pa.string())


def _verl_rows(batch: pa.RecordBatch) -> RowBatch:
    return RowBatch(
        prompt=_user_text(batch.column("prompt")),
        answer=_field(batch, "reward_model", "ground_truth"),
        problem_id=_field(batch, "extra_info", "index"),
        data_source=_as_strings(batch.column("data_source")),
    )


def _aime_rows(batch: pa.RecordBatch) -> RowBatch:
    return RowBatch(
        prompt=_as_strings(batch.column("Problem")),
        answer=_as_strings(batch.column("Answer")),
        problem_id=_as_strings(batch.column("ID")),
        data_source=pa.array([AIME_SOURCE] * batch.num_rows, pa.string()),
    )


AIME_SOURCE = "aime_2024"
"""The data_source of AIME rows; verl names validation metrics after it. Source: verl v0.6.1 recipe/retool."""

_VERL_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
PREPARED = Schema("prepared by this project", (*_VERL_COLUMNS, "agent_name"), _verl_rows)
DAPO = Schema("DAPO-Math-17k", _VERL_COLUMNS, _verl_rows, absent=("agent_name",))
AIME = Schema("AIME_2024", ("ID", "Problem", "Answer"), _aime_rows)
SCHEMAS = (PREPARED, DAPO, AIME)

_STRUCTS = {"reward_model": "ground_truth", "extra_info": "index"}


def recognise(columns: pa.Schema, where: Path) -> Schema:
    """The schema that fits these columns.

    Raises:
        DataError: none fits, or a column has another type than its schema says.
    """
    found = set(columns.names)
    for schema in SCHEMAS:
        if found.issuperset(schema.columns) and found.isdisjoint(schema.absent):
            _check_types(columns, schema, where)
            return schema
    known = "; ".join(f"{schema.name}: {', '.join(schema.columns)}" for schema in SCHEMAS)
    raise DataError(
        f"columns of no known data set in {where}: found {', '.join(columns.names) or 'none'}. "
        f"Known are {known}. Rename the columns to one of these."
    )


def _check_types(columns: pa.Schema, schema: Schema, where: Path) -> None:
    for name, inner in _STRUCTS.items():
        if name in schema.columns and not _has_fields(columns.field(name).type, inner):
            raise DataError(f"column {name} in {where} is {columns.field(name).type}: it needs a field {inner}.")
    if "prompt" in schema.columns:
        kind = columns.field("prompt").type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not is_list or not _has_fields(kind.value_type, "role", "content"):
            raise DataError(f"column prompt in {where} is {kind}: it must be a list of messages with role and content.")


def _has_fields(kind: pa.DataType, *names: str) -> bool:
    return pa.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in names)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set, recognised but not yet read."""

    path: Path
    schema: Schema
    num_rows: int | None
    """Rows that the file says it has; None where only reading tells (jsonl)."""

    def batches(self) -> Iterator[RowBatch]:
        """The rows in file order, at most `BATCH_ROWS` at a time.

        Raises:
            DataError: the file is damaged, or a value does not fit its column.
        """
        try:
            for batch in _read(self.path, self.schema):
                yield self.schema.to_rows(batch)
        except (pa.ArrowException, UnicodeError) as error:
            raise DataError(f"cannot read the rows of {self.path}: {error}. Fetch the file again.") from error


def open_file(path: Path) -> SourceFile:
    """A data file with its schema recognised.

    Raises:
        DataError: not parquet or jsonl, damaged, or of unknown columns.
    """
    if path.suffix == ".parquet":
        try:
            with pq.ParquetFile(path) as parquet:
                return SourceFile(path, recognise(parquet.schema_arrow, path), parquet.metadata.num_rows)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path} as parquet: {error}. Fetch the file again.") from error
    first = next(_json_rows(path), None)
    if first is None:
        raise DataError(f"no rows in {path}: give a file with at least one.")
    try:
        columns = pa.RecordBatch.from_pylist([_exact(first)]).schema
    except (pa.ArrowException, UnicodeError) as error:
        raise DataError(f"cannot read the first row of {path}: {error}. Repair or remove the line.") from error
    return SourceFile(path, recognise(columns, path), None)


def _read(path: Path, schema: Schema) -> Iterator[pa.RecordBatch]:
    columns = list(schema.columns)
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as parquet:
            yield from parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        return
    rows: list[dict] = []
    for row in _json_rows(path):
        rows.append({name: _exact(row.get(name)) for name in columns})
        if len(rows) == BATCH_ROWS:
            yield pa.RecordBatch.from_pylist(rows)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows)


def _json_rows(path: Path) -> Iterator[dict]:
    number = 0
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"line {number} of {path} is not a JSON object: write one object per line.")
                yield row
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: {error}. Convert the file.") from error
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"line {number} of {path} is not JSON: {error}. Repair or remove the line.") from error


def _exact(value: Any) -> Any:
    """JSON numbers as text, so that no answer passes through a float or a 64-bit integer."""
    if isinstance(value, dict):
        return {name: _exact(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
