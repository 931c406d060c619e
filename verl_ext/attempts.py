"""What becomes of an attempt that died: its sandboxes end, and what it did after its checkpoint is put aside.

The run's folder then tells one story: steps up to the checkpoint from the attempt that died, later ones from the next.
Nothing is thrown away: the rest lies in attempts/N/.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext import runs
from verl_ext.clean import clean
from verl_ext.errors import ConfigurationError, SandboxError
from verl_ext.resumption import LOST, Resumption, later_rollouts
from verl_ext.sandbox.ledger import LEDGERS
from verl_ext.settings import Settings
from verl_ext.trajectory import ROLLOUTS


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """The folder of a run or an evaluation for this process alone; the system gives it back however the process ends.

    Raises:
        ConfigurationError: another process has it.
    """
    with (run_dir / runs.LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigurationError(
                f"{run_dir} is being written by {holder}: wait for it, or stop it first"
            ) from error
        except OSError:
            pass  # a file system without locks: nothing to hold
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def leave_the_dead(resumption: Resumption, config: DictConfig, settings: Settings, say: Callable[[str], None]) -> None:
    """Say what changed, end the sandboxes of the attempt that died, put aside what it did after its checkpoint."""
    for change in _changed(resumption.run_dir, config, settings):
        say(f"changed: {change}")
    swept = settings.needs_own_server  # such a server ends with its run, and its sandboxes with it
    if not swept:
        try:
            cleaned = asyncio.run(clean(settings, resumption.run_dir.name, resumption.run_dir))
            swept = cleaned.leaked == 0
            say(f"sandboxes of the attempt that died: {cleaned}")
        except SandboxError as error:
            say(f"the sandboxes of the attempt that died could not be ended, their time to live will end them: {error}")
    say(f"what came after the checkpoint lies in {put_aside(resumption, swept=swept)}")


def put_aside(resumption: Resumption, *, swept: bool) -> Path:
    """Move what came after the checkpoint into attempts/N/, and let verl's pointer name the checkpoint; the folder.

    Args:
        resumption: from `find`.
        swept: whether nothing is left of the sandboxes, so that their ledgers are history too.
    """
    run_dir, step = resumption.run_dir, resumption.step
    attempts = run_dir / runs.ATTEMPTS
    number = 1 + max((int(path.name) for path in attempts.glob("*") if path.name.isdigit()), default=0)
    aside = attempts / str(number)
    aside.mkdir(parents=True)
    (aside / LOST).write_text(json.dumps({"from_step": step, **asdict(resumption.lost)}, indent=2) + "\n", "utf-8")
    for name in (runs.CONFIG, runs.MANIFEST, runs.REQUEST):  # written anew; until then the old ones are needed
        shutil.copy2(run_dir / name, aside / name)
    for name in (runs.PHASES, runs.LOGS, "sandboxes.json", *([LEDGERS] if swept else [])):
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    for _, path in later_rollouts(run_dir, step):
        (aside / ROLLOUTS).mkdir(exist_ok=True)
        path.rename(aside / ROLLOUTS / path.name)
    for name in (runs.METRICS, runs.ALARMS):
        _split(run_dir / name, aside / name, step)
    if resumption.found.marker:
        resumption.checkpoints.point_to(step)
    for one in resumption.found.passed:
        resumption.checkpoints.put_aside(one)
    return aside


def _split(path: Path, later: Path, step: int) -> None:
    """Move the lines of later steps to another file; a torn last line is in neither."""
    if not path.is_file():
        return
    lines = runs.read_jsonl(path)
    parts: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        parts[line["step"] > step].append(json.dumps(line) + "\n")
    later.write_text("".join(parts[True]), encoding="utf-8")
    runs.write_whole(path, "".join(parts[False]))


def _changed(run_dir: Path, config: DictConfig, settings: Settings) -> list[str]:
    """Values and settings that the run had and has no longer; what resuming itself sets is left out."""
    old, new = OmegaConf.to_container(OmegaConf.load(run_dir / runs.CONFIG)), OmegaConf.to_container(config)
    before, now = _flat(old), _flat(new)
    for name in ("trainer.resume_mode", "trainer.resume_from_path", "trainer.val_before_train"):
        before.pop(name, None)
        now.pop(name, None)
    with contextlib.suppress(OSError, ValueError, KeyError):
        before |= json.loads((run_dir / runs.MANIFEST).read_text(encoding="utf-8"))["settings"]
        now |= settings.public_dict()
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return [f"{key} was {before.get(key)} and is {now.get(key)}" for key in keys]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix.rstrip("."): value}
    return {key: inner for name, part in value.items() for key, inner in _flat(part, f"{prefix}{name}.").items()}
