"""The prepared data on disk: its schema, its hash, its report, and how they are written and read back."""

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.retool.data_picture import draw_report
from recipe.retool.data_report import report_text
from recipe.retool.deduplicate import Problem
from recipe.retool.questions import build_prompt, language_of
from verl_ext.data_root import DATA_REPORT
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.parquet_files import PREPARED_KEY

FORMAT = 2
"""Raised whenever the same input gives other rows."""
TEXT_NAME, PICTURE_NAME = "report.txt", "report.png"
HASH_KEY = b"verl_ags.content_sha256"
AGENT_NAME = "tool_agent"
"""The agent loop that a row asks for; verl's default_agent_loop counts only where a row names none.

Source: verl 0.6.1 experimental/agent_loop/agent_loop.py.
"""

_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string()), ("split", pa.string()), ("language", pa.string())])),
        ("agent_name", pa.string()),
    ]
)


def build_rows(problems: Iterable[Problem], split: str) -> list[dict]:
    """Rows in verl's schema.

    The problem id is in extra_info.index, since of a row only data_source, reward_model and extra_info
    survive generation. Source: verl 0.6.1 trainer/ppo/ray_trainer.py `_get_gen_batch`.
    """
    return [
        {
            "data_source": problem.data_source,
            "prompt": [{"role": "user", "content": build_prompt(problem.question.text)}],
            "ability": "MATH",
            "reward_model": {"ground_truth": problem.answer, "style": "rule"},
            "extra_info": {
                "index": problem.problem_id,
                "split": split,
                "language": language_of(problem.question.text),
            },
            "agent_name": AGENT_NAME,
        }
        for problem in problems
    ]


def load_report(out_dir: str | os.PathLike[str]) -> dict:
    """The report of prepared data, after checking that it speaks of the files beside it.

    Raises:
        DataError: no report, or a parquet file is missing or from another run than the report.
    """
    report_path = Path(out_dir) / DATA_REPORT
    cure = "Run prepare-data again."
    try:
        report = json.loads(report_path.read_text(encoding="utf-8"))
        promised = {split: report[split]["content_sha256"] for split in ("train", "val")}
    except FileNotFoundError as error:
        raise DataError(f"no prepared data in {out_dir}: {DATA_REPORT} is missing. {cure}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read {report_path}: {error!r}. {cure}") from error
    for split, expected in promised.items():
        path = Path(out_dir) / f"{split}.parquet"
        try:
            metadata = pq.read_metadata(path).metadata or {}
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot read {path}: {error}. {cure}") from error
        if metadata.get(HASH_KEY, b"").decode() != expected:
            raise DataError(f"{path} is not the file that {DATA_REPORT} describes. {cure}")
    return report


def write_rows(rows: list[dict], path: Path, metadata: dict[bytes, str]) -> None:
    """Write rows of `build_rows` as parquet in verl's schema, with some metadata of the file."""
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")


def write_prepared(out_dir: Path, rows_by_split: dict[str, list[dict]], report: dict, *, picture: bool = True) -> None:
    """Write `<split>.parquet` and the report so that a killed run leaves the old files whole.

    All files are complete on disk before the first takes its place; the report comes last, and
    `load_report` refuses files that do not belong to it. So does the check before a run, by PREPARED_KEY.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with _staged(out_dir) as stage:
            hashes = {split: report[split]["content_sha256"] for split in rows_by_split}
            together = sha256(" ".join(hashes.values()).encode()).hexdigest()
            for split, rows in rows_by_split.items():
                metadata = {HASH_KEY: hashes[split], PREPARED_KEY: together, b"verl_ags.format": str(FORMAT)}
                write_rows(rows, stage(f"{split}.parquet"), metadata)
            stage(TEXT_NAME).write_text(report_text(report), encoding="utf-8")
            if picture:
                draw_report(report, stage(PICTURE_NAME))
            text = json.dumps(report, indent=2, ensure_ascii=False, sort_keys=True)
            stage(DATA_REPORT).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {out_dir}: {error}. Give --out a folder that you may write."
        ) from error


def _remove_leftovers(out_dir: Path) -> None:
    """Remove what runs that were killed had staged; a process that still lives keeps its own."""
    for path in out_dir.glob(".*.tmp"):
        match = re.fullmatch(r"\.[\w.]+\.(\d+)-[0-9a-f]{8}\.tmp", path.name)
        if match and not Path("/proc", match[1]).exists():
            path.unlink(missing_ok=True)


@contextmanager
def _staged(out_dir: Path) -> Iterator:
    """Gives a function from final name to temporary path; on success all take their names, else none."""
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    staged: dict[str, Path] = {}
    _remove_leftovers(out_dir)

    def stage(name: str) -> Path:
        return staged.setdefault(name, out_dir / f".{name}.{token}.tmp")

    try:
        yield stage
        for path in staged.values():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        for name, path in staged.items():
            path.replace(out_dir / name)
    finally:
        for path in staged.values():
            with suppress(FileNotFoundError):
                path.unlink()
