"""Every trajectory of a run for the page: columns to filter and sort by, and packed texts to open one by one.

A pack is a JSON list of consecutive trajectories, gzipped and in base64, in an inert element of its own; the browser
unpacks one when somebody opens a trajectory in it. Where all texts together would be larger than asked, some prompts
are left out with all of their samples, so that what is there can still be compared; the columns always hold all.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.report.run_folder import COLUMNS, StepFile
from verl_ext.runs import without_nan

PACK_BYTES = 1_000_000
"""Of JSON: unpacked in some ten milliseconds."""
_LEVEL = 4  # 6 is 7 % smaller and takes twice as long
_INDEX_CHARS = 80  # of an answer in the columns; all of it is in the pack
FAULTS = ("tool error", "tool timeout", "call not readable", "call not run", "lost")
"""What can be wrong with a trajectory; bit N of the column `faults` is FAULTS[N]. The page has the same order."""
_FAULT_OF_STATUS = {
    "error": 1, "timeout": 2, "malformed": 4, "unknown_tool": 4, "bad_arguments": 4, "not_run": 8, "infra_failed": 16,
}  # fmt: skip


class _Words:
    """Texts that repeat, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


@dataclass
class Index:
    """What the page knows of all trajectories at once.

    Attributes:
        files: for each step file: name, step, 1 if a validation's, number of its first trajectory.
        columns: by name, one value a trajectory.
        words: of the columns that hold numbers of texts, the texts.
        packs: number of the first trajectory in each.
        prompts: groups of trajectories that answer the same one in the same step.
        left_out: trajectories without their text.
    """

    files: list[tuple[str, int, int, int]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    packs: list[int] = field(default_factory=list)
    prompts: int = 0
    left_out: int = 0

    @property
    def count(self) -> int:
        """Trajectories."""
        return len(self.columns.get("reward", ()))

    def to_json(self, notes: Sequence[str] = ()) -> str:
        """As the page reads it; `notes` is what could not be read."""
        value = {
            "files": self.files, "columns": self.columns, "words": self.words, "packs": self.packs, "faults": FAULTS,
            "left_out": self.left_out, "notes": notes,
        }  # fmt: skip
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def pack(text: str) -> bytes:
    """A text, gzipped, in base64: characters that cannot end an element of HTML."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), _LEVEL, mtime=0))


def write_packs(
    files: Sequence[StepFile], out: BinaryIO, *, max_bytes: float, done: Callable[[int], None], notes: list[str]
) -> Index:
    """Write the packs of all trajectories, each as an element of HTML, and gather the columns.

    Args:
        files: in the order in which the trajectories are numbered.
        out: gets the elements.
        max_bytes: of all texts as they stand in the page, roughly; prompts are left out to keep to it.
        done: told of rows that are done.
        notes: gets what could not be read.
    """
    share = _share_that_fits(files, max_bytes)
    index = Index(columns={name: [] for name in _PLAIN + _WORDS})
    words = {name: _Words() for name in _WORDS}
    running: deque[Future[bytes]] = deque()

    def put(packed: bytes) -> None:
        number = len(index.packs) - len(running) - 1
        out.write(b'<script type="application/gzip" id="pack-%d">%s</script>\n' % (number, packed))

    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as beside:  # zlib lets go of the interpreter
        for file in files:
            try:
                table = _read(file)
            except (OSError, pa.ArrowException) as error:
                notes.append(f"{file.path.name} cannot be read ({error}) and is left out. Copy it again.")
                continue
            index.files.append((file.path.stem, file.step, int(file.validation), index.count))
            for first, text in _packs(table, index, words, share):
                index.packs.append(first)
                running.append(beside.submit(pack, text))
                if len(running) > 2 * workers:
                    put(running.popleft().result())
            done(table.num_rows)
        while running:
            put(running.popleft().result())
    index.words = {name: list(kept.numbers) for name, kept in words.items()}
    return index


_PLAIN = ("reward", "accuracy", "turns", "calls", "faults", "tokens", "trained", "group")
_WORDS = ("problem", "source", "verdict", "stop", "truth", "answer")


def _read(file: StepFile) -> pa.Table:
    with pq.ParquetFile(file.path) as parquet:
        known = set(parquet.schema_arrow.names)
        return parquet.read(columns=[name for name in (*COLUMNS, "prompt") if name in known])


def _packs(table: pa.Table, index: Index, words: dict[str, _Words], share: float) -> Iterator[tuple[int, str]]:
    """Number of the first trajectory and JSON of each pack of a file; the columns grow on the way."""
    lengths = table["prompt_ids"].combine_chunks().value_lengths().to_pylist()
    runs = _mask_runs(table["response_mask"])
    rows = table.drop_columns(["prompt_ids", "response_mask"]).to_pylist()
    groups: dict[str, int] = {}
    prompts: dict[str, int] = {}
    records: list[str] = []
    first, size = index.count, 0
    for row, prompt_tokens, mask in zip(rows, lengths, runs, strict=True):
        kept = share >= 1.0 or crc32(row["group"].encode()) % 10_000 < share * 10_000
        _count(row, mask, index, words, index.prompts + groups.setdefault(row["group"], len(groups)))
        text = "null"
        if kept:
            prompt = json.dumps(row.get("prompt"), ensure_ascii=False)
            record = {
                "id": row["trajectory_id"], "prompt": prompts.setdefault(prompt, len(prompts)),
                "prompt_tokens": prompt_tokens, "mask": mask, "truth": row["ground_truth"],
                "extracted": row["extracted"], "infra_error": row["infra_error"], "turns": row["turns"],
            }  # fmt: skip
            text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        index.left_out += not kept
        records.append(text)
        size += len(text)
        if size > PACK_BYTES:
            yield first, _pack_text(prompts, records)
            prompts, records, first, size = {}, [], index.count, 0
    if records:
        yield first, _pack_text(prompts, records)
    index.prompts += len(groups)


def _pack_text(prompts: dict[str, int], records: list[str]) -> str:
    return f'{{"prompts":[{",".join(prompts)}],"records":[{",".join(records)}]}}'


def _count(row: dict[str, Any], mask: list[int], index: Index, words: dict[str, _Words], group: int) -> None:
    statuses = [call["status"] for turn in row["turns"] for call in turn["calls"]]
    faults = 16 * bool(row["infra_failed"])
    for status in statuses:
        faults |= _FAULT_OF_STATUS.get(status, 0)
    start, *lengths = mask or [0]
    values = {
        "reward": _rounded(row["reward"]), "accuracy": _rounded(row["accuracy"]), "turns": len(row["turns"]),
        "calls": len(statuses), "faults": faults, "tokens": sum(lengths),
        "trained": sum(lengths[1 - start :: 2]), "group": group,
    }  # fmt: skip
    texts = {
        "problem": row["problem_id"], "source": row["data_source"], "verdict": row["verdict"],
        "stop": row["stop_reason"], "truth": row["ground_truth"], "answer": row["extracted"],
    }  # fmt: skip
    for name, value in values.items():
        index.columns[name].append(value)
    for name, text in texts.items():
        index.columns[name].append(words[name].number((text or "")[:_INDEX_CHARS]))


def _rounded(value: float | None) -> float | None:
    return without_nan(None if value is None else round(value, 4))


def _mask_runs(column: pa.ChunkedArray) -> list[list[int]]:
    """Each mask as its first value and the lengths of its runs: [1, 120, 45, 60] is 120 ones, 45 zeros, 60 ones."""
    array = column.combine_chunks()
    values = array.flatten().to_numpy(zero_copy_only=False).astype(np.int8)
    found, start = [], 0
    for length in array.value_lengths().fill_null(0).to_pylist():
        mask = values[start : start + length]
        start += length
        edges = np.flatnonzero(np.diff(mask)) + 1
        found.append([int(mask[0]), *np.diff([0, *edges, length]).tolist()] if length else [])
    return found


def _share_that_fits(files: Sequence[StepFile], max_bytes: float) -> float:
    """Share of the prompts whose texts fit: parquet's own compressed columns say how large they are, about."""
    size = 0
    for file in files:
        try:
            metadata = pq.read_metadata(file.path)
        except (OSError, pa.ArrowException):
            continue  # gone since; told when its rows are to be read
        for group in range(metadata.num_row_groups):
            columns = (metadata.row_group(group).column(number) for number in range(metadata.num_columns))
            size += sum(c.total_compressed_size for c in columns if c.path_in_schema.startswith(("turns.", "prompt.")))
    return min(1.0, max_bytes / (size * 4 / 3)) if size else 1.0
