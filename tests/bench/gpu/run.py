"""The recipe's model shape on one GPU, the tutorial's settings against ours, the same work in every arm.

    python tests/bench/gpu/run.py model OUT --tokenizer FOLDER     Qwen3-4B's shape with random weights (8 GB)
    python tests/bench/gpu/run.py arm NAME --model M --train T --val V [--steps 4] [--tool-calls 4] [--set KEY=VALUE]
    python tests/bench/gpu/run.py offline --model M --train T      vLLM alone, the same requests
    python tests/bench/gpu/run.py table RUN [RUN ...]              what the arms logged, side by side

Every response has the same number of tokens (forced_length.py) and a reward by its hash (text_hash_reward.py), so
a step is the same work in every arm. The first step is warm-up and is not counted.

On two GPUs, with the same work for each: `arm ours --hardware h200x2 --prompts 32`, for two engines, and with
`--set actor_rollout_ref.rollout.tensor_model_parallel_size=2` for one over both. perf/throughput is of each GPU, so
that of two over that of one is the scaling.
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
PROMPTS, COPIES, MINI_BATCH = 16, 8, 4
PROMPT_TOKENS = 2048
ROOM_FOR_AN_OBSERVATION = 64  # tokens
# Shape: config.json of Qwen/Qwen3-4B-Instruct-2507.
SHAPE = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 5_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
# What an arm changes in hardware h200x1 and the recipe; `tutorial` is what h20x4 says, as far as it starts on one GPU,
# `ours` what recipe/retool/README.md says for responses of a thousand tokens.
ARMS: dict[str, list[str]] = {
    "tutorial": [
        "verl_ext.async_scheduling=false",
        "actor_rollout_ref.model.use_liger=false",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=73728",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "actor_rollout_ref.rollout.agent.num_workers=8",
    ],
    "ours": [
        "actor_rollout_ref.actor.fsdp_config.param_offload=false",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240",
        "actor_rollout_ref.actor.optim.override_optimizer_config={fused: true}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
        "actor_rollout_ref.rollout.agent.num_workers=2",
    ],
}
FIGURES = (
    "timing_s/step",
    "timing_s/gen",
    "agent/wake_up_s",
    "timing_s/agent_loop/generate_sequences/max",
    "timing_s/agent_loop/tool_calls/mean",
    "agent/sleep_s",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/adv",
    "timing_s/update_actor",
    "perf/throughput",
    "perf/total_num_tokens",
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
    "actor/pg_loss",
    "actor/entropy",
    "actor/grad_norm",
    "training/rollout_probs_diff_mean",
)


def model(arguments: argparse.Namespace) -> None:
    """Make the model on the GPU, where 4 billion random numbers take a second."""
    import shutil

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    with torch.device("cuda"):
        config = Qwen3Config(**SHAPE, dtype="bfloat16", eos_token_id=151645, pad_token_id=151643, bos_token_id=None)
        torch.set_default_dtype(torch.bfloat16)
        made = Qwen3ForCausalLM(config)
    made.save_pretrained(arguments.out)
    for path in Path(arguments.tokenizer).iterdir():
        shutil.copy2(path, arguments.out)
    print(f"{sum(weight.numel() for weight in made.parameters()) / 1e9:.2f} billion parameters in {arguments.out}")


def arm(arguments: argparse.Namespace) -> int:
    """Run one arm through the project's own launcher."""
    steps, tokens = arguments.steps, arguments.tokens
    overrides = [
        f"data.train_batch_size={arguments.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={tokens + ROOM_FOR_AN_OBSERVATION * arguments.tool_calls}",
        f"actor_rollout_ref.rollout.n={COPIES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH * arguments.prompts // PROMPTS}",
        f"custom_reward_function.path={HERE / 'text_hash_reward.py'}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={steps}",
        *ARMS[arguments.name],
        *arguments.set,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "VERL_USE_EXTERNAL_MODULES": "forced_length",
        "BENCH_RESPONSE_TOKENS": str(tokens),
        "BENCH_STOCK": "1" if arguments.name == "tutorial" else "0",
        "BENCH_TOOL_CALLS": str(arguments.tool_calls),
    }
    if arguments.tool_calls:
        # A sandbox for each of the batch, as an account of that size gives: the quota is measured elsewhere.
        alive = str(arguments.prompts)
        environment |= {"VERL_EXT_SANDBOX_MODE": "context", "VERL_EXT_SANDBOX_MAX_ALIVE": alive,
                        "VERL_EXT_SANDBOX_MAX_STARTING": alive, "VERL_EXT_SANDBOX_CREATE_RATE_PER_S": "100",
                        "VERL_EXT_SANDBOX_CONTEXTS": str(COPIES)}  # fmt: skip
    command = [sys.executable, "-m", "verl_ext.launch", "--recipe", "retool", "--hardware", arguments.hardware]
    command += ["--model", arguments.model, "--train", arguments.train, "--val", arguments.val]
    command += ["--run-id", arguments.run_id or arguments.name, *overrides]
    return subprocess.run(command, check=False, env=environment).returncode


