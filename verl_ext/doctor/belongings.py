"""What the user brings: settings, secrets (whether, never what), the model and the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_ext.compose import hub_ids
from verl_ext.data_root import model_folder, prepared_data
from verl_ext.doctor.findings import Finding, note, ok, red
from verl_ext.errors import ConfigurationError
from verl_ext.model_shape import read_shape, weight_problems
from verl_ext.parquet_files import footer
from verl_ext.settings import VARIABLES, Settings, sandboxes_alive


def settings(loaded: Settings, wrong: Sequence[str]) -> Iterator[Finding]:
    """What is wrong with them, and which secrets are there."""
    yield from (red("settings", problem) for problem in wrong)
    if not wrong:
        yield ok("settings", f"read from {loaded.env_file}" if loaded.env_file else "no .env: environment and defaults")
    public = loaded.public_dict()
    yield ok("secrets", ", ".join(f"{row.name} {public[row.name] or 'not set'}" for row in VARIABLES if row.secret))
    where = "this machine" if loaded.backend == "local" else loaded.e2b_domain
    yield ok("sandboxes", f"on {where}, at most {sandboxes_alive(loaded)} at once")


def model_and_data(loaded: Settings) -> Iterator[Finding]:
    """Those that `invoke train` takes when none is named."""
    folder = model_folder(loaded.data_root, hub_ids()["model"])
    if not folder.is_dir():
        yield note("model", f"{folder} is not there", "invoke download, or name another with --model")
    else:
        try:
            read_shape(folder)
            problems = list(weight_problems(folder))
        except ConfigurationError as error:
            problems = [str(error)]
        yield from (red("model", f"{problem}: invoke download goes on where it broke off") for problem in problems)
        if not problems:
            yield ok("model", str(folder))
    for path in prepared_data(loaded.data_root):
        found = footer(path) if path.is_file() else None
        if found:
            yield ok("data", str(path))
        elif path.is_file():
            yield red("data", f"{path} is no parquet file that can be read: invoke prepare-data")
        else:
            yield note("data", f"{path} is not there", "invoke download, then invoke prepare-data")
