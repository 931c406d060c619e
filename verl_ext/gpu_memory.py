"""Where a GPU's memory goes in a run, phase by phase: arithmetic on the configuration, nothing is measured.

verl 0.6.1 keeps the trainer (FSDP) and the engine (vLLM) in one process on the same GPU and lets them take
turns. Each phase below is what is on the card at its worst moment, in GiB of one GPU. P is the number of
parameters; a shard is 1/GPUs of it (all of it on one GPU).

    weights            4 P a shard       fp32 master copy (verl makes the model in fp32)
    gradients          4 P a shard       fp32, during the update
    optimizer          8 P a shard       Adam's two moments
    gathered           2 (embeddings + 2 layers)   bf16, what FSDP gathers while it computes
    logits             2 x tokens x vocabulary     bf16; x 2 in the update (their gradient)
    activations        checkpointed: one hidden state a layer, and one layer in full
    engine             gpu_memory_utilization x the card: weights, cache and peak, whatever FSDP holds
    CUDA               context of the process, NCCL, what the allocator does not give back

What was measured stands beside its constant. The rest is arithmetic from verl 0.6.1 (workers/fsdp_workers.py,
workers/actor/dp_actor.py) and vLLM 0.11.0 (v1/worker/gpu_worker.py); it says what cannot fit, and is no
promise that the rest does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig

from verl_ext.model_shape import ModelShape

GIB = 2**30
# One H200, Qwen3-4B in FSDP1: 139.8 - 123.47 GiB were in use when vLLM started, 14.98 of them the fp32 weights.
CUDA_GIB = 1.3
# Allowance, not measured: vLLM captures its CUDA graphs outside of its budget.
CUDA_GRAPHS_GIB = 2.0
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Phase:
    """One phase: what is on the card, in GiB."""

    name: str
    parts: tuple[tuple[str, float], ...]

    @property
    def total_gib(self) -> float:
        """All parts together."""
        return sum(gib for _, gib in self.parts)


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one GPU of a run.

    Attributes:
        card_gib: of one GPU, as CUDA counts it.
        resident_gib: what FSDP and CUDA hold while the engine starts and generates.
        engine_gib: what gpu_memory_utilization gives the engine.
        cache_tokens: tokens that the engine's cache holds.
        context_tokens: prompt + response, the longest trajectory.
        fsdp1_alone: whether it is FSDP1 on one GPU, whose offload frees nothing.
        phases: in the order of a step.
    """

    card_gib: float
    resident_gib: float
    engine_gib: float
    cache_tokens: int
    context_tokens: int
    fsdp1_alone: bool
    phases: tuple[Phase, ...]

    def problems(self) -> Iterator[str]:
        """What cannot work, each with its cure."""
        free_gib = self.card_gib - self.resident_gib
        # vLLM's own test at its start; it refuses the same.
        if self.engine_gib > free_gib:
            yield (
                f"the engine would not start: gpu_memory_utilization "
                f"{self.engine_gib / self.card_gib:.2f} wants {self.engine_gib:.1f} of the GPU's "
                f"{self.card_gib:.1f} GiB free, but FSDP and CUDA hold {self.resident_gib:.1f} there"
                f"{_FSDP1_REASON if self.fsdp1_alone else ''}, so {free_gib:.1f} are: {self._cure()}"
            )
        else:
            for phase in self.phases:
                if phase.total_gib > self.card_gib:
                    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in phase.parts if gib >= 0.05)
                    yield (
                        f"{phase.name} needs {phase.total_gib:.1f} GiB of the GPU's {self.card_gib:.1f} ({parts}): "
                        + (self._cure() if phase.name == GENERATE else _CURES[phase.name])
                    )
        if self.cache_tokens < self.context_tokens:
            yield (
                f"the engine's cache holds {max(self.cache_tokens, 0):,} tokens, fewer than one trajectory of "
                f"{self.context_tokens:,}: raise gpu_memory_utilization or tensor_model_parallel_size, or lower "
                "data.max_response_length"
            )

    def _cure(self) -> str:
        generation = next(phase for phase in self.phases if phase.name == GENERATE)
        room_gib = self.card_gib - (generation.total_gib - self.engine_gib)
        highest = math.floor(room_gib / self.card_gib * 20) / 20
        other = " or actor.strategy to fsdp2, which gives the weights back" if self.fsdp1_alone else ""
        return f"set actor_rollout_ref.rollout.gpu_memory_utilization to {highest:.2f} or less{other}"


