"""The trainer's half of a step alone, without an engine: old log-probs and update, one variant after another.

    python tests/bench/gpu/trainer_phases.py compare --model M [--only NAME ...]     a table, one process a variant
    python tests/bench/gpu/trainer_phases.py one --model M [KEY=VALUE ...]           one line of JSON
    ... one --kernels N                                                              and where the GPU's time goes

verl's own worker with the recipe's configuration, on rows like those of run.py: 128 of 255 + 1,024 tokens at random, so
that each variant has the same tokens and the same loss to show. The first of three rounds is not counted. Needs about
40 s a variant with 4 B parameters; without a GPU it runs with a tiny model (`--hardware cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
STOCK = [f"{MODEL}.use_liger=false"]
NO_OFFLOAD = [f"{ACTOR}.fsdp_config.param_offload=false", f"{ACTOR}.fsdp_config.optimizer_offload=false"]
FUSED = [*STOCK, f"{MODEL}.use_fused_kernels=true"]
NO_CHECKPOINTING = [f"{MODEL}.enable_gradient_checkpointing=false", f"{ACTOR}.ppo_max_token_len_per_gpu=6144"]
FUSED_ADAM = [f"{ACTOR}.optim.override_optimizer_config={{fused: true}}"]
LIGER = [*NO_OFFLOAD, f"{MODEL}.use_liger=true"]
VARIANTS: dict[str, list[str]] = {
    "tutorial": [f"{ACTOR}.strategy=fsdp", *STOCK],
    "no offload": [*NO_OFFLOAD, *STOCK],
    "liger": LIGER,
    "liger, 36,864 tokens": [*LIGER, f"{ACTOR}.ppo_max_token_len_per_gpu=36864"],
    "liger, fused Adam": [*LIGER, *FUSED_ADAM],
    "liger, fused Adam, 49,152 tokens": [*LIGER, *FUSED_ADAM, f"{ACTOR}.ppo_max_token_len_per_gpu=49152"],
    "liger, fused Adam, no checkpointing, 10,240 tokens": [
        *LIGER, *FUSED_ADAM, f"{MODEL}.enable_gradient_checkpointing=false",
        f"{ACTOR}.ppo_max_token_len_per_gpu=10240",
    ],
    "liger, no reshard": [*LIGER, f"{ACTOR}.fsdp_config.reshard_after_forward=false"],
    "liger, no checkpointing": [
        *LIGER, f"{MODEL}.enable_gradient_checkpointing=false", f"{ACTOR}.ppo_max_token_len_per_gpu=9216",
    ],
    "fused, triton": [*NO_OFFLOAD, *FUSED, f"{MODEL}.fused_kernel_options.impl_backend=triton"],
    "fused, torch": [*NO_OFFLOAD, *FUSED, f"{MODEL}.fused_kernel_options.impl_backend=torch"],
    "no checkpointing": [*NO_OFFLOAD, *NO_CHECKPOINTING, *STOCK],
    "no checkpointing, fused": [
        *NO_OFFLOAD, *NO_CHECKPOINTING, *FUSED, f"{MODEL}.fused_kernel_options.impl_backend=triton",
    ],
    "no reshard": [*NO_OFFLOAD, *STOCK, f"{ACTOR}.fsdp_config.reshard_after_forward=false"],
}  # fmt: skip


def one(arguments: argparse.Namespace) -> None:
    """Build verl's worker in this process, run three rounds, print their figures."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    if arguments.hardware == "cpu":
        import verl_ext.cpu  # noqa: F401
    import torch
    from verl.protocol import DataProto
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    from verl_ext.compose import CONFIG_DIR, compose, resolve

    overrides = [
        "verl_ext.run_id=bench", "verl_ext.run_dir=/tmp/bench", f"verl_ext.config_dir={CONFIG_DIR}",
        f"{MODEL}.path={arguments.model}", f"{ACTOR}.ppo_mini_batch_size={arguments.rows // 4}",
        "actor_rollout_ref.rollout.n=1", *arguments.overrides,
    ]  # fmt: skip
    config = resolve(compose("retool", arguments.hardware, overrides))
    worker: Any = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    vocabulary = worker.actor_model_config.vocab_size
    rounds = []
    for number in range(3):
        batch = rows(arguments.rows, arguments.prompt_tokens, arguments.response_tokens, vocabulary)
        data = DataProto.from_dict(tensors=batch)
        data.meta_info = {"temperature": 1.0, "global_token_num": batch["attention_mask"].sum(-1).tolist()}
        started_s = time.perf_counter()
        answer = worker.compute_log_prob(data)
        log_prob_s = time.perf_counter() - started_s
        data.batch["old_log_probs"] = answer.batch["old_log_probs"]
        data.meta_info["temperature"] = 1.0
        started_s = time.perf_counter()
        if arguments.kernels and number == 2:
            metrics = _profiled(worker, data, arguments.kernels)
        else:
            metrics = worker.update_actor(data).meta_info["metrics"]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rounds.append({
            "log_prob_s": log_prob_s, "update_s": time.perf_counter() - started_s,
            "entropy": float(answer.batch["entropys"].mean()), "log_prob": float(answer.batch["old_log_probs"].mean()),
            "pg_loss": _first(metrics["actor/pg_loss"]), "grad_norm": _first(metrics["actor/grad_norm"]),
        })  # fmt: skip
    highest_gib = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    medians = {name: statistics.median(r[name] for r in rounds[1:]) for name in ("log_prob_s", "update_s")}
    first = {name: rounds[0][name] for name in ("entropy", "log_prob", "pg_loss", "grad_norm")}
    print(json.dumps({**medians, "reserved_gib": highest_gib, **first}))


