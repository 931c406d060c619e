"""vLLM's scheduler, driven one step ahead by a made-up worker: does each token follow from what the cache holds?

No model: a token is a function of the tokens that the worker finds in the KV blocks it was told to read, so a block
that was given away too early, a token that was not there yet or a prefix that was cached wrongly gives another text.
Prefix caching and chunked prefill are on, as on a GPU, blocks are few, requests come as later turns of finished ones,
and some are aborted while a step of theirs is under way.
"""

from __future__ import annotations

import collections
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS, VOCABULARY, REQUESTS, LONGEST = 4, 50, 24, 64


def next_token(context: Sequence[int]) -> int:
    return hash(tuple(context)) % VOCABULARY


def log_prob(context: Sequence[int]) -> float:
    return float(hash(tuple(context)) % 1000)


class Worker:
    """Keeps tokens as vLLM's synchronous worker does: sampled ones at once, and their KV in the blocks it is told."""

    def __init__(self) -> None:
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}
        self.requests: dict[str, Any] = {}

    def run(self, step: Any) -> Any:
        self._update(step)
        if not step.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        for name, count in step.num_scheduled_tokens.items():
            one = self.requests[name]
            assert one.computed + count <= len(one.tokens), "a token that is not there yet"
            for place in range(one.computed, one.computed + count):
                self.cache[one.blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = one.tokens[place], place
        names = list(step.num_scheduled_tokens)
        sampled, log_probs = zip(*(self._sample(name, step.num_scheduled_tokens[name]) for name in names), strict=True)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(sampled),
            logprobs=LogprobsLists([[*one, 0][:1] for one in sampled], [[one] for one in log_probs], [0] * len(names)),  # pyright: ignore[reportArgumentType]
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _update(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                tokens=list(new.prompt_token_ids), blocks=list(new.block_ids[0]), computed=new.num_computed_tokens
            )
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            one, blocks = self.requests[name], cached.new_block_ids[index]
            one.computed = cached.num_computed_tokens[index]
            if cached.resumed_from_preemption[index]:
                one.blocks = list(blocks[0])
            elif blocks is not None:
                one.blocks += blocks[0]

    def _sample(self, name: str, count: int) -> tuple[list[int], float]:
        one = self.requests[name]
        end = one.computed + count
        context = []
        for place in range(end):
            token, written_for = self.cache[one.blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS]
            assert written_for == place
            context.append(token)
        if end < len(one.tokens):
            return [], 0.0  # a part of the prompt
        one.tokens.append(next_token(context))
        return [one.tokens[-1]], log_prob(context)


class Engine:
    """vLLM's EngineCore around a scheduler and that worker.

    Args:
        scheduler: its class.
        folder: for a model's configuration.
        seed: of sizes, requests and their times.
    """

    def __init__(self, scheduler: type, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        config = self._config(folder)
        self.longest = config.scheduler_config.max_model_len
        self.blocks = config.cache_config.num_gpu_blocks
        cache = KVCacheConfig(
            num_blocks=self.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_TOKENS, 1, 1, torch.float32, False))],
        )
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
        )
        prepend = self.scheduler.waiting.prepend_request
        self.scheduler.waiting.prepend_request = lambda one: (self.counts.update(preempted=1), prepend(one))
        self.worker = Worker()
        self.core: Any = EngineCore.__new__(EngineCore)
        self.core.scheduler, self.core.vllm_config = self.scheduler, config
        self.core.batch_queue, self.core.batch_queue_size = collections.deque(maxlen=2), 2
        self.core.model_executor = SimpleNamespace(execute_model=self._execute)
        self.wanted: dict[str, tuple[list[int], list[int], list[float]]] = {}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def _config(self, folder: Path) -> VllmConfig:
        config = VllmConfig(
            model_config=ModelConfig(str(folder), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=64),
            cache_config=CacheConfig(block_size=16, gpu_memory_utilization=0.5, swap_space=0),
            scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64),
        )
        # Set here and not there, where the CPU's platform would have others.
        scheduler, cache = config.scheduler_config, config.cache_config
        scheduler.chunked_prefill_enabled = cache.enable_prefix_caching = True
        scheduler.max_model_len = self.rng.choice([LONGEST // 2, LONGEST])
        scheduler.max_num_batched_tokens = self.rng.choice([5, 11, 24, 64])
        scheduler.max_num_seqs = self.rng.choice([2, 4, 8])
        scheduler.long_prefill_token_threshold = self.rng.choice([0, 0, 3])
        cache.num_gpu_blocks, cache.block_size = self.rng.choice([18, 24, 40]), BLOCK_TOKENS
        return config

    def _execute(self, step: Any, non_block: bool) -> Any:
        outputs = self.worker.run(pickle.loads(pickle.dumps(step)))
        return SimpleNamespace(done=lambda: self.rng.random() < 0.3, result=lambda: outputs)

    def ask(self, prompt: list[int]) -> None:
        """Add a request, and note what it has to be answered."""
        name = f"request-{len(self.wanted)}"
        limit = min(self.rng.choice([1, 2, 9, 100]), self.longest - len(prompt))
        stop = self.rng.randrange(VOCABULARY)
        context, log_probs = list(prompt), []
        while len(context) < self.longest and len(log_probs) < limit and (not log_probs or context[-1] != stop):
            log_probs.append(log_prob(context))
            context.append(next_token(context))
        self.wanted[name] = prompt, context[len(prompt) :], log_probs
        asked = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[stop], ignore_eos=True, logprobs=0)
        self.scheduler.add_request(
            Request(name, list(prompt), asked, None, eos_token_id=None, block_hasher=self._hasher)
        )

    def run(self) -> collections.Counter[str]:
        """Ask, now and then abort, until all are done; raises AssertionError where a text is not what it has to be."""
        tokens: dict[str, list[int]] = collections.defaultdict(list)
        log_probs: dict[str, list[float]] = collections.defaultdict(list)
        finished: list[str] = []
        aborted: set[str] = set()
        for _ in range(5000):
            self._arrive(finished)
            if self.rng.random() < 0.03 and self.scheduler.requests:
                aborted.add(self.rng.choice(sorted(self.scheduler.requests)))
                self.core.abort_requests(sorted(aborted))
            if not (self.scheduler.has_requests() or self.core.batch_queue):
                if len(self.wanted) == REQUESTS:
                    break
                continue
            outputs, _ = self.core.step_with_batch_queue()
            for output in [one for of_client in (outputs or {}).values() for one in of_client.outputs]:
                tokens[output.request_id] += output.new_token_ids
                log_probs[output.request_id] += [of_token[0] for of_token in output.new_logprobs.logprobs]
                if output.finish_reason is not None:
                    finished.append(output.request_id)
        for name, (_, wanted, wanted_log_probs) in self.wanted.items():
            came = len(tokens[name]) if name in aborted else len(wanted)
            assert tokens[name] == wanted[:came], name
            assert log_probs[name] == wanted_log_probs[:came], name
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.blocks - 1  # one is vLLM's own
        assert not self.worker.requests
        self.counts.update(aborted=len(aborted))
        return self.counts

    def _arrive(self, finished: list[str]) -> None:
        while len(self.wanted) < REQUESTS and self.rng.random() < 0.3:
            if finished and self.rng.random() < 0.4:  # the next turn of one
                prompt, answer, _ = self.wanted[self.rng.choice(finished)]
                text = [*prompt, *answer, self.rng.randrange(VOCABULARY)]
                self.counts.update(turns=1)
            else:
                text = [7] * self.rng.choice([3, 9]) + self.rng.choices(range(VOCABULARY), k=self.rng.randrange(12))
            self.ask(text[: self.longest - 1])


def write_configuration(folder: Path) -> None:
    """What vLLM wants to see of a model."""
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
