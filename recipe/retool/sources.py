"""Where rows come from: finding the files, recognising their columns, mapping them to one shape.

A data set is known by its columns, never by its path: a renamed folder, a trailing slash or a path into
the hub's cache cannot change how it is read. A new data set is one more entry in `SCHEMAS`, or a mapping of
the user's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.retool.mapping import Mapping, as_strings, column_values, last_boxes, user_text
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
        mapping: Where the parts of a row are.
        columns: Columns that must be there; others are ignored and not read.
        absent: Columns whose presence means that it is another schema.
        is_aime: Whether only AIME's problems are known to come in it; others must be described in a YAML file.
    """

    name: str
    mapping: Mapping
    columns: tuple[str, ...]
    absent: tuple[str, ...] = ()
    is_aime: bool = False

    def to_rows(self, batch: pa.RecordBatch) -> RowBatch:
        """Map a record batch that holds the mapping's columns."""
        mapping, nothing = self.mapping, pa.nulls(batch.num_rows, pa.string())
        answers = column_values(batch, mapping.answer)
        return RowBatch(
            prompt=user_text(column_values(batch, mapping.question)),
            answer=last_boxes(answers) if mapping.boxed_answer else as_strings(answers),
            problem_id=as_strings(column_values(batch, mapping.id)) if mapping.id else nothing,
            data_source=pa.array([mapping.data_source] * batch.num_rows, pa.string())
            if mapping.data_source
            else as_strings(batch.column("data_source")),
        )


AIME_SOURCE = "aime_2024"
"""The data_source of AIME 2024; verl names validation metrics after it. Source: verl v0.6.1 recipe/retool."""
SOME_AIME = "aime"
"""Stands for the year until the problems have told it."""

_VERL = Mapping("prompt", "reward_model.ground_truth", "extra_info.index")
_VERL_COLUMNS = ("data_source", "prompt", "reward_model")
PREPARED = Schema("prepared by this project", _VERL, (*_VERL_COLUMNS, "agent_name"))
DAPO = Schema("DAPO-Math-17k", _VERL, _VERL_COLUMNS, absent=("agent_name",))
AIME = Schema("AIME_2024", Mapping("Problem", "Answer", "ID", AIME_SOURCE), ("ID", "Problem", "Answer"))
MATH_500 = Schema("MATH-500", Mapping("problem", "answer", "unique_id", "math_500"), ("problem", "answer", "unique_id"))


def _aime(name: str, question: str, answer: str, problem_id: str, *others: str, boxed: bool = False) -> Schema:
    mapping = Mapping(question, answer, problem_id, SOME_AIME, boxed)
    columns = tuple(filter(None, (question, answer, problem_id, *others)))
    return Schema(name, mapping, columns, ("answer",) if boxed else (), is_aime=True)


# Each after a public data set that has it; the first that fits is taken, so the ones that ask for more come first.
SCHEMAS = (
    PREPARED,
    DAPO,
    AIME,
    MATH_500,
    _aime("HuggingFaceH4/aime_2024", "problem", "answer", "id", "url"),
    _aime("MathArena/aime_2025", "problem", "answer", "problem_idx"),
    _aime("math-ai/aime25", "problem", "answer", "id"),
    _aime("math-ai/aime24", "problem", "solution", "id", "url", boxed=True),
    _aime("a table of problem and answer", "problem", "answer", ""),
    _aime("opencompass/AIME2025", "question", "answer", ""),
)


def recognise(columns: pa.Schema, where: Path) -> Schema:
    """The schema that fits these columns.

    Raises:
        DataError: none fits, or a column has another type than its schema says.
    """
    found = set(columns.names)
    for schema in SCHEMAS:
        if found.issuperset(schema.columns) and found.isdisjoint(schema.absent):
            return _fitted(schema, columns, where)
    known = "; ".join(f"{schema.name}: {', '.join(schema.columns)}" for schema in SCHEMAS)
    raise DataError(
        f"columns of no known data set in {where}: found {', '.join(columns.names) or 'none'}. Known are {known}. "
        "Describe the data set in a YAML file (keys path, question, answer, id, data_source) and give that instead."
    )


def described(mapping: Mapping, columns: pa.Schema, where: Path) -> Schema:
    """The schema that a user's mapping makes.

    Raises:
        DataError: a column of the mapping is not there, or has another type than it needs.
    """
    missing = [name for name in mapping.columns if name not in columns.names]
    if missing:
        raise DataError(f"no column {', '.join(missing)} in {where}: found {', '.join(columns.names) or 'none'}.")
    return _fitted(Schema("described in YAML", mapping, mapping.columns), columns, where)


def _fitted(schema: Schema, columns: pa.Schema, where: Path) -> Schema:
    """The schema for this file, whose types are checked; without an id where verl's extra_info has none."""
    mapping = schema.mapping
    for name in filter(None, (mapping.question, mapping.answer)):
        _check_type(columns, name, where)
    column, _, field = mapping.id.partition(".")
    if field and (column not in columns.names or not _has_fields(columns.field(column).type, field)):
        return replace(schema, mapping=replace(mapping, id=""))
    return schema


def _check_type(columns: pa.Schema, name: str, where: Path) -> None:
    column, *inner = name.split(".")
    kind = columns.field(column).type
    for field in inner:
        if not _has_fields(kind, field):
            raise DataError(f"column {column} in {where} is {kind}: it needs a field {field}.")
        kind = kind.field(field).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if (is_list and not _has_fields(kind.value_type, "role", "content")) or pa.types.is_struct(kind):
        raise DataError(
            f"column {name} in {where} is {kind}: "
            "it must be a text, a number, or a list of messages with role and content."
        )


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


def open_file(path: Path, mapping: Mapping | None = None) -> SourceFile:
    """A data file with its schema recognised, or as `mapping` says.

    Raises:
        DataError: not parquet or jsonl, damaged, or of unknown columns.
    """
    if path.suffix == ".parquet":
        try:
            with pq.ParquetFile(path) as parquet:
                columns, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path} as parquet: {error}. Fetch the file again.") from error
    else:
        first, num_rows = next(_json_rows(path), None), None
        if first is None:
            raise DataError(f"no rows in {path}: give a file with at least one.")
        try:
            columns = pa.RecordBatch.from_pylist([first]).schema
        except (pa.ArrowException, UnicodeError) as error:
            raise DataError(f"cannot read the first row of {path}: {error}. Repair or remove the line.") from error
    return SourceFile(path, described(mapping, columns, path) if mapping else recognise(columns, path), num_rows)


def _read(path: Path, schema: Schema) -> Iterator[pa.RecordBatch]:
    columns = list(schema.mapping.columns)
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as parquet:
            yield from parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        return
    rows: list[dict] = []
    for row in _json_rows(path):
        rows.append({name: row.get(name) for name in columns})
        if len(rows) == BATCH_ROWS:
            yield pa.RecordBatch.from_pylist(rows)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows)


def _json_rows(path: Path) -> Iterator[dict]:
    """The objects of a jsonl file, numbers as they are written, so that no answer passes through a float."""
    number = 0
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line, parse_int=str, parse_float=str, parse_constant=lambda _: None)
                if not isinstance(row, dict):
                    raise DataError(f"line {number} of {path} is not a JSON object: write one object per line.")
                yield row
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: {error}. Convert the file.") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"line {number} of {path} is not JSON: {error}. Repair or remove the line.") from error
