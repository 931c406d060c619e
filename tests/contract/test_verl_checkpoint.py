"""verl's own saving and loading, with our folder around it: real shards of a real model, one rank."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from verl_ext.checkpoint import ranks
    from verl_ext.checkpoint.folder import POINTER, CheckpointFolder
    from verl_ext.checkpoint.marker import Marker
    from verl_ext.errors import CheckpointError
    from verl_ext.trainer import AgsTrainer

SHARDS = {f"actor/{kind}_world_size_1_rank_0.pt" for kind in ("model", "optim", "extra_state")}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Workers:
    """verl's worker group of one rank, in this process."""

    def __init__(self) -> None:
        shape = Qwen2Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        self.model = Qwen2ForCausalLM(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.workers = [None]
        self._manager = FSDPCheckpointManager(self.model, self.optimizer, checkpoint_config=OmegaConf.create({}))

    def learn(self) -> None:
        self.model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        self.optimizer.step()

    def save_checkpoint(self, folder: str, hdfs: None, step: int, max_ckpt_to_keep: int | None) -> None:
        self._manager.save_checkpoint(folder, hdfs, step, max_ckpt_to_keep)

    def load_checkpoint(self, folder: str, del_local_after_load: bool = False) -> None:
        self._manager.load_checkpoint(folder, None, del_local_after_load)


@pytest.fixture
def make_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What verl's saving and loading need of its trainer."""

    def of_each_rank(trainer: Any, function: Callable[..., Any], path: str) -> list[Any]:
        return [function(worker, path, rank) for rank, worker in enumerate(trainer.actor_rollout_wg.workers)]

    monkeypatch.setattr(ranks, "_of_each_rank", of_each_rank)
    monkeypatch.setattr(ranks, "_expected_bytes", lambda config, folder: None)

    def make(**trainer: Any) -> Any:
        values = {
            "default_local_dir": str(tmp_path), "default_hdfs_dir": None, "max_actor_ckpt_to_keep": 2,
            "max_critic_ckpt_to_keep": None, "resume_mode": "disable", "resume_from_path": None, "nnodes": 1,
            "del_local_ckpt_after_load": False, "save_freq": 1, **trainer,
        }  # fmt: skip
        config = OmegaConf.create({"trainer": values})
        OmegaConf.set_struct(config, True)
        loader = StatefulDataLoader(list(range(20)), batch_size=2)
        return SimpleNamespace(
            config=config, global_steps=0, use_critic=False, actor_rollout_wg=Workers(), train_dataloader=loader
        )

    return make


def train_and_save(trainer: Any, steps: range) -> None:
    batches = iter(trainer.train_dataloader)
    for step in steps:
        next(batches)
        trainer.actor_rollout_wg.learn()
        trainer.global_steps = step
        ranks.save_whole(trainer, lambda: RayPPOTrainer._save_checkpoint(trainer))


def test_verl_saves_out_of_sight_and_the_newest_two_are_kept_whole(make_trainer, tmp_path):
    trainer = make_trainer()
    before = OmegaConf.to_container(trainer.config)
    train_and_save(trainer, range(1, 5))
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_3", "global_step_4", POINTER}
    found = CheckpointFolder(tmp_path).find()
    assert found.folder == tmp_path / "global_step_4"
    assert found.marker is not None
    assert {file.name for file in found.marker.files} >= {*SHARDS, "actor/huggingface/config.json", "data.pt"}
    assert OmegaConf.to_container(trainer.config) == before
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_4")


def test_verl_goes_on_from_it_with_weights_moments_and_the_next_batch(make_trainer, tmp_path):
    trainer = make_trainer()
    train_and_save(trainer, range(1, 4))
    again = make_trainer(resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_3"))
    RayPPOTrainer._load_checkpoint(again)
    assert again.global_steps == 3
    for name, tensor in trainer.actor_rollout_wg.model.state_dict().items():
        assert torch.equal(tensor, again.actor_rollout_wg.model.state_dict()[name]), name
    moments = again.actor_rollout_wg.optimizer.state_dict()["state"][0]
    assert torch.equal(moments["exp_avg"], trainer.actor_rollout_wg.optimizer.state_dict()["state"][0]["exp_avg"])
    assert next(iter(again.train_dataloader)).tolist() == [6, 7]


def test_a_save_that_fails_in_verl_leaves_the_older_one(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer()
    train_and_save(trainer, range(1, 2))
    real = torch.save

    def save(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        real(content, path, *args, **kwargs)
        if "optim" in str(path):
            os.truncate(path, 10)
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: No space left on device")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match=r"the disk is full: the checkpoint of step 2 .*step 1 is whole"):
        train_and_save(trainer, range(2, 3))
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", POINTER}
    assert (tmp_path / POINTER).read_text() == "1"
    assert trainer.config.trainer.default_local_dir == str(tmp_path)


def test_nodes_that_see_another_folder_are_told_before_the_first_step(make_trainer, monkeypatch):
    monkeypatch.setattr(ranks, "_of_each_rank", lambda *_: [("node-a (rank 0)", True), ("node-b (rank 1)", False)])
    with pytest.raises(CheckpointError, match=r"not to be seen on node-b \(rank 1\): each node would keep its own"):
        ranks.check_shared(make_trainer(nnodes=2))
    ranks.check_shared(make_trainer(nnodes=1))
    ranks.check_shared(make_trainer(nnodes=2, save_freq=-1))


def test_a_node_sees_what_is_there_and_not_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_SEEN_WITHIN_S", 0.1)
    assert ranks._look(None, str(tmp_path / "no"), 1)[1] is False
    (tmp_path / "yes").touch()
    assert ranks._look(None, str(tmp_path / "yes"), 1)[1] is True


def test_verls_own_half_checkpoint_looks_like_any_other(make_trainer, tmp_path):
    # The fault: verl takes a checkpoint by its folder alone. Fails when it looks at the files.
    trainer = make_trainer()
    trainer.global_steps = 1
    RayPPOTrainer._save_checkpoint(trainer)
    (tmp_path / "global_step_1" / "actor" / "optim_world_size_1_rank_0.pt").unlink()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_1")
    assert isinstance(Marker.read(tmp_path / "global_step_1"), str)
    assert CheckpointFolder(tmp_path).find().folder is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (RayPPOTrainer.fit, "self._save_checkpoint()"),
        (RayPPOTrainer.fit, "self._load_checkpoint()"),
        (RayPPOTrainer._save_checkpoint, "self.config.trainer.default_local_dir"),
        (RayPPOTrainer._save_checkpoint, 'self.config.trainer.get("max_actor_ckpt_to_keep", None)'),
        (FSDPCheckpointManager.save_checkpoint, 'f"model_world_size_{self.world_size}_rank_{self.rank}.pt"'),
    ],
)
def test_verl_saves_by_the_names_that_we_go_by(source: Any, words: str):
    assert words in inspect.getsource(source)


def test_the_trainer_saves_and_loads_through_us():
    for name in ("_save_checkpoint", "_load_checkpoint"):
        ours, theirs = getattr(AgsTrainer, name), getattr(RayPPOTrainer, name)
        assert ours is not theirs
        assert inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