def rows(count: int, prompt_tokens: int, response_tokens: int, vocabulary: int) -> dict[str, Any]:
    """A batch as a rollout leaves it, the same tokens each time: left-padded prompts, full responses."""
    import torch

    generator = torch.Generator().manual_seed(1)
    width = 2 * prompt_tokens
    ids = torch.randint(10, vocabulary - 10, (count, width + response_tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, : width - prompt_tokens] = 0
    advantages = torch.randn(count, 1, generator=generator).expand(count, response_tokens).contiguous()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, width:].contiguous(),
        "response_mask": torch.ones(count, response_tokens, dtype=torch.long),
        "advantages": advantages,
    }


def _profiled(worker: Any, data: Any, kernels: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        metrics = worker.update_actor(data).meta_info["metrics"]
    table = found.key_averages().table(sort_by="self_device_time_total", row_limit=kernels, max_name_column_width=80)
    print(table, file=sys.stderr)
    return metrics


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def compare(arguments: argparse.Namespace) -> int:
    """Each variant in a process of its own; a variant that fails has its last line in the table."""
    names = arguments.only or list(VARIANTS)
    print("| variant | old log-probs, s | update, s | reserved, GiB | entropy | log-prob | first loss | grad norm |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    status = 0
    for name in names:
        command = [sys.executable, str(HERE / "trainer_phases.py"), "one", "--model", arguments.model]
        command += ["--hardware", arguments.hardware, "--rows", str(arguments.rows)]
        command += ["--prompt-tokens", str(arguments.prompt_tokens)]
        command += ["--response-tokens", str(arguments.response_tokens), *VARIANTS[name]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            status = 1
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            print(f"| {name} | {last[:100]} | | | | | | |", flush=True)
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        figures = [f"{found[key]:.2f}" for key in ("log_prob_s", "update_s", "reserved_gib")]
        figures += [f"{found[key]:.6g}" for key in ("entropy", "log_prob", "pg_loss", "grad_norm")]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, action in (("one", one), ("compare", compare)):
        command = commands.add_parser(name)
        command.add_argument("--model", required=True)
        command.add_argument("--hardware", default="h200x1")
        command.add_argument("--rows", type=int, default=128)
        command.add_argument("--prompt-tokens", type=int, default=255)
        command.add_argument("--response-tokens", type=int, default=1024)
        command.set_defaults(action=action)
        if name == "one":
            command.add_argument("--kernels", type=int, default=0)
            command.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
        else:
            command.add_argument("--only", nargs="+", choices=sorted(VARIANTS))
    arguments = parser.parse_args()
    return arguments.action(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
