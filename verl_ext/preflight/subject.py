"""What the checks look at: the configuration, the settings, and what they point to, each read once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigurationError
from verl_ext.gpus import Gpu, visible_gpus
from verl_ext.model_shape import ModelShape, read_shape
from verl_ext.parquet_files import Footer, files, footer
from verl_ext.plan import Plan, make_plan
from verl_ext.settings import Settings, sandboxes_alive


class Subject:
    """A run that is about to start.

    Attributes:
        config: resolved; a value that is missing is None.
        settings: from the environment.
    """

    def __init__(self, config: DictConfig, settings: Settings) -> None:
        self.config = config
        self.settings = settings

    def get(self, key: str) -> Any:
        """The value of a key, None if there is none, also where what should be a group is a value."""
        try:
            return OmegaConf.select(self.config, key)
        except OmegaConfBaseException:
            return None

    @property
    def on_gpu(self) -> bool:
        """Whether the run wants GPUs."""
        return self.get("verl_ext.device") != "cpu"

    @property
    def gpus_wanted(self) -> int:
        """On this node."""
        return self.config.trainer.n_gpus_per_node

    @cached_property
    def model(self) -> Path:
        """The model's folder."""
        return Path(str(self.get("actor_rollout_ref.model.path"))).expanduser()

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model's sizes, None if it has none that can be read."""
        try:
            return read_shape(self.model)
        except ConfigurationError:
            return None

    @cached_property
    def footers(self) -> dict[str, dict[Path, Footer | None]]:
        """Of `train_files` and `val_files`, the footer of each file."""
        return {name: {path: footer(path) for path in files(self.get(f"data.{name}"))} for name in DATA}

    @cached_property
    def tool(self) -> dict[str, Any]:
        """The first entry of verl's tool file, {} without tools.

        Raises:
            ConfigurationError: the file is none of verl's.
        """
        path = self.get("actor_rollout_ref.rollout.multi_turn.tool_config_path")
        if not path:
            return {}
        try:
            entry = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["tools"][0]
            if not isinstance(entry["config"], dict) or not isinstance(entry["tool_schema"], dict):
                raise TypeError("config and tool_schema must be mappings")
        except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError) as error:
            raise ConfigurationError(f"{path} is no tool file of verl's ({error}): see {TOOL_EXAMPLE}") from error
        return entry

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The GPUs of this machine that the run would see."""
        return visible_gpus() if self.on_gpu else []

    @property
    def card_gib(self) -> float | None:
        """Memory of one GPU: what the hardware file says, or less if this machine's have less."""
        said = self.get("verl_ext.gpu_memory_gib")
        known = [float(said)] if said else []
        return min(known + [gpu.memory_gib for gpu in self.gpus], default=None) if self.on_gpu else None

    @cached_property
    def plan(self) -> Plan:
        """The run in numbers; only of a configuration without wrong sizes."""
        return make_plan(
            self.config, self.shape, sandboxes_alive=sandboxes_alive(self.settings), card_gib=self.card_gib
        )


DATA = ("train_files", "val_files")
TOOL_EXAMPLE = "recipe/retool/config/tool/code_interpreter.yaml"
