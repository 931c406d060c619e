"""What differs between runs: configuration, data and versions, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.report.run_folder import Run
from verl_ext.report.tables import Table, flat

# Follow from the run's name and folder, so they always differ and never matter.
NAMES_OF_A_RUN = (
    "verl_ext.run_id", "verl_ext.run_dir", "verl_ext.config_dir", "trainer.experiment_name",
    "trainer.default_local_dir",
)  # fmt: skip
_ABSENT = "(not there)"


def difference_tables(runs: Sequence[Run]) -> list[Table]:
    """Configuration, data and versions, a column for each run, only what differs."""
    configs = [_without(flat(run.config) if run.config else {}, NAMES_OF_A_RUN) for run in runs]
    versions = [_versions(run.manifest) for run in runs]
    return [
        _differences("Configuration", "key", runs, configs),
        _differences("Data", "what", runs, [_data(run) for run in runs]),
        _differences("Versions", "what", runs, versions),
        _differences("Settings", "variable", runs, [flat(run.manifest.get("settings") or {}) for run in runs]),
    ]


def _differences(title: str, what: str, runs: Sequence[Run], found: Sequence[Mapping[str, str]]) -> Table:
    keys = sorted({key for one in found for key in one if key})
    rows = [(key, *(one.get(key, _ABSENT) for one in found)) for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    note = f"{len(rows) - len(different)} are the same" if different else f"no difference in {len(rows)}"
    return Table(title, (what, *(run.name for run in runs)), different, note)


def _versions(manifest: Mapping[str, Any]) -> dict[str, str]:
    keys = ("git_revision", "python", "platform", "versions", "locks")
    parts = {key: manifest[key] for key in keys if key in manifest}
    return flat(parts) if parts else {}


def _data(run: Run) -> dict[str, str]:
    """Hashes of files by their names and not their places, the model's, and prepare-data's counts."""
    files = {path.rsplit("/", 1)[-1]: digest for path, digest in (run.manifest.get("data") or {}).items()}
    model = {key: value for key, value in (run.manifest.get("model") or {}).items() if key != "folder"}
    report = {
        side: {key: value for key, value in (run.data_report.get(side) or {}).items() if key != "conflicts"}
        for side in ("train", "val")
    } if run.data_report else {}  # fmt: skip
    parts = {name: value for name, value in (("file", files), ("model", model), ("report", report)) if value}
    return flat(parts) if parts else {}


def _without(values: Mapping[str, str], keys: Sequence[str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key not in keys}
