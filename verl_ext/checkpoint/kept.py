"""The checkpoints that a run keeps: found by the run's name and the step, and looked through before they are read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext.errors import ConfigurationError
from verl_ext.runs import CHECKPOINTS, CONFIG, find_run

_STEP = "global_step_"
ADAPTER = "lora_adapter"  # verl's name of the folder that its merger puts an adapter into


@dataclass(frozen=True)
class Checkpoint:
    """A kept checkpoint.

    Attributes:
        run_dir: the run's folder.
        step: after which it was written.
    """

    run_dir: Path
    step: int

    @property
    def folder(self) -> Path:
        """All of it: verl's `global_step_N`."""
        return self.run_dir / CHECKPOINTS / f"{_STEP}{self.step}"

    @property
    def actor(self) -> Path:
        """The model's shards, its configuration and tokenizer."""
        return self.folder / "actor"

    @property
    def world_size(self) -> int:
        """Ranks that wrote it.

        Raises:
            ConfigurationError: the file that says so cannot be read.
        """
        path = self.actor / "fsdp_config.json"
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["world_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} cannot be read ({error}), so how many shards there are is not known: {_CURE}"
            ) from error

    @property
    def export_folder(self) -> Path:
        """Where it is exported to if nobody says otherwise."""
        return self.run_dir / "export" / self.folder.name

    @cached_property
    def config(self) -> DictConfig:
        """The run's configuration, resolved.

        Raises:
            ConfigurationError: it cannot be read.
        """
        try:
            config = OmegaConf.load(self.run_dir / CONFIG)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{self.run_dir / CONFIG} cannot be read ({error}): {_CURE}") from error
        if not isinstance(config, DictConfig):
            raise ConfigurationError(f"{self.run_dir / CONFIG} is no configuration: {_CURE}")
        return config

    @property
    def lora_alpha(self) -> float:
        """Scale of the run's adapter."""
        return float(self.config.actor_rollout_ref.model.lora_alpha)

    def shards(self) -> list[Path]:
        """The model's file of each rank, whether it is there or not."""
        size = self.world_size
        return [self.actor / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]


_CURE = "copy it again from where the run was, or take another step with --step"


def kept_steps(run_dir: Path) -> list[int]:
    """The steps whose checkpoints a run keeps, oldest first."""
    names = [path.parent.name.removeprefix(_STEP) for path in (run_dir / CHECKPOINTS).glob(f"{_STEP}*/actor")]
    return sorted(int(name) for name in names if name.isdigit())


def find_checkpoint(runs_folder: Path, text: str, step: int | None = None) -> Checkpoint:
    """The checkpoint that a user means by a run's name or folder, or by a checkpoint's own folder.

    Args:
        runs_folder: where runs are, below the data root.
        text: what the user wrote.
        step: the newest that is kept if None.

    Raises:
        ConfigurationError: no such run, or it keeps no such checkpoint.
    """
    path = Path(text).expanduser().absolute()
    if path.name == "actor":
        path = path.parent
    if path.name.startswith(_STEP) and path.is_dir():
        if not (path.parent.parent / CONFIG).is_file():
            raise ConfigurationError(f"{path} is not in a run's folder, so what it was trained from is not known")
        run_dir, step = path.parent.parent, int(path.name.removeprefix(_STEP))
    else:
        run_dir = find_run(runs_folder, text)
    steps = kept_steps(run_dir)
    if not steps:
        raise ConfigurationError(f"{run_dir} has no checkpoint: set trainer.save_freq, or let the run reach its end")
    if step is not None and step not in steps:
        raise ConfigurationError(
            f"{run_dir} keeps no checkpoint of step {step}: there are {', '.join(map(str, steps))}"
        )
    return Checkpoint(run_dir, steps[-1] if step is None else step)


def problems(checkpoint: Checkpoint) -> Iterator[str]:
    """What is missing or damaged of the model in a checkpoint, by the name of the file.

    torch's files are zip archives, whose members carry a checksum each: all of it is read.

    Raises:
        ConfigurationError: how many shards there should be is not known.
    """
    for path in (*checkpoint.shards(), checkpoint.actor / "huggingface" / "config.json"):
        if not path.is_file():
            yield f"{path} is missing: {_CURE}"
        elif path.suffix == ".pt" and (wrong := _damage(path)):
            yield f"{path} is damaged ({wrong}): {_CURE}"


def _damage(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
            return f"{member} does not match its checksum" if member else ""
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return str(error) or type(error).__name__