GENERATE, SYNC, LOG_PROBS, UPDATE = "generation", "weights to the engine", "log-probs", "update"
_FSDP1_REASON = " (FSDP1 on one GPU keeps its weights there through an offload)"
_CURES = {
    SYNC: "use more GPUs or a smaller model",
    LOG_PROBS: "lower actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    UPDATE: "set actor.ulysses_sequence_parallel_size higher with a lower actor.ppo_max_token_len_per_gpu, "
    "or use more GPUs",
}


def gpu_memory(config: DictConfig, shape: ModelShape, card_gib: float) -> GpuMemory:
    """The memory of one GPU in a run of this configuration.

    Args:
        config: resolved.
        shape: of the model, with its parameters.
        card_gib: memory of one GPU.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    shards = gpus if actor.fsdp_config.fsdp_size in (-1, None) else min(actor.fsdp_config.fsdp_size, gpus)
    tensor_parallel = rollout.tensor_model_parallel_size
    weights = _FP32 * shape.parameters / shards / GIB
    moments = 2 * weights
    # FSDP1 on one GPU shards nothing, so its modules keep views of the first copy of the weights, and moving
    # the flat parameter to the host frees none of it (torch 2.8 distributed/fsdp/_flat_param.py).
    fsdp1_alone = actor.strategy == "fsdp" and shards == 1 and actor.fsdp_config.param_offload
    kept_weights = 0.0 if actor.fsdp_config.param_offload and not fsdp1_alone else weights
    kept_moments = 0.0 if actor.fsdp_config.optimizer_offload else moments
    cuda = ("CUDA", CUDA_GIB)
    # While it trains, the engine sleeps: its weights and cache are unmapped, its graphs stay.
    asleep = ("engine asleep", CUDA_GRAPHS_GIB)
    engine_gib = rollout.gpu_memory_utilization * card_gib
    gathered = _BF16 * (shape.embedding_parameters + 2 * shape.layer_parameters) / GIB
    phases = (
        Phase(
            GENERATE,
            (
                cuda,
                ("weights", kept_weights),
                ("optimizer", kept_moments),
                ("engine", engine_gib),
                ("CUDA graphs", CUDA_GRAPHS_GIB),
            ),
        ),
        Phase(
            SYNC,
            (
                cuda,
                ("weights", weights),
                ("optimizer", kept_moments),
                ("engine's weights", _BF16 * shape.parameters / tensor_parallel / GIB),
                ("one tensor, gathered", _FP32 * shape.vocab_size * shape.hidden_size / GIB),
                asleep,
            ),
        ),
        Phase(
            LOG_PROBS,
            (
                cuda,
                ("weights", weights),
                ("optimizer", kept_moments),
                ("gathered", gathered),
                ("logits", _log_prob_logits(actor, rollout.log_prob_max_token_len_per_gpu, shape)),
                ("activations", _one_layer(rollout.log_prob_max_token_len_per_gpu, shape)),
                asleep,
            ),
        ),
        Phase(
            UPDATE,
            (
                cuda,
                ("weights", weights),
                ("gradients", weights),
                ("optimizer", moments),
                ("gathered", gathered + (_BF16 + _FP32) * shape.embedding_parameters / GIB),
                ("logits", 2 * _logits(actor.ppo_max_token_len_per_gpu, shape)),
                ("activations", _activations(config, shape)),
                asleep,
            ),
        ),
    )
    return GpuMemory(
        card_gib=card_gib,
        resident_gib=CUDA_GIB + kept_weights,  # Adam's moments are made by the first update
        engine_gib=engine_gib,
        cache_tokens=_cache_tokens(config, shape, engine_gib),
        context_tokens=config.data.max_prompt_length + config.data.max_response_length,
        fsdp1_alone=fsdp1_alone,
        phases=phases,
    )


def host_memory_gib(config: DictConfig, shape: ModelShape) -> float:
    """GiB that a node's own memory must have for FSDP alone: the larger of loading and offloading."""
    return max(host_loading_gib(config, shape), host_offload_gib(config, shape))


