"""Every response gets exactly BENCH_RESPONSE_TOKENS tokens, in every arm alike: then tokens per second compare.

With BENCH_TOOL_CALLS=4 a trajectory is five turns of a fifth each, and every turn but the last ends in a tool call
that takes 0.2 s: a model with random weights calls nothing by itself.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES=forced_length, with this folder on PYTHONPATH).
"""

from __future__ import annotations

import os
from typing import Any

import wrapt

TOKENS = int(os.environ["BENCH_RESPONSE_TOKENS"])
TOOL_CALLS = int(os.environ.get("BENCH_TOOL_CALLS", "0"))
TOOL_CODE = "import time; time.sleep(0.2); print(6 * 7)"
# As verl does it: text, and an output for every token (see verl_ext.agent_loop.loop.final_ids_only), and a garbage
# collector that walks over everything at each switch (see verl_ext.engine.replica.spare_the_collector).
IS_STOCK = os.environ.get("BENCH_STOCK") == "1"


def force(module: Any) -> None:
    """Let verl's engine server ask for that many tokens and ignore the end of text."""
    original = module.SamplingParams

    def sampling_params(**values: Any) -> Any:
        if IS_STOCK:
            values = {name: value for name, value in values.items() if name not in ("detokenize", "output_kind")}
        return original(**(values | {"max_tokens": TOKENS // (1 + TOOL_CALLS), "ignore_eos": True}))

    module.SamplingParams = sampling_params


def force_calls(module: Any) -> None:
    """Let our agent loop find a call at the end of the first turns; verl makes one loop object a trajectory."""

    def calls(loop: Any, _: list[int]) -> list[Any]:
        loop.bench_turns = getattr(loop, "bench_turns", 0) + 1
        wanted = loop.bench_turns <= TOOL_CALLS
        return [module.ToolCall("code_interpreter", {"code": TOOL_CODE})] if wanted else []

    module.CodeInterpreterLoop._calls = calls


def leave_the_collector(_: Any) -> None:
    """In the place of spare_the_collector: nothing, as in verl."""


def keep_the_collector(module: Any) -> None:
    """Let the trainer ask its workers for nothing."""
    module.spare_the_collector = leave_the_collector


wrapt.register_post_import_hook(force, "verl.workers.rollout.vllm_rollout.vllm_async_server")
if TOOL_CALLS:
    wrapt.register_post_import_hook(force_calls, "verl_ext.agent_loop.loop")
if IS_STOCK:
    wrapt.register_post_import_hook(keep_the_collector, "verl_ext.engine.replica")
