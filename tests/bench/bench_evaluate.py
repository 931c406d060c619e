"""What evaluating costs above the engine: `invoke evaluate` against plain vLLM, offline, on the same requests.

    python tests/bench/bench_evaluate.py --model M --data D [--recipe smoke] [--hardware cpu] [--n 32]

The evaluation is of the setting without tools, so that both arms do the same work: the same prompts, seeds, sampling
parameters and limits, one request a sample. Plain vLLM gets them all at once, as a list of token ids, and neither
decodes text in between nor grades, records or pads. Both are timed from a ready engine to the last sample; the
evaluation's engine is warm from nothing, vLLM's is made in a process of its own afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import on_path  # noqa: F401
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from verl_ext.runs import CONFIG, PHASES, read_jsonl
from verl_ext.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def evaluate(options: argparse.Namespace) -> Path:
    run_id = f"bench-evaluate-{uuid.uuid4().hex[:6]}"
    flags = ["--settings=no_tools", f"--data={options.data}", f"--n={options.n}", f"--run-id={run_id}"]
    command = [options.model, *flags, f"--recipe={options.recipe}", f"--hardware={options.hardware}"]
    subprocess.run([sys.executable, "-m", "recipe.retool.evaluate", *command], cwd=ROOT, check=True)
    return Settings.load().folder("runs").absolute() / run_id


def offline(folder: Path) -> None:
    """Plain vLLM for the requests of an evaluation; prints seconds, tokens, and how many answers are the same."""
    import torch

    if not torch.cuda.is_available():
        import verl_ext.cpu  # noqa: F401 - before vLLM's import

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    config = OmegaConf.load(folder / "base" / CONFIG)
    rollout = config.actor_rollout_ref.rollout
    seeds = {row["trajectory_id"]: row["seed"] for row in pq.read_table(folder / "samples.parquet").to_pylist()}
    paths = sorted((folder / "base" / "rollouts").glob("*.parquet"))
    columns = ["trajectory_id", "prompt_ids", "response_ids"]
    rows = [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]
    engine = LLM(
        config.actor_rollout_ref.model.path,
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        dtype=rollout.dtype,
    )
    sampling = [
        SamplingParams(
            temperature=rollout.val_kwargs.temperature,
            top_p=rollout.val_kwargs.top_p,
            seed=seeds[row["trajectory_id"]],
            max_tokens=rollout.response_length,
            detokenize=False,
        )
        for row in rows
    ]
    started_s = time.monotonic()
    outputs = engine.generate([TokensPrompt(prompt_token_ids=row["prompt_ids"]) for row in rows], sampling)
    seconds = time.monotonic() - started_s
    found = [list(output.outputs[0].token_ids) for output in outputs]
    same = sum(ids == row["response_ids"] for ids, row in zip(found, rows, strict=True))
    arm = {"seconds": seconds, "tokens": sum(map(len, found)), "samples": len(rows), "same": same}
    sys.stdout.write(json.dumps(arm) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="invoke evaluate against plain vLLM.")
    parser.add_argument("--model", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--offline", type=Path, help="only the second arm, on this evaluation's folder")
    options = parser.parse_args()
    if options.offline:
        offline(options.offline)
        return
    folder = evaluate(options)
    command = [sys.executable, __file__, f"--offline={folder}"]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    plain = json.loads(said.strip().splitlines()[-1])
    phases = {entry["phase"]: entry["time_s"] for entry in read_jsonl(folder / "base" / PHASES)}
    samples = pq.read_table(folder / "samples.parquet").to_pylist()
    ours = {
        "seconds": max(phases.values()) - phases["agent loop workers are ready"],
        "tokens": sum(row["model_tokens"] for row in samples),
        "samples": len(samples),
    }
    print("\n| | samples | tokens | seconds | samples / s | tokens / s |\n|---|---|---|---|---|---|")
    for name, arm in (("plain vLLM, offline", plain), ("invoke evaluate", ours)):
        each = [f"{arm[what] / arm['seconds']:,.0f}" for what in ("samples", "tokens")]
        print(f"| {name} | {arm['samples']} | {arm['tokens']:,} | {arm['seconds']:.1f} | {' | '.join(each)} |")
    rates = [arm["tokens"] / arm["seconds"] for arm in (ours, plain)]
    print(f"\ntokens per second: {rates[0] / rates[1]:.2f} of plain vLLM's; ", end="")
    print(f"{plain['same']} of {plain['samples']} answers are the same, token by token")


if __name__ == "__main__":
    main()
