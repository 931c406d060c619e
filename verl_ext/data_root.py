"""Where things are below the data root, so that one folder is all that a user has to name.

<data root>/
    models/<org>--<name>/      a model of the hub, by `invoke download`
    data/raw/<org>--<name>/    a data set of the hub, by `invoke download`
    data/<recipe>/             train.parquet and val.parquet, by `invoke prepare-data`
    cache/                     what can be made again
    runs/<run id>/             verl_ext/runs.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DATA_REPORT = "report.json"  # of prepare-data, beside the files that it speaks of
RECORD = ".verl-ags-download.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(text: str) -> bool:
    """Whether a text has the form `org/name`."""
    return bool(_HUB_ID.fullmatch(text))


def hub_id_of(folder: Path) -> str | None:
    """The hub id that a folder of ours is named after."""
    hub_id = folder.name.replace("--", "/", 1)
    return hub_id if folder.parent.name in ("models", "raw") and is_hub_id(hub_id) else None


def model_folder(data_root: Path, hub_id: str) -> Path:
    """Where a model of the hub is kept."""
    return data_root / "models" / hub_id.replace("/", "--")


def raw_data_folder(data_root: Path, hub_id: str) -> Path:
    """Where a data set of the hub is kept as it came."""
    return data_root / "data" / "raw" / hub_id.replace("/", "--")


def prepared_data(data_root: Path, name: str = "retool") -> tuple[Path, Path]:
    """Training and validation file as `invoke prepare-data` makes them."""
    folder = data_root / "data" / name
    return folder / "train.parquet", folder / "val.parquet"


def find_model(data_root: Path, text: str) -> Path:
    """The folder that a user means by a path or a hub id; a path that exists wins. It may not be there."""
    path = Path(text).expanduser()
    if not path.exists() and is_hub_id(text):
        return model_folder(data_root, text)
    return path.absolute()


def read_record(folder: Path) -> dict[str, Any] | None:
    """What a folder says of where it came from; None if nobody fetched it here."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record if record["files"] and record["revision"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
