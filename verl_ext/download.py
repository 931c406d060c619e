"""`invoke download`: the recipe's model and data from a hub into the data root, resumable, verified, whole or not.

    listing -> <folder>.partial, where a broken download goes on -> every file hashed -> renamed to <folder>

Exit status: 0 all is there; 2 something could not be fetched, with the cure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from verl_ext.compose import hub_ids
from verl_ext.data_root import RECORD, is_hub_id, model_folder, raw_data_folder, read_record
from verl_ext.errors import ConfigurationError, HubUnreachableError
from verl_ext.hubs import HUBS, Hub, Kind, Listing, hub_named
from verl_ext.settings import Settings

PARTIAL = ".partial"
# What is left of the libraries' own bookkeeping when a folder is done.
_BOOKKEEPING = (".cache", ".msc", ".mv", ".mdl", "._____temp", ".lock")
ATTEMPTS, PAUSE_S = 5, 2.0
_GIB = 2**30


@dataclass(frozen=True)
class Wanted:
    """A repository and where it goes."""

    hub_id: str
    kind: Kind
    folder: Path


def fetch(wanted: Wanted, hub: Hub, revision: str, say: Callable[[str], None]) -> bool:
    """Bring one repository to its folder; whether anything had to be fetched.

    Raises:
        ConfigurationError: it is not to be had, does not fit, or is not what the hub says.
        HubUnreachableError: the hub does not answer at all.
    """
    done = read_record(wanted.folder)
    if done and (not revision or revision == done["revision"]):
        broken = [name for name, file in done["files"].items() if not _same_size(wanted.folder / name, file["size"])]
        if not broken:
            say(f"{wanted.hub_id}: is in {wanted.folder}, revision {done['revision'][:12]}")
            return False
    listing = hub.listing(wanted.hub_id, wanted.kind, revision)
    if not listing.files:
        raise ConfigurationError(f"{hub.address}/{wanted.hub_id} holds no files that a run reads: look at its name")
    partial = wanted.folder.with_name(wanted.folder.name + PARTIAL)
    try:
        if wanted.folder.is_dir() and not partial.exists():
            # Put there by hand, or damaged: what is right in it need not be fetched again.
            wanted.folder.rename(partial)
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{partial} cannot be made ({error}): give another --data-root") from error
    _check_room(partial, listing)
    _drop_what_differs(partial, listing)
    say(f"{wanted.hub_id}: {len(listing.files)} files, {listing.size / _GIB:.2f} GiB, to {wanted.folder}")
    _bring(wanted, hub, listing, partial, say)
    _verify(wanted, partial, listing)
    _finish(wanted, hub, partial, listing)
    say(f"{wanted.hub_id}: is in {wanted.folder}, every file verified")
    return True


def _bring(wanted: Wanted, hub: Hub, listing: Listing, partial: Path, say: Callable[[str], None]) -> None:
    """Fetch, and go on when it breaks off: huggingface_hub gives up on the first lost connection."""
    for attempt in range(ATTEMPTS):
        try:
            return hub.fetch(wanted.hub_id, wanted.kind, listing, partial)
        except HubUnreachableError as error:
            if attempt + 1 == ATTEMPTS:
                raise ConfigurationError(
                    f"{wanted.hub_id} broke off {ATTEMPTS} times ({error}). What came is kept: run `invoke download` "
                    "again, it goes on"
                ) from error
            say(f"{wanted.hub_id}: broke off, goes on in {PAUSE_S * 2**attempt:g} s")
            time.sleep(PAUSE_S * 2**attempt)
    return None


def _same_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _check_room(partial: Path, listing: Listing) -> None:
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(partial).free
    if listing.size - there > free:
        raise ConfigurationError(
            f"{(listing.size - there) / _GIB:.1f} GiB are to come, and {partial.parent} has {free / _GIB:.1f} free: "
            "give another --data-root, or free some"
        )


def _drop_what_differs(partial: Path, listing: Listing) -> None:
    """Remove whole files of another content, which the libraries would take for done."""
    for name, file in listing.files.items():
        if (partial / name).is_file() and file.differs(partial / name):
            (partial / name).unlink()


def _verify(wanted: Wanted, partial: Path, listing: Listing) -> None:
    columns = (TextColumn("verifying {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(wanted.hub_id, total=listing.size)
        for name, file in listing.files.items():
            how = file.differs(partial / name)
            if how:
                (partial / name).unlink(missing_ok=True)
                raise ConfigurationError(
                    f"{wanted.hub_id}: {name} {how}. It was removed, the rest stays: run `invoke download` again; if "
                    "it comes back so, the way to the hub changes files (a proxy?)"
                )
            progress.advance(task, file.size)


def _finish(wanted: Wanted, hub: Hub, partial: Path, listing: Listing) -> None:
    for name in _BOOKKEEPING:
        path = partial / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    files = {name: asdict(file) for name, file in listing.files.items()}
    record = {"hub": hub.name, "id": wanted.hub_id, "revision": listing.revision, "files": files}
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if wanted.folder.exists():
        shutil.rmtree(wanted.folder)  # damaged; what was right in it is in the new one
    partial.rename(wanted.folder)


def by_hand(missing: Sequence[Wanted], hub: Hub) -> str:
    """What to do where the hub is out of reach: the commands for another machine, and where the result goes."""
    package = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}[hub.name]
    lines = ["On a machine that reaches it:", f"    pip install {package}"]
    lines += [f"    {command}" for wanted in missing for command in hub.commands(wanted.hub_id, wanted.kind)]
    lines += ["and then bring the folders here, each to"]
    lines += [f"    {wanted.folder}" for wanted in missing]
    other = next(name for name in HUBS if name != hub.name)
    mirror = "set HF_ENDPOINT to a mirror, or " if hub.name == "huggingface" else ""
    return "\n".join([*lines, f"Or {mirror}take --source {other}."])


def _wanted(settings: Settings, models: Sequence[str], data: Sequence[str]) -> list[Wanted]:
    ids = hub_ids()
    if not models and not data:
        models, data = [ids["model"]], [ids["train"], ids["val"]]
    for hub_id in (*models, *data):
        if not is_hub_id(hub_id):
            raise ConfigurationError(f"{hub_id!r} is no name of a repository: write it like {ids['model']}")
    return [
        *(Wanted(hub_id, "model", model_folder(settings.data_root, hub_id)) for hub_id in models),
        *(Wanted(hub_id, "dataset", raw_data_folder(settings.data_root, hub_id)) for hub_id in data),
    ]


def download(
    settings: Settings,
    source: str,
    models: Sequence[str],
    data: Sequence[str],
    revision: str,
    say: Callable[[str], None],
) -> None:
    """Fetch what is named, or all that the recipe takes.

    Raises:
        ConfigurationError: with what could not be had, and what to do.
    """
    wanted = _wanted(settings, models, data)
    hub = hub_named(source, settings)
    for at, one in enumerate(wanted):
        try:
            fetch(one, hub, revision, say)
        except HubUnreachableError as error:
            missing = [other for other in wanted[at:] if not other.folder.is_dir()]
            if missing:
                raise HubUnreachableError(f"{error}.\n{by_hand(missing, hub)}") from error
            say(f"{error}. All folders are there, put there by hand, and not compared with the hub.")
            return
    if not models and not data:
        say("next: invoke prepare-data")


def main(arguments: Sequence[str]) -> int:
    """Parse, fetch, and turn every expected failure into a message and an exit status."""
    parser = argparse.ArgumentParser(
        prog="invoke download", description="Fetch the recipe's model and data.", allow_abbrev=False
    )
    parser.add_argument("--model", action="append", default=[], help="hub id; nothing else is fetched then")
    parser.add_argument("--data", action="append", default=[], help="hub id of a data set; nothing else then")
    parser.add_argument("--source", default="huggingface", help=f"one of {', '.join(HUBS)}")
    parser.add_argument("--revision", default="", help="branch, tag or commit")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of ./.env")
    options = parser.parse_args(arguments)
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        settings = Settings.load(options.env_file or None, flags={"--data-root": options.data_root})
        download(settings, options.source, options.model, options.data, options.revision, _say)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _stop(number: int, frame: object) -> NoReturn:
    """End at once: the libraries' threads would go on to the end of their files, and all that came is kept."""
    with contextlib.suppress(OSError):
        sys.stderr.write("\nstopped; what came is kept, and the next `invoke download` goes on from there\n")
        sys.stderr.flush()
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
