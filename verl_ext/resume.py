"""A resumed run goes on with the same rows in the same order, or is refused before it starts.

verl 0.6.1 stores how far its sampler came (data.pt in each checkpoint) but not of what: with another file, seed or
batch size it goes on without a word, at a place that means nothing. Where data.pt is missing it begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext import runs
from verl_ext.checkpoint.folder import POINTER
from verl_ext.checkpoint.marker import Marker, damages
from verl_ext.data_hash import content_hash
from verl_ext.errors import ConfigurationError
from verl_ext.parquet_files import files

# What decides which rows there are and in which order they come.
_ORDER_KEYS = (
    "data.seed", "data.shuffle", "data.train_batch_size", "data.gen_batch_size", "data.train_max_samples",
    "data.filter_overlong_prompts", "data.max_prompt_length", "data.sampler.class_path", "data.dataloader_num_workers",
)  # fmt: skip


def check(config: DictConfig, verified: Path | None = None) -> None:
    """Refuse to resume from a checkpoint that is not whole, or whose data or order is not this run's.

    `verl_ext.allow_unsealed_checkpoint` takes one without a marker, as verl alone leaves them;
    `verl_ext.allow_changed_data` takes other data or another order, which then begins at the stored place in another
    sequence.

    Args:
        config: resolved.
        verified: a checkpoint whose bytes need not be read again.

    Raises:
        ConfigurationError: with every file that is damaged, or everything that differs.
    """
    checkpoint = _checkpoint(config.trainer)
    if checkpoint is None:
        return
    if checkpoint != verified and (checkpoint / "actor").is_dir():
        _refuse_damage(checkpoint, unsealed=bool(config.verl_ext.get("allow_unsealed_checkpoint", False)))
    _refuse_other_ranks(checkpoint, config.trainer)
    if config.verl_ext.get("allow_changed_data", False):
        return
    problems = list(_problems(config, checkpoint))
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigurationError(
            f"{checkpoint} cannot be resumed in the same order:{lines}\n"
            "Give the old values, start without resuming, or take the change with verl_ext.allow_changed_data=true."
        )


def _refuse_damage(checkpoint: Path, *, unsealed: bool) -> None:
    marker = Marker.read(checkpoint)
    if isinstance(marker, Marker):
        if wrong := damages(checkpoint, marker):
            raise ConfigurationError.listing(
                f"{checkpoint} is damaged; take an older one, or `invoke train --resume=RUN`, which finds it", wrong
            )
    elif not unsealed:
        raise ConfigurationError(
            f"{checkpoint} is not known to be whole ({marker}): take another one; if it was saved by verl alone and "
            "you know that it is whole, set verl_ext.allow_unsealed_checkpoint=true"
        )


def _refuse_other_ranks(checkpoint: Path, trainer: DictConfig) -> None:
    """verl 0.6.1 has a shard of each rank and opens those of its own number of ranks."""
    ranks = trainer.get("nnodes", 1) * trainer.get("n_gpus_per_node", 1)
    names = (path.name.split("_") for path in (checkpoint / "actor").glob("model_world_size_*_rank_0.pt"))
    saved_by = {int(words[3]) for words in names}
    if saved_by and ranks not in saved_by:
        raise ConfigurationError(
            f"{checkpoint} was saved by {max(saved_by)} ranks, and this run has {ranks} (trainer.nnodes x "
            "trainer.n_gpus_per_node): go on with as many, or make a model of it with `invoke export` and train that"
        )


def _checkpoint(trainer: DictConfig) -> Path | None:
    """The checkpoint that verl would go on from, as its `_load_checkpoint` finds it."""
    if trainer.resume_mode == "resume_path":
        return Path(str(trainer.get("resume_from_path"))).expanduser()
    latest = Path(str(trainer.default_local_dir)) / POINTER
    if trainer.resume_mode != "auto" or not latest.is_file():
        return None
    return latest.parent / f"global_step_{latest.read_text(encoding='utf-8').strip()}"


def _problems(config: DictConfig, checkpoint: Path) -> Iterator[str]:
    if not checkpoint.name.startswith("global_step_") or not checkpoint.is_dir():
        yield "it is no checkpoint: give trainer.resume_from_path a folder runs/RUN/checkpoints/global_step_N"
        return
    if not (checkpoint / "data.pt").is_file():
        yield "it holds no data.pt, so its place in the order is not known"
    run_dir = next((folder for folder in checkpoint.parents if (folder / runs.MANIFEST).is_file()), None)
    if run_dir is None:
        yield f"no {runs.MANIFEST} above it, so what it was trained on is not known"
        return
    try:
        old_hashes = json.loads((run_dir / runs.MANIFEST).read_text(encoding="utf-8"))["train_data"]
        old_config: Any = OmegaConf.load(run_dir / runs.CONFIG)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        yield f"what it was trained on cannot be read in {run_dir} ({error!r})"
        return
    yield from _changed_data(old_hashes, train_data(config))
    for key in _ORDER_KEYS:
        old, new = OmegaConf.select(old_config, key), OmegaConf.select(config, key)
        if old != new:
            yield f"{key} was {old} and is {new}"


def _changed_data(old: list[dict[str, str]], new: list[dict[str, str]]) -> Iterator[str]:
    if len(old) != len(new):
        yield f"it was trained on {len(old)} file(s), and data.train_files names {len(new)}"
        return
    for before, now in zip(old, new, strict=True):
        if before["content_sha256"] != now["content_sha256"]:
            yield (
                f"{now['path']} holds other rows ({now['content_sha256'][:12]}) than {before['path']} did "
                f"({before['content_sha256'][:12]})"
            )


def train_data(config: DictConfig) -> list[dict[str, str]]:
    """Path and content hash of each training file, in order: what the manifest keeps of them.

    Raises:
        DataError: a file cannot be read.
    """
    return [{"path": str(path), "content_sha256": content_hash(path)} for path in files(config.data.train_files)]
