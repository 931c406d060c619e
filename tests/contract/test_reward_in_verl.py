"""verl's own reward managers and reward loops call our reward file: one row right, one wrong, tools or none.

Not covered: the Ray actor around the loop (the end-to-end tests run it).
"""

import asyncio
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import recipe.retool.reward

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    verl = pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    from omegaconf import OmegaConf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from verl import DataProto
    from verl.experimental.reward.reward_loop.dapo import DAPORewardLoopManager
    from verl.experimental.reward.reward_loop.naive import NaiveRewardLoopManager
    from verl.trainer.ppo.metric_utils import process_validation_metrics
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.workers.reward_manager.dapo import DAPORewardManager
    from verl.workers.reward_manager.naive import NaiveRewardManager

KEYS = ["score", "acc", "verdict", "extracted", "pred"]
WITH_TOOL = (
    "I compute.\n<tool_call>\n{}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n%s\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with Qwen's chat marks as special ones; `<tool_response>` is plain text as in Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


@pytest.fixture
def load(monkeypatch):
    """Loads our file as verl does; the module is forgotten afterwards."""
    monkeypatch.delitem(sys.modules, "custom_module", raising=False)

    def from_config(**reward_kwargs):
        config = {"path": str(Path(recipe.retool.reward.__file__)), "name": "compute_score"}
        return get_custom_reward_fn(
            OmegaConf.create({"custom_reward_function": config | {"reward_kwargs": reward_kwargs}})
        )

    yield from_config
    sys.modules.pop("custom_module", None)


def batch(tokenizer, responses: list[str], num_turns: list[int], tool_fields: list[dict] | None = None) -> DataProto:
    """Rows as an agent loop hands them to the reward: prompts left-padded, responses right-padded."""
    tokenizer.padding_side = "right"
    encoded = tokenizer(responses, return_tensors="pt", padding=True, add_special_tokens=False)
    prompts = torch.tensor([tokenizer("q").input_ids] * len(responses))
    tensors = {
        "prompts": prompts,
        "responses": encoded.input_ids,
        "attention_mask": torch.cat([torch.ones_like(prompts), encoded.attention_mask], dim=1),
    }
    rows = {
        "data_source": ["math_dapo"] * len(responses),
        "reward_model": [{"ground_truth": "33", "style": "rule"} for _ in responses],
        "extra_info": [{"index": f"id-{number}"} for number in range(len(responses))],
    }
    non_tensors = {name: np.array(values, dtype=object) for name, values in rows.items()}
    non_tensors["__num_turns__"] = np.array(num_turns, dtype=np.int32)
    if tool_fields is not None:
        non_tensors["tool_extra_fields"] = np.array(tool_fields, dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def check_plain(infos: dict) -> None:
    assert list(infos) == KEYS
    for key, value in infos.items():
        for one in value if isinstance(value, list) else [value]:
            assert type(one) is (float if key in ("score", "acc") else str)


async def run_loop(manager_class, tokenizer, compute_score, data: DataProto) -> list[dict]:
    manager = manager_class(OmegaConf.create({"reward_model": {}}), tokenizer, compute_score, "router", None)
    return [await manager.run_single(data[number : number + 1]) for number in range(len(data))]


RESPONSES = [r"So \boxed{33}.", WITH_TOOL % (r"\boxed{33}", r"\boxed{34}"), WITH_TOOL % (r"\boxed{33}", "No idea.")]
TURNS = [2, 4, 4]


def test_naive_reward_manager(tokenizer, load):
    manager = NaiveRewardManager(tokenizer, num_examine=0, compute_score=load())
    result = manager(batch(tokenizer, RESPONSES, TURNS), return_dict=True)
    check_plain(result["reward_extra_info"])
    assert result["reward_extra_info"]["acc"] == [1.0, 0.0, 0.0]
    assert result["reward_extra_info"]["verdict"] == ["equal", "different", "no_answer"]
    assert result["reward_tensor"].sum(dim=1).tolist() == pytest.approx([1.0, -0.9, -0.9])


def test_dapo_reward_manager(tokenizer, load):
    overlong = OmegaConf.create({"enable": False, "len": 1})
    manager = DAPORewardManager(tokenizer, 0, load(), max_resp_len=9, overlong_buffer_cfg=overlong)
    result = manager(batch(tokenizer, RESPONSES, TURNS), return_dict=True)
    check_plain(result["reward_extra_info"])
    assert result["reward_tensor"].sum(dim=1).tolist() == pytest.approx([1.0, -0.9, -0.9])


async def test_naive_reward_loop_with_our_tool_fields(tokenizer, load):
    fields = [
        {"final_text": r"So \boxed{33}.", "assistant_text": r"So \boxed{33}.", "num_turns": 2, "infra_failed": False},
        {"final_text": r"\boxed{34}", "assistant_text": "I compute.\n\\boxed{34}", "num_turns": 6},
        {"final_text": "No idea.", "assistant_text": "\\boxed{33}\nNo idea.", "num_turns": 4},
        {"final_text": r"\boxed{33}", "num_turns": 4, "infra_failed": True},
    ]
    results = await run_loop(
        NaiveRewardLoopManager, tokenizer, load(), batch(tokenizer, [*RESPONSES, "x"], [*TURNS, 4], fields)
    )
    assert [result["reward_score"] for result in results] == pytest.approx([1.0, -0.8, -0.9, 0.0])
    for result in results:
        check_plain(result["reward_extra_info"])
    verdicts = [result["reward_extra_info"]["verdict"] for result in results]
    assert verdicts == ["equal", "different", "no_answer", "infra_failed"]


@pytest.mark.parametrize("manager_class", [NaiveRewardLoopManager, DAPORewardLoopManager])
async def test_reward_loops_without_tool_fields(manager_class, tokenizer, load):
    results = await run_loop(manager_class, tokenizer, load(), batch(tokenizer, RESPONSES, TURNS))
    assert [result["reward_score"] for result in results] == pytest.approx([1.0, -0.9, -0.9])
    for result in results:
        check_plain(result["reward_extra_info"])


SYMBOLIC = [
    r"\boxed{\frac{\pi}{2}}",
    r"\boxed{x^2}",
    r"\boxed{\pi^2}",
    r"\boxed{\tfrac12\pi}",
    r"\boxed{\pi/2} or $3$",
]


async def test_answers_that_need_sympy_are_graded_in_the_loops_threads_as_anywhere(tokenizer, load, tmp_path):
    data = batch(tokenizer, SYMBOLIC, [2] * len(SYMBOLIC))
    for row in data.non_tensor_batch["reward_model"]:
        row["ground_truth"] = r"\frac{\pi}{2}"
    manager = NaiveRewardLoopManager(OmegaConf.create({"reward_model": {}}), tokenizer, load(), "router", None)
    # At once, as an agent loop worker does it: each in a thread of the loop's executor.
    results = await asyncio.gather(*(manager.run_single(data[number : number + 1]) for number in range(len(data))))
    in_threads = [result["reward_extra_info"]["verdict"] for result in results]
    assert in_threads == ["equal", "different", "different", "equal", "several_answers"]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps({"text": text, "answer": r"\frac{\pi}{2}"}) + "\n" for text in SYMBOLIC))
    command = [sys.executable, "-m", "recipe.retool.grade", str(answers), "--json", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(recipe.retool.reward.__file__).parents[2])
    told = json.loads((tmp_path / "out.json").read_text())
    assert [row["reason"] for row in told["graded"]] == in_threads


async def test_shaping_comes_from_the_config(tokenizer, load):
    results = await run_loop(
        NaiveRewardLoopManager, tokenizer, load(shaping="binary"), batch(tokenizer, RESPONSES, TURNS)
    )
    assert [result["reward_score"] for result in results] == [1.0, -1.0, -1.0]


def test_verls_validation_metrics_take_our_values(tokenizer, load):
    responses = [r"\boxed{33}", r"\boxed{033}", r"\boxed{34}", "no answer"]
    manager = NaiveRewardManager(tokenizer, num_examine=0, compute_score=load())
    infos = manager(batch(tokenizer, responses, [2] * 4), return_dict=True)["reward_extra_info"]
    metrics = process_validation_metrics(["aime_2024"] * 4, ["one problem"] * 4, infos)["aime_2024"]
    assert metrics["acc"]["mean@4"] == 0.5
    assert "maj@4/mean" in metrics["acc"]
    assert set(metrics) == {"score", "acc"}
