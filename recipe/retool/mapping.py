"""Which columns of a table are the question, the answer and the id: for known layouts, and as a user writes it in YAML.

# my_maths.yaml, given in place of a file: invoke prepare-data --train my_maths.yaml ...
path: problems.jsonl         # file, folder or hub id; relative to this file
question: problem            # a column, or a field in one: prompt, task.text
answer: solution.final
id: uid                      # optional; made from the question where it is missing
data_source: my_maths        # verl names validation metrics after it
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from recipe.retool.grading import find_answer
from verl_ext.errors import DataError


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where a row's parts are.

    Attributes:
        question, answer, id: columns, or "column.field"; id may be "" for none.
        data_source: the data set's name, or "" where the column `data_source` has it.
        boxed_answer: whether the answer is the last box of a text.
    """

    question: str
    answer: str
    id: str = ""
    data_source: str = ""
    boxed_answer: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        names = [self.question, self.answer, self.id, "" if self.data_source else "data_source"]
        return tuple(dict.fromkeys(name.partition(".")[0] for name in names if name))


@dataclass(frozen=True, slots=True)
class DescribedSource:
    """What a YAML file says of a data set: where its files are, and its mapping."""

    path: str
    mapping: Mapping


def load_description(file: Path) -> DescribedSource:
    """A data set as a YAML file describes it; see the top of this module.

    Raises:
        DataError: not YAML, a key is missing or unknown, or a value is no text.
    """
    example = "Write path, question, answer, data_source and if there is one id, each with a text."
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise DataError(f"cannot read {file}: {' '.join(str(error).split())}. {example}") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} holds no keys: {example}")
    known = {"path", "question", "answer", "id", "data_source"}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise DataError(
                f"{file} has a key {key!r} that means nothing"
                + (f": did you mean {near[0]}?" if near else f". {example}")
            )
    missing = sorted(known - {"id"} - values.keys())
    wrong = sorted(key for key, value in values.items() if not isinstance(value, str) or not value.strip())
    if missing or wrong:
        raise DataError(f"{file}: {', '.join(missing + wrong)} must be given as a text. {example}")
    path = Path(values.pop("path")).expanduser()
    beside = file.parent / path
    return DescribedSource(str(beside if beside.exists() else path), Mapping(**values))


def column_values(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column, or a field inside one, as it is.

    Raises:
        DataError: there is none of that name.
    """
    column, *inner = name.split(".")
    values = batch.column(column)
    for field in inner:
        if not pa.types.is_struct(values.type) or values.type.get_field_index(field) < 0:
            raise DataError(f"column {column} is {values.type}: it has no field {field}.")
        values = pc.struct_field(values, field)
    return values


def as_strings(array: pa.Array) -> pa.StringArray:
    """Any scalar column as strings; 33.0 in a float column (pandas with a gap) is the integer 33.

    Raises:
        DataError: floats beyond 2^53, which may not be what was once written.
    """
    if not pa.types.is_floating(array.type):
        return pc.cast(array, pa.string())
    if pc.any(pc.greater(pc.abs(array), float(2**53))).as_py():
        raise DataError("a column of floats holds numbers beyond 2^53, which are not exact: store them as text.")
    whole = pc.equal(pc.floor(array), array)
    integers = pc.cast(pc.if_else(whole, array, pa.scalar(None, array.type)), pa.int64())
    return pc.if_else(whole, pc.cast(integers, pa.string()), pc.cast(array, pa.string()))


def user_text(values: pa.Array) -> pa.StringArray:
    """The text of each question: as it is, or the content of the last user message of a conversation."""
    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
        return as_strings(values)
    lengths = pc.list_value_length(values)
    if values.null_count == 0 and pc.all(pc.equal(lengths, 1)).as_py():
        messages = values.flatten()
        is_user = pc.equal(pc.struct_field(messages, "role"), "user")
        return pc.if_else(is_user, as_strings(pc.struct_field(messages, "content")), pa.scalar(None, pa.string()))
    texts = [
        next((message["content"] for message in reversed(row or []) if message and message["role"] == "user"), None)
        for row in values.to_pylist()
    ]
    return pa.array(texts, pa.string())


def last_boxes(values: pa.Array) -> pa.StringArray:
    """The last box of each text; null where it has none."""
    texts: list[Any] = as_strings(values).to_pylist()
    return pa.array([None if text is None else find_answer(text)[1] for text in texts], pa.string())
