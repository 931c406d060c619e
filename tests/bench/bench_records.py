"""What the trajectory records cost, on disk and of a step's time: `python tests/bench/bench_records.py`.

Ids are drawn as words are (Zipf over 151,936), log-probs are random floats, the text is the shipped questions in
random order: about as hard to compress as what a model says. verl_ext/plan.py rounds the bytes a token up. The seconds
are those that a step logs as agent/record_s: reading verl's batch, writing the file, and the numbers for the logger.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import on_path  # noqa: F401
import pyarrow.parquet as pq
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    from verl.protocol import DataProto

    from verl_ext.rollout import take_records
from verl_ext.agent_loop.loop import RECORD_FIELD
from verl_ext.trajectory import CallRecord, LoopRecord, TurnRecord

SAMPLE = Path(__file__).resolve().parents[2] / "recipe" / "retool" / "samples" / "dapo_sample.parquet"
ROWS, TOKENS, PROMPT, CHARACTERS_A_TOKEN = 128, 4096, 256, 3.6  # Qwen3's tokenizer on the sample
SAMPLES = 8


def batch(words: list[str], generator: np.random.Generator, turns: int) -> tuple[DataProto, DataProto]:
    """What verl asks for, and what the agent loops gave: trajectories of some turns, a call in each but the last."""

    def text(tokens: float) -> str:
        return " ".join(random.choices(words, k=int(tokens * CHARACTERS_A_TOKEN / 4)))

    def loop_record(number: int) -> str:
        call = CallRecord("code_interpreter", text(160), "ok", text(80), 0.5)
        own = (TOKENS - (turns - 1) * 240) / turns
        made = [TurnRecord(text(own), int(own), 1.0, [call] if turn < turns - 1 else []) for turn in range(turns)]
        return LoopRecord(f"train-1-p-{number}", "answered", "", made).to_json()

    ids = torch.from_numpy(generator.zipf(1.2, (ROWS, PROMPT + TOKENS)) % 151_936)
    tensors = {
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": torch.ones(ROWS, PROMPT + TOKENS),
        "response_mask": torch.ones(ROWS, TOKENS, dtype=torch.int64), "rm_scores": torch.zeros(ROWS, TOKENS),
        "rollout_log_probs": torch.from_numpy(-generator.exponential(0.3, (ROWS, TOKENS)).astype(np.float32)),
    }  # fmt: skip
    groups = [number // SAMPLES for number in range(ROWS)]
    questions = [text(PROMPT) for _ in range(ROWS // SAMPLES)]
    output = {RECORD_FIELD: [loop_record(number) for number in range(ROWS)], "acc": [1.0] * ROWS,
              "verdict": ["equal"] * ROWS, "extracted": ["1"] * ROWS}  # fmt: skip
    asked = {"uid": groups, "data_source": ["math_dapo"] * ROWS, "reward_model": [{"ground_truth": "1"}] * ROWS,
             "extra_info": [{"index": f"p{group}"} for group in groups],
             "raw_prompt": [[{"role": "user", "content": questions[group]}] for group in groups]}  # fmt: skip
    return _proto({}, asked), _proto(tensors, output)


def _proto(tensors: dict, columns: dict) -> DataProto:
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays, meta_info={"global_steps": 1})


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    random.seed(1)
    prompts = pq.read_table(SAMPLE).column("prompt").to_pylist()
    words = [word for prompt in prompts for word in prompt[0]["content"].split()]
    tokens = ROWS * (PROMPT + TOKENS)
    print(f"{ROWS} trajectories of {PROMPT + TOKENS:,} tokens")
    for turns in (1, 3):
        asked, given = batch(words, np.random.default_rng(1), turns)
        with tempfile.TemporaryDirectory() as folder:
            started_s = time.monotonic()
            take_records(asked, given, run_dir=Path(folder), run_id="r", copies=SAMPLES)
            seconds = time.monotonic() - started_s
            size = next(Path(folder).glob("*/*.parquet")).stat().st_size
        print(f"{turns} turn(s): {size / tokens:.1f} bytes a token, {seconds / tokens * 1e6:.2f} s a million tokens")


if __name__ == "__main__":
    main()
