"""What a model or a checkpoint can do on AIME 2024 and 2025, MATH-500 or the user's set: `invoke evaluate SUBJECT`.

Reads problems as `invoke prepare-data` does, takes samples through what a training validates with
(verl_ext/evaluation), and shows the numbers side by side. What it leaves: verl_ext/evaluation/__init__.py.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from recipe.retool.evaluation_table import tables
from recipe.retool.prepared import FORMAT, HASH_KEY, build_rows, write_rows
from recipe.retool.selection import Limits, open_source, read_split, select
from verl_ext import launch
from verl_ext.compose import hardware_names, hub_ids, recipe_names
from verl_ext.data_hash import hash_rows
from verl_ext.data_root import find_model, prepared_data
from verl_ext.display import writer
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.evaluation.plan import SETTINGS
from verl_ext.evaluation.results import SUMMARY
from verl_ext.evaluation.run import Asked, evaluate
from verl_ext.evaluation.subject import find_subject
from verl_ext.settings import FLAGS, Settings

# Names for hub ids; each has a layout that sources.py knows.
SETS = {"aime-2024": hub_ids()["val"], "aime-2025": "math-ai/aime25", "math-500": "HuggingFaceH4/MATH-500"}


def problems_file(sources: Sequence[str], data_root: Path, max_problems: int | None) -> tuple[Path, str]:
    """The problems of some sources in one file below the data root, with the hash of its rows.

    Args:
        sources: names of `SETS`, or what `invoke prepare-data` takes.
        data_root: where hub ids are looked up.
        max_problems: keep the first so many.

    Raises:
        DataError: a source cannot be used, or no problem is left.
        ConfigurationError: the data root cannot be written.
    """
    opened = [open_source(SETS.get(source, source), "val", data_root) for source in sources]
    split = read_split("val", opened, lambda _: None)
    selection = select(split, Limits(max_rows=max_problems), frozenset(), None)
    if not selection.kept:
        causes = ", ".join(f"{rows} {cause}" for cause, rows in selection.causes.items())
        raise DataError(f"no problem of {', '.join(sources)} is left ({causes}): give another set")
    rows = build_rows(selection.kept, "val")
    content_sha256 = hash_rows(rows)
    path = (data_root / "data" / "evaluate" / f"{content_sha256[:16]}.parquet").absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(rows, path, {HASH_KEY: content_sha256, b"verl_ags.format": str(FORMAT)})
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path} ({error}): set VERL_EXT_DATA_ROOT to a folder of yours"
        ) from error
    return path, content_sha256


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invoke evaluate", description="Measure a model or a checkpoint.", allow_abbrev=False
    )
    parser.add_argument(
        "subject", help="a run's name or folder, a checkpoint's folder, a model's folder, or a hub id kept locally"
    )
    parser.add_argument("--step", type=int, help="of the run's checkpoint; default: the newest that is kept")
    parser.add_argument("--base", default="", help="the model that the run began from, if it lies elsewhere now")
    sets = ", ".join(SETS)
    parser.add_argument(
        "--data", action="append", default=[], metavar="SET",
        help=f"{sets}, or what prepare-data takes; repeatable; default: the run's, or prepared, validation data",
    )  # fmt: skip
    parser.add_argument("--settings", default="", help=f"of {', '.join(SETTINGS)}; default: all that make sense")
    parser.add_argument("-n", "--n", type=int, help="samples a problem; default: the recipe's")
    parser.add_argument("--max-problems", type=int, help="keep the first N problems")
    parser.add_argument("--seed", type=int, default=1, help="of all samples; default: 1")
    parser.add_argument("--run-id", default="", help="name of the evaluation; one that was interrupted goes on")
    parser.add_argument("--recipe", default="retool", help=f"one of {', '.join(recipe_names())}")
    parser.add_argument("--hardware", default="", help=f"one of {', '.join(hardware_names())}; default: by GPUs")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of ./.env")
    parser.add_argument("--sandbox", default="", help="auto, e2b or local, in place of VERL_EXT_SANDBOX_BACKEND")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="verl's own keys, last and strongest")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Parse, evaluate, show; the launcher's exit statuses."""
    options = _parser().parse_intermixed_args(arguments)
    given = {"--sandbox": options.sandbox, "--data-root": options.data_root}
    environment = {FLAGS[flag]: value for flag, value in given.items() if value}
    settings, wrong = Settings.read(options.env_file or None, flags=given)
    return launch.guarded(lambda: _evaluate(options, settings, wrong, environment))


def _evaluate(
    options: argparse.Namespace, settings: Settings, wrong: Sequence[str], environment: Mapping[str, str]
) -> None:
    for flag, value in {"-n": options.n, "--max-problems": options.max_problems}.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{flag} is {value}: give at least 1")
    subject = find_subject(options.subject, options.step, settings)
    if options.base:
        subject = replace(subject, base=find_model(settings.data_root, options.base))
    default = subject.data or (str(prepared_data(settings.data_root)[1]),)
    data, content_sha256 = problems_file(options.data or default, settings.data_root, options.max_problems)
    asked = Asked(
        subject,
        data,
        content_sha256,
        settings=[name for name in options.settings.split(",") if name],
        n=options.n,
        seed=options.seed,
        recipe=options.recipe,
        hardware=options.hardware,
        overrides=tuple(options.overrides),
        run_id=options.run_id,
        environment=environment,
    )
    say = writer(sys.stdout)
    folder = evaluate(asked, settings, say, wrong)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    Console().print(*tables(summary))
    say(f"written to {folder}: summary.json, problems.parquet, samples.parquet, and the trajectories")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
