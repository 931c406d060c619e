"""Every response gets exactly BENCH_RESPONSE_TOKENS tokens, in every arm alike: then tokens per second compare.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES=forced_length, with this folder on PYTHONPATH).
"""

from __future__ import annotations

import os
from typing import Any

import wrapt

TOKENS = int(os.environ["BENCH_RESPONSE_TOKENS"])
# As verl's own loops ask: text, and an output for every token (see verl_ext.agent_loop.loop.final_ids_only).
HAS_STOCK_OUTPUT = os.environ.get("BENCH_STOCK_OUTPUT") == "1"


def force(module: Any) -> None:
    """Let verl's engine server ask for that many tokens and ignore the end of text."""
    original = module.SamplingParams

    def sampling_params(**values: Any) -> Any:
        if HAS_STOCK_OUTPUT:
            values = {name: value for name, value in values.items() if name not in ("detokenize", "output_kind")}
        return original(**(values | {"max_tokens": TOKENS, "ignore_eos": True}))

    module.SamplingParams = sampling_params


wrapt.register_post_import_hook(force, "verl.workers.rollout.vllm_rollout.vllm_async_server")
