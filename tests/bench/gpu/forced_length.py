"""Every response gets exactly BENCH_RESPONSE_TOKENS tokens, in every arm alike: then tokens per second compare.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES=forced_length, with this folder on PYTHONPATH).
"""

from __future__ import annotations

import os
from typing import Any

import wrapt

TOKENS = int(os.environ["BENCH_RESPONSE_TOKENS"])


def force(module: Any) -> None:
    """Let verl's engine server ask for that many tokens and ignore the end of text."""
    original = module.SamplingParams

    def sampling_params(**values: Any) -> Any:
        return original(**(values | {"max_tokens": TOKENS, "ignore_eos": True}))

    module.SamplingParams = sampling_params


wrapt.register_post_import_hook(force, "verl.workers.rollout.vllm_rollout.vllm_async_server")
