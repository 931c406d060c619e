"""What a data file holds, as one number: of its rows and not of its bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.errors import DataError


def hash_rows(rows: Iterable[dict]) -> str:
    """sha256 (hex) over the rows as canonical JSON, one a line: the same for any writer and version of parquet."""
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def content_hash(parquet_path: str | os.PathLike[str]) -> str:
    """Hash of the rows of a parquet file, computed from the rows and not from what the file claims.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        with pq.ParquetFile(parquet_path) as parquet:
            return hash_rows(row for batch in parquet.iter_batches(4096) for row in batch.to_pylist())
    except (OSError, pa.ArrowException, UnicodeError) as error:
        raise DataError(f"cannot read the rows of {parquet_path}: {error}. Run prepare-data again.") from error
