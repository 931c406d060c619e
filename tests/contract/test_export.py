"""Export of checkpoints that verl itself saved on two ranks, with and without an adapter.

Held against the weights as the ranks saved them, put together without the merger. vLLM's part of `--verify` needs an
engine: tests/e2e/test_smoke.py has it.
"""

from __future__ import annotations

import inspect
import re
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    from safetensors.torch import load_file, save_file
    from sharded_checkpoint import ALPHA, make
    from verl.model_merger.base_model_merger import BaseModelMerger

    from verl_ext.checkpoint.proof import compare_in_transformers, trained_weights

from verl_ext.checkpoint.kept import Checkpoint
from verl_ext.errors import ConfigurationError
from verl_ext.export import export

PROBES = [[5, 9, 11, *range(12, 40)], [1, 2, 3]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    out = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    make(out, 2, port)
    return {name: Checkpoint(out / name, 1) for name in ("full", "lora")}


@pytest.fixture(scope="module")
def exports(checkpoints: dict[str, Checkpoint]) -> dict[str, Path]:
    return {name: export(one, one.export_folder, lambda _: None) for name, one in checkpoints.items()}


def compare(checkpoint: Checkpoint, folder: Path) -> tuple[float, float]:
    _, difference, tolerance = compare_in_transformers(checkpoint, folder, PROBES)
    return difference, tolerance


def test_two_ranks_hold_different_halves(checkpoints: dict[str, Checkpoint]):
    """Else the rest shows nothing about merging."""
    first, second = (torch.load(path, weights_only=False) for path in checkpoints["full"].shards())
    name = "model.embed_tokens.weight"
    assert [part[name].to_local().shape[0] for part in (first, second)] == [34, 33]
    assert trained_weights(checkpoints["full"])[name].shape == (67, 66)


def test_verls_merger_scales_the_adapter_to_nothing():
    """When this fails, verl has an adapter's scale right: see whether verl_ext/checkpoint/lora.py can go."""
    assert '"lora_alpha": 0,' in inspect.getsource(BaseModelMerger.save_lora_adapter)


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_folder_has_the_logits_of_what_was_trained(name: str, checkpoints: dict[str, Any], exports: dict[str, Any]):
    difference, tolerance = compare(checkpoints[name], exports[name])
    assert difference <= tolerance
    assert (exports[name] / "chat_template.jinja").is_file()
    assert (exports[name] / "tokenizer.json").is_file()


def test_without_its_adapter_it_would_be_another_model(checkpoints: dict[str, Any], exports: dict[str, Any]):
    """What verl's merger alone leaves: base weights, and an adapter whose scale is 0."""
    base = Path(exports["lora"].parent / "base")
    shutil.copytree(exports["lora"], base)
    weights = trained_weights(checkpoints["lora"])
    stripped = {
        re.sub(r"^base_model\.model\.|\.base_layer", "", key): value.to(torch.bfloat16).contiguous()
        for key, value in weights.items()
        if "lora_" not in key
    }
    save_file(stripped, base / "model.safetensors", metadata={"format": "pt"})
    difference, tolerance = compare(checkpoints["lora"], base)
    assert difference > 10 * tolerance
    adapter = (exports["lora"] / "lora_adapter" / "adapter_config.json").read_text()
    assert f'"lora_alpha": {float(ALPHA)}' in adapter


def test_a_weight_that_is_a_little_off_is_found(checkpoints: dict[str, Any], exports: dict[str, Any], tmp_path: Path):
    shutil.copytree(exports["full"], tmp_path / "off")
    weights = load_file(tmp_path / "off" / "model.safetensors")
    weights["model.norm.weight"] *= 1.2
    save_file(weights, tmp_path / "off" / "model.safetensors", metadata={"format": "pt"})
    difference, tolerance = compare(checkpoints["full"], tmp_path / "off")
    assert difference > tolerance


def test_the_card_says_what_the_run_left_and_names_no_path(exports: dict[str, Path]):
    card = (exports["full"] / "README.md").read_text()
    assert card.startswith("---\nbase_model: Org/Base\n")
    assert "Org/Base at rev1 after 1 steps" in card
    assert f"| train.parquet | training | {'f' * 64} (of its rows) |" in card
    assert f"| val.parquet | validation | {'e' * 64} (of its bytes) |" in card
    assert "| `actor_rollout_ref.actor.clip_ratio_high` | 0.28 |" in card
    assert "| reward | 0.5 | 0.5 |" in card  # what was logged behind the checkpoint is not its own
    assert "| aime_2024/acc/mean@30 | 1 | 0.25 |" in card
    assert '"name": "code_interpreter"' in card
    assert "| verl-ags | abc123 |" in card
    assert re.search(r"\| model\.safetensors \| \d+ \| [0-9a-f]{64} \|", card)
    assert not re.search(r"/secret-place|/tmp/", card)


def test_a_missing_shard_is_refused_by_name_and_nothing_is_left(checkpoints: dict[str, Checkpoint], tmp_path: Path):
    shutil.copytree(checkpoints["full"].run_dir, tmp_path / "run")
    broken = Checkpoint(tmp_path / "run", 1)
    broken.shards()[1].unlink()
    with pytest.raises(ConfigurationError, match=r"model_world_size_2_rank_1\.pt is missing"):
        export(broken, tmp_path / "out", lambda _: None)
    assert not list(tmp_path.glob("*out*"))