def host_loading_gib(config: DictConfig, shape: ModelShape) -> float:
    """GiB of a node while the model is loaded.

    A model with tied embeddings is loaded whole, in fp32, by every process of the node at once (verl 0.6.1
    workers/fsdp_workers.py: a meta tensor would hang); another by one.
    """
    processes = config.trainer.n_gpus_per_node if shape.tied_embeddings else 1
    return processes * _FP32 * shape.parameters / GIB


def host_offload_gib(config: DictConfig, shape: ModelShape) -> float:
    """GiB of a node that hold what is offloaded, all the time: its share of the weights and of Adam's moments."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    copies = int(fsdp.param_offload) + 2 * int(fsdp.optimizer_offload)
    return copies * _FP32 * shape.parameters / config.trainer.nnodes / GIB


def checkpoint_gib(config: DictConfig, shape: ModelShape) -> float:
    """GiB on disk of one checkpoint, all ranks together."""
    contents = set(config.actor_rollout_ref.actor.checkpoint.save_contents)
    copies = _FP32 * ("model" in contents) + 2 * _FP32 * ("optimizer" in contents) + _FP32 * ("hf_model" in contents)
    return copies * shape.parameters / GIB


def _logits(tokens: int, shape: ModelShape) -> float:
    return _BF16 * tokens * shape.vocab_size / GIB


def _log_prob_logits(actor: DictConfig, tokens: int, shape: ModelShape) -> float:
    # Entropy over the vocabulary: one pass if compiled, else softmax and its product with the logits as well.
    return _logits(tokens, shape) * (1 if actor.use_torch_compile else 3)


def _one_layer(tokens: int, shape: ModelShape) -> float:
    """What one layer keeps of its tokens: hidden states, queries, keys, values, and the MLP's three inner ones."""
    attention = shape.head_dim * (2 * shape.attention_heads + 2 * shape.key_value_heads)
    return _BF16 * tokens * (4 * shape.hidden_size + attention + 4 * shape.intermediate_size) / GIB


def _one_layer_kept(tokens: int, shape: ModelShape, has_liger: bool) -> float:
    """What one layer keeps of its tokens for its backward pass.

    transformers computes a norm in fp32: its input and the normalised one stay in fp32, and the result in bf16; Qwen3
    has such norms over queries and keys too. Queries, keys and values stay before and after the rotation.
    Source: models/qwen3/modeling_qwen3.py of transformers 4.57.3. Measured on one H200 with Qwen3-4B's shape: 111.3 GiB
    in an update without checkpointing, where this comes to 115.9 (recipe/retool/LOG.md).

    Liger's norms keep their input and their result, both in bf16. What its SwiGLU saves is left in the sum: with it
    114.8 GiB were measured where this comes to 115.7.
    """
    norm = 2 * _BF16 if has_liger else 2 * _FP32 + _BF16
    queries, keys = shape.head_dim * shape.attention_heads, shape.head_dim * shape.key_value_heads
    norms = norm * (2 * shape.hidden_size + (queries + keys if shape.model_type.startswith("qwen3") else 0))
    attention = _BF16 * (shape.hidden_size + 2 * (queries + 2 * keys) + queries)
    mlp = _BF16 * (shape.hidden_size + 4 * shape.intermediate_size)
    return tokens * (norms + attention + mlp) / GIB


def _activations(config: DictConfig, shape: ModelShape) -> float:
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    one = _one_layer_kept(tokens, shape, bool(config.actor_rollout_ref.model.use_liger))
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        return shape.layers * one
    return one + shape.layers * _BF16 * tokens * shape.hidden_size / GIB


def _cache_tokens(config: DictConfig, shape: ModelShape, engine_gib: float) -> int:
    rollout = config.actor_rollout_ref.rollout
    weights = _BF16 * shape.parameters / rollout.tensor_model_parallel_size / GIB
    # vLLM's trial run: one batch of tokens through a layer, and the sampler's logits in fp32 with a copy.
    peak = _one_layer(rollout.max_num_batched_tokens, shape)
    peak += 2 * _FP32 * rollout.max_num_seqs * shape.vocab_size / GIB
    bytes_a_token = shape.key_value_bytes / min(rollout.tensor_model_parallel_size, shape.key_value_heads)
    return int((engine_gib - weights - peak) * GIB / bytes_a_token)
