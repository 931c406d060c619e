"""verl's saving and loading with every rank asked: its own shards sealed on its node, one folder seen by all."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict

from verl_ext.checkpoint.folder import CheckpointFolder
from verl_ext.checkpoint.marker import SealedFile, seal_shards
from verl_ext.checkpoint.saving import SHARE, Saved, save
from verl_ext.errors import CheckpointError, ConfigurationError
from verl_ext.gpu_memory import checkpoint_gib
from verl_ext.model_shape import read_shape

# A shared file system may show a new file to another node a little later.
_SEEN_WITHIN_S = 15.0


def save_whole(trainer: Any, verls_save: Callable[[], None]) -> Saved:
    """Save the checkpoint of the trainer's step, whole or not at all.

    Args:
        trainer: verl's RayPPOTrainer.
        verls_save: its own `_save_checkpoint`, which takes folder and rotation from the configuration.

    Raises:
        CheckpointError: see `save`.
    """
    config, step = trainer.config, int(trainer.global_steps)
    folder = CheckpointFolder(Path(config.trainer.default_local_dir).absolute())

    def write(root: Path) -> None:
        with _in_place_of(config.trainer, root):
            verls_save()

    return save(
        step,
        folder,
        write=write,
        seal_ranks=lambda scratch: _of_each_rank(trainer, _seal, str(scratch)),
        keep=config.trainer.max_actor_ckpt_to_keep,
        expected_bytes=_expected_bytes(config, folder),
    )


@contextlib.contextmanager
def _in_place_of(trainer: DictConfig, root: Path) -> Iterator[None]:
    """verl saves below `root` and removes nothing: its own rotation deletes the old one before it writes the new."""
    change = {"default_local_dir": str(root), "max_actor_ckpt_to_keep": None, "max_critic_ckpt_to_keep": None}
    before = {name: trainer.get(name) for name in change}
    with open_dict(trainer):
        trainer.update(change)
        try:
            yield
        finally:
            trainer.update(before)


def _expected_bytes(config: DictConfig, folder: CheckpointFolder) -> int | None:
    """What the last one had, else what arithmetic says; None if the model's shape is not known."""
    if whole := folder.newest_whole():
        return whole[1].bytes
    try:
        shape = read_shape(Path(config.actor_rollout_ref.model.path))
    except ConfigurationError:
        return None
    return int(checkpoint_gib(config, shape) * 2**30) if shape.parameters else None


def check_shared(trainer: Any) -> None:
    """Refuse to train for hours towards checkpoints that lie in pieces on several machines.

    Raises:
        CheckpointError: some node does not see the folder of checkpoints that this one sees.
    """
    config = trainer.config.trainer
    if config.save_freq <= 0 or config.nnodes == 1:
        return
    root = Path(config.default_local_dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    probe = root / f".seen-by-all-{uuid.uuid4().hex}"
    probe.touch()
    try:
        blind = {node for node, sees in _of_each_rank(trainer, _look, str(probe)) if not sees}
    finally:
        probe.unlink()
    if blind:
        raise CheckpointError(
            f"{root} on {socket.gethostname()}, where checkpoints are made whole, is not to be seen on "
            f"{', '.join(sorted(blind))}: each node would keep its own shards. {SHARE}"
        )


def _of_each_rank(trainer: Any, function: Callable[..., Any], path: str) -> list[Any]:
    """`function(worker, path, rank)` in the process of each rank, in their order."""
    workers = trainer.actor_rollout_wg.workers
    return ray.get([worker.__ray_call__.remote(function, path, rank) for rank, worker in enumerate(workers)])


def _seal(_: Any, scratch: str, rank: int) -> list[SealedFile]:
    return seal_shards(Path(scratch), rank)


def _look(_: Any, path: str, rank: int) -> tuple[str, bool]:
    deadline_s = time.monotonic() + _SEEN_WITHIN_S
    while not (sees := Path(path).is_file()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return f"{socket.gethostname()} (rank {rank})", sees
