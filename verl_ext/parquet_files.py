"""Training and validation files as the configuration names them, read no further than their footers."""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

PREPARED_KEY = b"verl_ags.prepared"
"""The same value in all files that one `invoke prepare-data` wrote; a file of another tool's has none."""


@dataclass(frozen=True)
class Footer:
    """What the end of a parquet file says of it."""

    rows: int
    columns: frozenset[str]
    prepared: str | None = None


def files(value: Any) -> list[Path]:
    """verl's train_files and val_files: one path or a list of them; anything else names none."""
    items = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
    return [Path(str(item)).expanduser() for item in items]


def footer(path: Path) -> Footer | None:
    """The footer, None if the file is not there or is no parquet."""
    try:
        with pq.ParquetFile(path) as parquet:
            prepared = (parquet.metadata.metadata or {}).get(PREPARED_KEY)
            columns = frozenset(parquet.schema_arrow.names)
            return Footer(parquet.metadata.num_rows, columns, prepared.decode() if prepared else None)
    except (OSError, pa.ArrowException):
        return None


def total_rows(value: Any) -> int | None:
    """Rows of all files together, None if one of them cannot be read or there is none."""
    footers = [footer(path) for path in files(value)]
    return sum(found.rows for found in footers if found) if footers and None not in footers else None


def prompts_longer_than(path: Path, size_bytes: int, *, at_most_rows: int = 100_000) -> Iterator[list[dict[str, str]]]:
    """Prompts of more than so many bytes, of the first rows of a file; the others are never made Python objects."""
    seen = 0
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(8192, columns=["prompt"]):
            column = batch.column(0)
            for at, size in enumerate(_bytes(column)):
                if size > size_bytes:
                    yield column[at].as_py()
            seen += batch.num_rows
            if seen >= at_most_rows:
                return


def _bytes(prompts: pa.Array) -> list[int]:
    """Bytes of all messages of each prompt, roles left out."""
    contents = pc.binary_length(pc.struct_field(prompts.flatten(), "content")).to_pylist()
    found, start = [], 0
    for length in pc.list_value_length(prompts).to_pylist():
        found.append(sum(size or 0 for size in contents[start : start + (length or 0)]))
        start += length or 0
    return found