def offline(arguments: argparse.Namespace) -> None:
    """vLLM's offline engine with the requests of one step: the ceiling of the generation phase."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    sys.path.insert(0, str(ROOT))
    from recipe.smoke.run import tool_schemas

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = pq.read_table(arguments.train, columns=["prompt"]).slice(0, PROMPTS).to_pylist()
    prompts = [
        TokensPrompt(
            prompt_token_ids=tokenizer.apply_chat_template(
                row["prompt"], tools=tool_schemas(), add_generation_prompt=True
            )
        )
        for row in rows
        for _ in range(COPIES)
    ]
    engine = LLM(
        arguments.model,
        max_model_len=PROMPT_TOKENS + arguments.tokens,
        gpu_memory_utilization=arguments.utilization,
        max_num_seqs=1024,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    asked = SamplingParams(temperature=1.0, max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, detokenize=False)
    seconds = []
    for _ in range(4):
        engine.reset_prefix_cache()
        started_s = time.perf_counter()
        outputs = engine.generate(prompts, asked, use_tqdm=False)
        seconds.append(time.perf_counter() - started_s)
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    text = ", ".join(f"{one:.2f}" for one in seconds)
    middle = statistics.median(seconds[1:])
    print(f"offline: {made} tokens, {text} s; median of the last three {middle:.2f} s, {made / middle:.0f} tokens/s")


def table(arguments: argparse.Namespace) -> None:
    """Medians over the steps after the first."""
    runs = {Path(one).name: _steps(Path(one)) for one in arguments.runs}
    print("| figure | " + " | ".join(runs) + " |\n|---|" + "---:|" * len(runs))
    for figure in FIGURES:
        cells = [
            _median([step[figure] for step in steps[1:] if step.get(figure) is not None]) for steps in runs.values()
        ]
        print(f"| {figure} | " + " | ".join(cells) + " |")
    for figure in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        print(f"| {figure}, first step | " + " | ".join(f"{steps[0].get(figure)}" for steps in runs.values()) + " |")
    print("| steps counted | " + " | ".join(str(len(steps) - 1) for steps in runs.values()) + " |")


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"] for line in lines if "timing_s/gen" in line]


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.5g}" if values else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("model")
    one.add_argument("out")
    one.add_argument("--tokenizer", required=True)
    one.set_defaults(action=model)

    one = commands.add_parser("arm")
    one.add_argument("name", choices=sorted(ARMS))
    one.add_argument("--hardware", default="h200x1")
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--tokens", type=int, default=1024)
    one.add_argument("--prompts", type=int, default=PROMPTS, help="of a step, 8 trajectories each; 16 for each GPU")
    one.add_argument("--run-id", default="")
    one.add_argument("--tool-calls", type=int, default=0, help="of 0.2 s each, in every trajectory")
    one.add_argument("--set", action="append", default=[])
    for name in ("--model", "--train", "--val"):
        one.add_argument(name, required=True)
    one.set_defaults(action=arm)

    one = commands.add_parser("offline")
    one.add_argument("--model", required=True)
    one.add_argument("--train", required=True)
    one.add_argument("--tokens", type=int, default=1024)
    one.add_argument("--utilization", type=float, default=0.8)
    one.set_defaults(action=offline)

    one = commands.add_parser("table")
    one.add_argument("runs", nargs="+")
    one.set_defaults(action=table)

    arguments = parser.parse_args()
    return arguments.action(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
