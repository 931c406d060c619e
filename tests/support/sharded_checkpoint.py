"""Checkpoints of a tiny model as verl itself saves them on several ranks.

`python sharded_checkpoint.py OUT RANK SIZE PORT` is one of them. Each rank is a process of its own on the CPU, as in
training; FSDP2, since FSDP1 takes no CPU modules. OUT gets two runs of one step: `full`, and `lora`, whose adapter is
not zero.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

RANK, ALPHA = 4, 8


def make(out: Path, ranks: int, port: int) -> None:
    """Both runs, by `ranks` processes."""
    command = [sys.executable, __file__, str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    logs = [(out / f"rank-{rank}.log").open("w") for rank in range(ranks)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(port)], env=environment, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    ended = time.monotonic() + 240
    # One that failed is waited for by the others.
    while any(process.poll() is None for process in processes) and time.monotonic() < ended:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.2)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    for log in logs:
        log.close()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(Path(log.name).read_text() for log in logs))


def save(out: Path) -> None:
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    # Named as verl names it; its merger asks for the name.
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for name in ("full", "lora"):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=67, hidden_size=33 * 2, intermediate_size=50, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, head_dim=16, tie_word_embeddings=name == "full", max_position_embeddings=64,
                architectures=["Qwen3ForCausalLM"],
            )
        )  # fmt: skip
        if name == "lora":
            lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
            model = get_peft_model(model, lora)
            for key, value in model.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(value, std=0.3)
        fully_shard(model, mesh=mesh)
        config = {"save_contents": ["model"], "load_contents": ["model"]}
        manager = FSDPCheckpointManager(model, None, None, tokenizer(), checkpoint_config=config)
        run = out / name
        manager.save_checkpoint(str(run / "checkpoints" / "global_step_1" / "actor"), global_step=1)
        if torch.distributed.get_rank() == 0:
            describe(run, RANK if name == "lora" else 0)


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(66)} | {"<eos>": 66}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), eos_token="<eos>", unk_token="t0"
    )
    made.chat_template = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
    return made


def describe(run: Path, lora_rank: int) -> None:
    from omegaconf import OmegaConf

    from verl_ext.compose import CONFIG_DIR, compose, resolve
    from verl_ext.trajectory import SCHEMA, write_records

    values = {
        "actor_rollout_ref.model.path": "/models/Org--Base",
        "actor_rollout_ref.model.lora_rank": lora_rank,
        "actor_rollout_ref.model.lora_alpha": ALPHA,
        "verl_ext.run_id": run.name,
        "verl_ext.run_dir": run,
        "verl_ext.config_dir": CONFIG_DIR,
        "data.train_files": "/secret-place/data/train.parquet",
        "data.val_files": "/secret-place/data/val.parquet",
    }
    config = resolve(compose("retool", "cpu", [f"{key}={value}" for key, value in values.items()]))
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    manifest = {
        "versions": {"verl": "0.6.1", "torch": "2.8.0"},
        "git_revision": "abc123",
        "model": {"download": {"revision": "rev1", "files": {}}},
        "train_data": [{"path": "/secret-place/data/train.parquet", "content_sha256": "f" * 64}],
        "data": {"/secret-place/data/val.parquet": "e" * 64},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    lines = [
        {"step": step, "data": {"agent/reward_mean": reward, "val-core/aime_2024/acc/mean@30": reward / 2}}
        for step, reward in ((1, 0.5), (2, 0.9))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = dict.fromkeys(SCHEMA.names) | {"prompt_ids": [5, 9, 11], "response_ids": list(range(12, 40))}
    write_records(run, 1, False, [row])


if __name__ == "__main__":
    os.environ |= {
        "RANK": sys.argv[2],
        "WORLD_SIZE": sys.argv[3],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": sys.argv[4],
    }
    warnings.simplefilter("ignore")
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    save(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
