"""Bytes that one recorded token takes on disk: `python tests/bench/bench_records.py`.

Ids are drawn as words are (Zipf over 151,936), log-probs are random floats, the text is the shipped questions in
random order: about as hard to compress as what a model says. verl_ext/plan.py rounds the figure up.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from verl_ext.trajectory import write_records

SAMPLE = Path(__file__).resolve().parents[2] / "recipe" / "retool" / "samples" / "dapo_sample.parquet"
ROWS, TOKENS, PROMPT, CHARACTERS_A_TOKEN = 64, 4096, 256, 3.6  # Qwen3's tokenizer on the sample


def record(words: list[str], generator: np.random.Generator) -> dict:
    ids = (generator.zipf(1.2, PROMPT + TOKENS) % 151_936).tolist()
    text = " ".join(random.choices(words, k=int(TOKENS * CHARACTERS_A_TOKEN / 4)))
    turn = {"text": text, "tokens": TOKENS, "generate_s": 1.0, "calls": []}
    return {
        "run_id": "r", "problem_id": "p", "data_source": "math_dapo", "group": "g", "trajectory_id": "t",
        "ground_truth": "1", "prompt": [{"role": "user", "content": text[: int(PROMPT * CHARACTERS_A_TOKEN)]}],
        "prompt_ids": ids[:PROMPT], "response_ids": ids[PROMPT:],
        "response_mask": [1] * TOKENS, "rollout_log_probs": (-generator.exponential(0.3, TOKENS)).tolist(),
        "turns": [turn], "final_text": text, "reward": 1.0, "accuracy": 1.0, "verdict": "right", "extracted": "1",
        "stop_reason": "answered", "infra_failed": False, "infra_error": "",
    }  # fmt: skip


def main() -> None:
    random.seed(1)
    prompts = pq.read_table(SAMPLE).column("prompt").to_pylist()
    words = [word for prompt in prompts for word in prompt[0]["content"].split()]
    generator = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_records(Path(folder), 1, False, [record(words, generator) for _ in range(ROWS)])
        size = path.stat().st_size
    print(f"{size / ROWS / (PROMPT + TOKENS):.1f} bytes a token ({ROWS} trajectories of {PROMPT + TOKENS} tokens)")


if __name__ == "__main__":
    main()
