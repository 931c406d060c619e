"""Which files a path given by the user means: a file, a folder, a hub snapshot, or a hub id kept locally."""

import re
from pathlib import Path

from verl_ext.data_root import is_hub_id, raw_data_folder
from verl_ext.errors import DataError

SUFFIXES = (".parquet", ".jsonl")
_SPLIT_NAMES = {"train": ("train",), "val": ("val", "validation", "test", "dev")}


def find_files(source: str, split: str, data_root: Path | None = None) -> list[Path]:
    """The data files behind a path, in a fixed order.

    Args:
        source: A parquet or jsonl file, a folder that holds some (also a hub cache folder or one of its
            snapshots; a trailing slash changes nothing), or a hub id such as "org/name".
        split: "train" or "val": which files to take from a folder that holds both.
        data_root: Where hub ids are looked up first, as `<data_root>/data/raw/<org>--<name>`; then in the hub's own
            cache on this machine.

    Raises:
        DataError: nothing is there; the message says where to put the files. Nothing is downloaded.
    """
    path = Path(source).expanduser()
    if not path.exists():
        path = _hub_folder(source, data_root)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} is neither .parquet nor .jsonl: give a file of one of these kinds.")
        return [path]
    return _folder_files(_snapshot(path), split)


def _hub_folder(source: str, data_root: Path | None) -> Path:
    if not is_hub_id(source):
        raise DataError(f"no such file or folder: {source}. Give a parquet or jsonl file, or a folder of them.")
    folder = raw_data_folder(data_root or Path("<data root>"), source)
    if data_root is None or not folder.is_dir():
        cached = _hub_cache() / f"datasets--{source.replace('/', '--')}"
        if cached.is_dir():
            return cached
        raise DataError(
            f"no such file or folder: {source}. If it is a hub data set, fetch it with `invoke download --data "
            f"{source}`"
            + (f", which puts it into {folder}." if data_root else ", and name the data root with --data-root.")
        )
    return folder


def _hub_cache() -> Path:
    """Where the hub's client keeps what it downloaded: it reads HF_HOME and HF_HUB_CACHE itself."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(folder: Path) -> Path:
    """The revision in use of a hub cache folder (`datasets--org--name`); any other folder as it is."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    if main.is_file() and (snapshots / main.read_text().strip()).is_dir():
        return snapshots / main.read_text().strip()
    revisions = sorted(entry for entry in snapshots.iterdir() if entry.is_dir())
    if len(revisions) != 1:
        raise DataError(f"{len(revisions)} revisions in {snapshots} and no refs/main: give one of the folders itself.")
    return revisions[0]


def _folder_files(folder: Path, split: str) -> list[Path]:
    files: list[Path] = []
    for suffix in SUFFIXES:  # parquet wins: a hub folder often holds the same rows as jsonl too
        files = sorted(
            entry
            for entry in folder.rglob(f"*{suffix}")
            if entry.is_file() and not any(part.startswith(".") for part in entry.relative_to(folder).parts)
        )
        if files:
            break
    if not files:
        raise DataError(f"no .parquet and no .jsonl file in {folder}: give the folder that holds the data files.")
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file), []).append(file)
    if len(by_split) == 1:
        return files
    if split in by_split:
        return by_split[split]
    names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
    raise DataError(f"{folder} mixes files of several splits ({names}): give the one file that is meant.")


def _split_of(file: Path) -> str | None:
    for split, names in _SPLIT_NAMES.items():
        if re.match(rf"(?:{'|'.join(names)})(?![a-z])", file.stem.lower()):
            return split
    return None
