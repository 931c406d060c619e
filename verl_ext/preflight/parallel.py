"""Checks of how work divides among workers, GPUs and groups of them, and of whether it fits on one."""

from __future__ import annotations

from collections.abc import Iterator

from verl_ext.preflight.subject import Subject


def _rollouts(subject: Subject) -> int:
    return subject.config.data.train_batch_size * subject.config.actor_rollout_ref.rollout.n


def _gpus(subject: Subject) -> int:
    return subject.config.trainer.n_gpus_per_node * subject.config.trainer.nnodes


def workers(subject: Subject) -> Iterator[str]:
    """verl 0.6.1 cuts the batch into equal chunks (experimental/agent_loop/agent_loop.py)."""
    rollouts, count = _rollouts(subject), subject.config.actor_rollout_ref.rollout.agent.num_workers
    if rollouts % count:
        yield (
            f"train_batch_size x n = {rollouts} trajectories do not divide among {count} agent loop workers: set "
            f"actor_rollout_ref.rollout.agent.num_workers to {_divisor(rollouts, count)}"
        )


def _divisor(number: int, at_most: int) -> int:
    return next(candidate for candidate in range(min(at_most, number), 0, -1) if number % candidate == 0)


def mini_batch(subject: Subject) -> Iterator[str]:
    """A step is a whole number of mini-batches, each a whole number of trajectories on every GPU group."""
    actor, batch = subject.config.actor_rollout_ref.actor, subject.config.data.train_batch_size
    mini, n = actor.ppo_mini_batch_size, subject.config.actor_rollout_ref.rollout.n
    if batch % mini:
        yield (
            f"data.train_batch_size {batch} is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size {mini}: set "
            f"the second to {_divisor(batch, mini)}"
        )
    groups = max(_gpus(subject) // actor.ulysses_sequence_parallel_size, 1)
    if mini * n % groups:
        yield (
            f"ppo_mini_batch_size x n = {mini * n} trajectories do not divide among {groups} groups of GPUs: change "
            "actor_rollout_ref.actor.ppo_mini_batch_size"
        )


def micro_batch(subject: Subject) -> Iterator[str]:
    """Without dynamic batches verl needs to be told a size, and one that divides."""
    ours = subject.config.actor_rollout_ref
    if ours.actor.use_dynamic_bsz:
        return
    groups = max(_gpus(subject) // ours.actor.ulysses_sequence_parallel_size, 1)
    share = ours.actor.ppo_mini_batch_size * ours.rollout.n // groups
    micro = ours.actor.ppo_micro_batch_size_per_gpu
    if micro is None:
        yield (
            "use_dynamic_bsz is off and actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu has no value: give one, "
            f"or set actor_rollout_ref.actor.use_dynamic_bsz=true (a mini-batch is {share} trajectories a GPU)"
        )
    elif share % micro:
        yield (
            f"a mini-batch is {share} trajectories a GPU, no multiple of "
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu {micro}: set it to {_divisor(share, micro)}"
        )
    if ours.rollout.log_prob_micro_batch_size_per_gpu is None and not ours.rollout.log_prob_use_dynamic_bsz:
        yield (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu has no value, and dynamic batches are off: "
            "give one"
        )


def gpu_split(subject: Subject) -> Iterator[str]:
    """Engines, sequence groups and trajectories each divide the GPUs evenly."""
    ours, gpus, rollouts = subject.config.actor_rollout_ref, _gpus(subject), _rollouts(subject)
    tensor, sequence = ours.rollout.tensor_model_parallel_size, ours.actor.ulysses_sequence_parallel_size
    per_node = subject.config.trainer.n_gpus_per_node
    if gpus % tensor or (per_node % tensor and tensor < per_node):
        yield (
            f"{gpus} GPUs, {per_node} a node, do not divide into engines of tensor_model_parallel_size {tensor}: set "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size to {_divisor(per_node, tensor)}"
        )
    if gpus % sequence:
        yield (
            f"{gpus} GPUs do not divide into groups of ulysses_sequence_parallel_size {sequence}: set "
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size to {_divisor(gpus, sequence)}"
        )
    if sequence > 1 and not ours.model.use_remove_padding:
        yield (
            f"ulysses_sequence_parallel_size {sequence} needs actor_rollout_ref.model.use_remove_padding=true, without "
            "which verl computes every token on every GPU"
        )
    if rollouts % gpus:
        yield (
            f"train_batch_size x n = {rollouts} trajectories do not divide among {gpus} GPUs: change "
            "data.train_batch_size"
        )


def heads(subject: Subject) -> Iterator[str]:
    """Attention heads are what tensor and sequence parallelism divide.

    Source: vLLM 0.11.0 config/model.py; verl 0.6.1 models/transformers/monkey_patch.py.
    """
    ours, shape = subject.config.actor_rollout_ref, subject.shape
    if shape is None:
        return
    tensor, sequence = ours.rollout.tensor_model_parallel_size, ours.actor.ulysses_sequence_parallel_size
    if shape.attention_heads % tensor:
        fitting = _divisor(shape.attention_heads, tensor)
        yield (
            f"the model's {shape.attention_heads} attention heads do not divide by tensor_model_parallel_size "
            f"{tensor}: set actor_rollout_ref.rollout.tensor_model_parallel_size to {fitting}"
        )
    pairs = shape.key_value_heads
    if shape.attention_heads % sequence or (pairs % sequence and sequence % pairs):
        yield (
            f"the model's {shape.attention_heads} attention heads and {pairs} key-value heads do not divide by "
            f"ulysses_sequence_parallel_size {sequence}: set it to {_divisor(pairs, sequence)}"
        )


def token_budget(subject: Subject) -> Iterator[str]:
    """A dynamic batch must hold the longest trajectory (verl 0.6.1 utils/seqlen_balancing.py asserts it)."""
    ours, data = subject.config.actor_rollout_ref, subject.config.data
    longest, sequence = data.max_prompt_length + data.max_response_length, ours.actor.ulysses_sequence_parallel_size
    budgets = []
    if ours.actor.use_dynamic_bsz:
        budgets.append(("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ours.actor.ppo_max_token_len_per_gpu))
    if ours.rollout.log_prob_use_dynamic_bsz:
        key = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
        budgets.append((key, ours.rollout.log_prob_max_token_len_per_gpu))
    for key, tokens in budgets:
        if tokens * sequence < longest:
            yield (
                f"{key} {tokens} x ulysses_sequence_parallel_size {sequence} is less than prompt + response = "
                f"{longest} tokens: set it to {-(-longest // sequence)} or more"
            )


def gpu_memory(subject: Subject) -> Iterator[str]:
    """What cannot fit on one GPU, by verl_ext/gpu_memory.py."""
    if subject.plan.memory is not None:
        yield from subject.plan.memory.problems()
