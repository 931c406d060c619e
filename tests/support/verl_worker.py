"""verl's agent loop worker without Ray and without an engine, for contract tests and benchmarks.

Everything between `generate_sequences` and the sandbox is the real thing: verl's worker, our loop and tool, the pool.
"""

from __future__ import annotations

import asyncio
import json
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    import torch
    from verl.experimental.reward import RewardManagerWorker
    from verl.protocol import DataProto
    from verl.workers.rollout.replica import TokenOutput

    from verl_ext.agent_loop.worker import SandboxedAgentLoopWorker, _Colocated

from verl_ext.compose import CONFIG_DIR, compose, resolve
from verl_ext.sandbox.pool import SessionPool

QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
ANSWER = r"The answer is \boxed{42}."
PROMPT, RESPONSE = 1536, 1024
EOS = "<|im_end|>"


def call(code: str, name: str = "code_interpreter") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


class ScriptedEngine:
    """Stands for verl's server manager: each trajectory gets its turns in order; -0.5 is every log-prob.

    A turn is text (ended by the eos token), or ids as they are.
    """

    def __init__(self, tokenizer: Any, scripts: Sequence[Sequence[str | list[int]]]) -> None:
        self.tokenizer = tokenizer
        self.scripts = [list(script) for script in scripts]
        self.prompts: list[list[int]] = []
        self._script_of: dict[str, list[str | list[int]]] = {}

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, **_: Any) -> TokenOutput:
        await asyncio.sleep(0)
        script = self._script_of.setdefault(request_id, self.scripts[len(self._script_of) % len(self.scripts)])
        self.prompts.append(list(prompt_ids))
        turn = script.pop(0)
        ids = turn if isinstance(turn, list) else self.tokenizer.encode(turn + EOS, add_special_tokens=False)
        sampling_params["changed"] = "by the engine"  # verl's server pops from it
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids) if sampling_params.get("logprobs") else None)


class Worker(SandboxedAgentLoopWorker):
    """Our worker, which is verl's, with what their __init__ would make, but no Ray."""

    def __init__(self, config: Any, tokenizer: Any, engine: ScriptedEngine, pool: SessionPool) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = None
        self.server_manager = engine
        self._pool = pool
        self.reward_router_address = None
        manager = RewardManagerWorker.__ray_metadata__.modified_class.__new__(
            RewardManagerWorker.__ray_metadata__.modified_class
        )
        manager.config = config
        manager.reward_router_address = None
        manager._init_reward_fn = types.MethodType(lambda self: None, manager)
        from verl.experimental.reward.reward_loop.naive import NaiveRewardLoopManager

        from recipe.retool.reward import compute_score

        manager.reward_loop = NaiveRewardLoopManager(config, tokenizer, compute_score, None, None)
        made = types.SimpleNamespace(__ray_metadata__=types.SimpleNamespace(modified_class=lambda: manager))
        self.reward_manager_worker = _Colocated(made).options(name="x").remote()


def make_config(changes: Mapping[str, Any] | None = None) -> Any:
    """The smoke recipe's configuration, small, with `changes`."""
    sizes = {
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 5,
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": 4,
        "actor_rollout_ref.model.path": "/nowhere",
        "verl_ext.run_id": "r",
        "verl_ext.run_dir": "/nowhere",
        "verl_ext.config_dir": CONFIG_DIR,
        **(changes or {}),
    }
    return resolve(compose("smoke", "cpu", [f"{key}={value}" for key, value in sizes.items()]))


def make_prompts(count: int) -> DataProto:
    """Rows as verl gives them to the workers; two of a group each."""
    columns = {
        "raw_prompt": [QUESTION] * count,
        "agent_name": ["tool_agent"] * count,
        "data_source": ["math_dapo"] * count,
        "reward_model": [{"ground_truth": "42", "style": "rule"}] * count,
        "extra_info": [{"index": f"p-{number}", "split": "train"} for number in range(count)],
        "uid": [f"group-{number // 2}" for number in range(count)],
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(count, dtype=object)
        arrays[name][:] = values
    prompts = DataProto.from_dict(tensors={"dummy": torch.zeros(count, 1)}, non_tensors=arrays)
    prompts.meta_info = {"global_steps": 3}
    return prompts
