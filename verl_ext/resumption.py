"""How a run that died goes on: found again, what was asked for, its last whole checkpoint, and what was lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl_ext import runs
from verl_ext.checkpoint.folder import CheckpointFolder, Found
from verl_ext.errors import ConfigurationError
from verl_ext.parquet_files import footer
from verl_ext.request import RunRequest
from verl_ext.sandbox.ledger import LEDGERS
from verl_ext.settings import FLAGS
from verl_ext.trajectory import ROLLOUTS

LATEST = "latest"
LOST = "lost.json"
# Settings that flags give. They are the next attempt's own; what differs from the last is said.
FROM_FLAGS = ("VERL_EXT_ENV_FILE", *FLAGS.values())


@dataclass(frozen=True)
class Lost:
    """What has to be done again.

    Attributes:
        first_step, last_step: that were begun or done after the checkpoint; none if the last is not above the first.
        trajectories: that were rolled out in them, as far as they were recorded.
        work_s: from the checkpoint to the last sign of life, without the time that the run stood still in between.
        still_s: from then until now.
    """

    first_step: int
    last_step: int
    trajectories: int
    work_s: float
    still_s: float

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}" if self.last_step >= self.first_step else "no whole step"
        return (
            f"lost: {steps} ({self.trajectories} trajectories), {self.work_s:.0f} s of work; the run stood still for "
            f"{self.still_s:.0f} s"
        )


@dataclass(frozen=True)
class Resumption:
    """How a run goes on.

    Attributes:
        run_dir: its folder.
        request: what was asked for at its start, with what is asked for now.
        checkpoints: the folder of them.
        found: the checkpoint to go on from; its folder is None for a run that died before it had saved one.
        lost: what has to be done again.
    """

    run_dir: Path
    request: RunRequest
    checkpoints: CheckpointFolder
    found: Found
    lost: Lost

    @property
    def step(self) -> int:
        """The step to go on from, 0 for the beginning."""
        return self.found.marker.step if self.found.marker else 0


def find_run(runs_folder: Path, name: str) -> Path:
    """The folder of a run by its id, by its path, or the one that was begun last for `latest`.

    Raises:
        ConfigurationError: there is none, or it cannot be asked for again.
    """
    if name == LATEST:
        known = sorted(runs_folder.glob(f"*/{runs.REQUEST}"), key=lambda path: path.stat().st_mtime)
        if not known:
            raise ConfigurationError(f"{runs_folder} holds no run to go on with: give --resume=RUN, or start one")
        return known[-1].parent.absolute()
    run_dir = (Path(name) if "/" in name else runs_folder / name).expanduser().absolute()
    if not run_dir.is_dir():
        near = ", ".join(sorted(path.parent.name for path in runs_folder.glob(f"*/{runs.REQUEST}"))[-5:])
        raise ConfigurationError(f"{run_dir} is not there: give --resume one of {near or 'no run; there is none'}")
    if not (run_dir / runs.REQUEST).is_file():
        raise ConfigurationError(
            f"{run_dir} has no {runs.REQUEST}, so what was asked for is not known: start a new run with the flags of "
            "the old one and --set trainer.resume_mode=resume_path --set trainer.resume_from_path="
            f"{run_dir / runs.CHECKPOINTS}/global_step_N"
        )
    return run_dir


def write_request(run_dir: Path, request: RunRequest, resolved: Mapping[str, str]) -> None:
    """Keep what was asked for. No secret is in it: the values of settings stay in the environment.

    Args:
        run_dir: the run's folder.
        request: as given.
        resolved: `hardware`, `model`, `train` and `val` as they were found.
    """
    kept = {
        "recipe": request.recipe,
        **resolved,
        "overrides": request.overrides,
        "server_options": request.server_options,
        "environment": {name: value for name, value in request.environment.items() if name not in FROM_FLAGS},
    }
    runs.write_whole(run_dir / runs.REQUEST, json.dumps(kept, indent=2) + "\n")


def _read_request(run_dir: Path, now: RunRequest) -> RunRequest:
    """What was asked for at the start, and behind it what is asked for now."""
    try:
        kept: dict[str, Any] = json.loads((run_dir / runs.REQUEST).read_text(encoding="utf-8"))
        kept |= {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
        old = RunRequest(**kept)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"{run_dir / runs.REQUEST} cannot be read ({error!r})") from error
    return replace(
        now,
        recipe=old.recipe,
        hardware=now.hardware or old.hardware,
        model=now.model or old.model,
        train=now.train or old.train,
        val=now.val or old.val,
        overrides=(*old.overrides, *now.overrides),
        server_options=old.server_options,
        environment={**old.environment, **now.environment},
        run_id=run_dir.name,
        run_dir=run_dir,
    )


def find(request: RunRequest, run_dir: Path, say: Callable[[str], None]) -> Resumption:
    """How a run can go on. Reads only; every byte of the checkpoint is read.

    Args:
        request: what is asked for now, over what was asked for at the start.
        run_dir: from `find_run`.
        say: told what is found, what is passed over and what is lost.

    Raises:
        ConfigurationError: the run has checkpoints and none of them is whole, or its own files cannot be read.
    """
    asked = _read_request(run_dir, request)
    try:
        config: Any = OmegaConf.load(run_dir / runs.CONFIG)
        checkpoints = CheckpointFolder(Path(config.trainer.default_local_dir).absolute())
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{run_dir / runs.CONFIG} cannot be read ({error!r}): start a new run") from error
    started_s = time.monotonic()
    found = checkpoints.find(say)
    if found.marker is None and any(one.folder.parent == checkpoints.root for one in found.passed):
        raise ConfigurationError.listing(
            f"{run_dir.name} has no whole checkpoint; restore a file that is missing, or start a new run",
            map(str, found.passed),
        )
    for one in found.passed:
        say(f"passed over: {one}")
    if found.folder and found.marker:
        read = f"{found.marker.bytes / 2**20:,.1f} MiB read in {time.monotonic() - started_s:.1f} s"
        say(f"{run_dir.name} goes on from step {found.marker.step}: {found.folder}, {read}")
        asked = replace(asked, resume_from=found.folder)
    else:
        say(f"{run_dir.name} begins again: it died before it had saved a checkpoint")
    step = found.marker.step if found.marker else 0
    lost = _lost(run_dir, step, found.marker.created_s if found.marker else None)
    say(str(lost))
    return Resumption(run_dir, asked, checkpoints, found, lost)


def _lost(run_dir: Path, step: int, since_s: float | None) -> Lost:
    lines = [line for line in runs.read_jsonl(run_dir / runs.METRICS) if line["step"] > step]
    phases = [entry["time_s"] for entry in runs.read_jsonl(run_dir / runs.PHASES)]
    rollouts = later_rollouts(run_dir, step)
    steps = [line["step"] for line in lines] + [number for number, _ in rollouts]
    counts = [footer(path) for _, path in rollouts if path.name.startswith("train-")]
    signs = [*(line["time_s"] for line in lines), *phases, since_s or 0.0]
    signs += [path.stat().st_mtime for path in (*(run_dir / LEDGERS).rglob("*.jsonl"), *(path for _, path in rollouts))]
    last_s = max(signs)
    first_s = since_s if since_s is not None else min(phases, default=last_s)
    return Lost(
        step + 1,
        max(steps, default=step),
        sum(found.rows for found in counts if found),
        max(0.0, last_s - first_s - _stood_still_s(run_dir, first_s)),
        max(0.0, time.time() - last_s) if last_s else 0.0,
    )


def _stood_still_s(run_dir: Path, since_s: float) -> float:
    """Between attempts that began after a moment; so it is where a run goes back further than its last attempt did."""
    known = [path for path in (run_dir / runs.ATTEMPTS).glob(f"*/{LOST}") if path.stat().st_mtime > since_s]
    return sum(float(json.loads(path.read_text(encoding="utf-8"))["still_s"]) for path in known)


def later_rollouts(run_dir: Path, step: int) -> list[tuple[int, Path]]:
    """Step and file of what was rolled out, or validated, after a step."""
    paths = [(path.stem.rpartition("-")[2], path) for path in sorted((run_dir / ROLLOUTS).glob("*-*.parquet"))]
    return [(int(number), path) for number, path in paths if number.isdigit() and int(number) > step]


def refuse_finished(resumption: Resumption, steps: int | None) -> None:
    """Nothing if there is something left to do.

    Raises:
        ConfigurationError: the checkpoint is the last step's.
    """
    if steps is not None and resumption.step >= steps:
        raise ConfigurationError(
            f"{resumption.run_dir.name} has done all of its {steps} steps: ask for more with "
            "--set trainer.total_training_steps=N (and trainer.total_epochs, if the data ends before)"
        )
