"""What a user wants evaluated: a run, a checkpoint of one, or a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.checkpoint.kept import Checkpoint, find_checkpoint
from verl_ext.compose import items
from verl_ext.data_root import find_model
from verl_ext.errors import ConfigurationError
from verl_ext.evaluation.plan import BASE, SETTINGS, TRAINED
from verl_ext.parquet_files import files
from verl_ext.runs import CONFIG
from verl_ext.settings import Settings

# What decides how a run validates; an evaluation of the run asks in the same way.
_VALIDATION_KEYS = (
    "data.max_prompt_length", "data.max_response_length", "data.apply_chat_template_kwargs",
    "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.val_kwargs.top_p",
    "actor_rollout_ref.rollout.val_kwargs.temperature", "actor_rollout_ref.rollout.val_kwargs.n",
    "custom_reward_function.path", "custom_reward_function.reward_kwargs",
    "verl_ext.trajectory_timeout_s", "verl_ext.step_timeout_s", "verl_ext.stall_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        name: as the user wrote it.
        base: folder of the model without training, or of the only one.
        checkpoint: of a run, None for a model.
        overrides: keys that let it be asked as its run validates.
        data: the run's validation files that are there.
        on_cpu: whether the run was on a CPU.
    """

    name: str
    base: Path
    checkpoint: Checkpoint | None = None
    overrides: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    on_cpu: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Those that make sense for it."""
        return tuple(name for name, (model, _) in SETTINGS.items() if self.checkpoint or model == BASE)

    def facts(self, models: dict[str, str]) -> dict[str, Any]:
        """`subject` of summary.json."""
        checkpoint = self.checkpoint
        return {
            "name": self.name,
            "kind": "checkpoint" if checkpoint else "model",
            "run_id": checkpoint.run_dir.name if checkpoint else None,
            "step": checkpoint.step if checkpoint else None,
            "models": models,
        }


def find_subject(text: str, step: int | None, settings: Settings) -> Subject:
    """What a user means: a run's name or folder, a checkpoint's folder, a model's folder or its hub id.

    Args:
        text: what the user wrote.
        step: of the checkpoint; the newest that is kept if None. Of no use for a model.
        settings: where runs and models are.

    Raises:
        ConfigurationError: there is no such thing.
    """
    path = Path(text).expanduser()
    runs_folder = settings.folder("runs")
    model = find_model(settings.data_root, text)
    is_run = (path / CONFIG).is_file() or (runs_folder / text / CONFIG).is_file()
    if not is_run and not path.name.startswith("global_step_") and (model / "config.json").is_file():
        return Subject(text, model)
    checkpoint = find_checkpoint(runs_folder, text, step)
    config = checkpoint.config
    return Subject(
        text,
        Path(str(config.actor_rollout_ref.model.path)),
        checkpoint,
        tuple(_overrides(config)),
        tuple(str(file) for file in files(config.data.val_files) if file.is_file()),
        config.verl_ext.get("device") == "cpu",
    )


def _overrides(config: DictConfig) -> Iterator[str]:
    """What the run says of `_VALIDATION_KEYS`; a run of another version may say nothing of some."""
    for name, value in items(OmegaConf.to_container(config)):
        if isinstance(value, dict) or not any(name == key or name.startswith(f"{key}.") for key in _VALIDATION_KEYS):
            continue
        # A file of the checkout that the run was made from may be gone; this one's stands in.
        if not (name.endswith("path") and not Path(str(value)).is_file()):
            yield f"{name}={json.dumps(value)}"


def wanted_settings(subject: Subject, asked: Sequence[str]) -> tuple[str, ...]:
    """The settings to take, in their order; all that make sense if none is asked for.

    Raises:
        ConfigurationError: a name is none, or asks for a checkpoint that is not there.
    """
    for name in asked:
        if name not in SETTINGS:
            raise ConfigurationError(f"no setting named {name!r}: there are {', '.join(SETTINGS)}")
        if name not in subject.settings:
            raise ConfigurationError(f"{subject.name} is a model, so there is no {TRAINED!r}: name a run in its place")
    return tuple(name for name in SETTINGS if name in (asked or subject.settings))
