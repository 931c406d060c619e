"""Checks of the configuration alone: types, ranges, and what verl 0.6.1 ignores or breaks on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.compose import KNOWN_BEYOND_YAML, OPEN_BELOW, default_values, items
from verl_ext.errors import ConfigurationError
from verl_ext.preflight.subject import Subject
from verl_ext.sandbox.connect import run_limits
from verl_ext.settings import VARIABLES

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

# verl writes these as whole numbers in its YAML and reads any number.
_ANY_NUMBER = frozenset(
    {
        f"{_ACTOR}.entropy_coeff",
        f"{_ROLLOUT}.top_p",
        f"{_ROLLOUT}.over_sample_rate",
        f"{_ROLLOUT}.val_kwargs.temperature",
    }
)
# Text in verl's YAML, but a list is read too, or the other way round.
_TEXT_OR_LIST = frozenset(
    {"data.train_files", "data.val_files", "trainer.logger", "verl_ext.waive", "verl_ext.stop_on"}
)
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}


def value_type(subject: Subject) -> Iterator[str]:
    """A value that is of another kind than verl's default is read wrong, late and far away."""
    values = dict(items(OmegaConf.to_container(subject.config)))
    for key, default in default_values().items():
        if default is None or key in KNOWN_BEYOND_YAML or (isinstance(default, str) and "${" in default):
            continue
        if key == "actor_rollout_ref.model.path" or default == "???":
            continue  # `model` looks at it; what is missing was told by compose
        if key in values:
            yield from _wrong_kind(key, default, values[key])


def _wrong_kind(key: str, default: Any, value: Any) -> Iterator[str]:
    kind = type(default)
    if key in _TEXT_OR_LIST:
        if value is not None and not isinstance(value, str | list):
            yield f"{key} is {value!r}: write text or a list of it"
    elif kind is dict:
        if not isinstance(value, dict) and not any(key.startswith(f"{top}.") for top in OPEN_BELOW):
            yield f"{key} is {value!r}, but it is a group of keys: set one of them, {key}.NAME=VALUE"
    elif value is None:
        yield f"{key} has no value: verl's default is {default!r}, leave the override away or give one"
    elif not _fits(kind, value, any_number=key in _ANY_NUMBER):
        yield f"{key} is {value!r}: write {_KINDS[kind]}, as verl's default {default!r} is"


def _fits(kind: type, value: Any, *, any_number: bool) -> bool:
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if kind is float or any_number:
        return isinstance(value, int | float)
    if kind is str:
        return isinstance(value, str | int | float)  # a name may look like a number
    return isinstance(value, kind)


_SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.val_kwargs.n",
    f"{_ROLLOUT}.agent.num_workers",
    f"{_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.max_num_batched_tokens",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{_ROLLOUT}.multi_turn.max_parallel_calls",
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.ppo_epochs",
    f"{_ACTOR}.ulysses_sequence_parallel_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
)
_SIZES_OR_NONE = (
    "trainer.total_training_steps",
    "trainer.max_actor_ckpt_to_keep",
    f"{_ROLLOUT}.multi_turn.max_user_turns",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
)


def sizes(subject: Subject) -> Iterator[str]:
    """Counts must be whole and at least 1."""
    for key in (*_SIZES, *_SIZES_OR_NONE):
        value = subject.get(key)
        whole = isinstance(value, int) and not isinstance(value, bool)
        # What is no whole number was told by `value_type`, but where verl's default is none.
        if (whole and value < 1) or (not whole and value is not None and key in _SIZES_OR_NONE):
            yield f"{key} is {value!r}: it must be a whole number of at least 1"


# key: above what, up to what, and what is usual
_RANGES: dict[str, tuple[float, float, str]] = {
    f"{_ROLLOUT}.gpu_memory_utilization": (0, 1, "a share of the GPU's memory, for example 0.9"),
    f"{_ROLLOUT}.top_p": (0, 1, "a share, for example 1.0"),
    f"{_ROLLOUT}.val_kwargs.top_p": (0, 1, "a share, for example 0.6"),
    f"{_ROLLOUT}.temperature": (0, 10, "for example 1.0: at 0 all trajectories of a prompt are the same"),
    f"{_ACTOR}.optim.lr": (-1e-30, 1e-2, "for example 1e-6; with more a policy falls apart"),
    f"{_ACTOR}.clip_ratio_low": (0, 1, "for example 0.2"),
    f"{_ACTOR}.clip_ratio_high": (0, 10, "for example 0.28"),
    f"{_ACTOR}.clip_ratio_c": (1, 1e9, "for example 10.0; verl wants more than 1"),
}


def ranges(subject: Subject) -> Iterator[str]:
    """Shares and rates must be within what they can mean."""
    for key, (low, high, usual) in _RANGES.items():
        value = subject.get(key)
        if not isinstance(value, int | float) or not low < value <= high:
            yield f"{key} is {value!r}: write {usual}"
    val = subject.get(f"{_ROLLOUT}.val_kwargs")
    if val.do_sample and not val.temperature > 0:
        yield f"{_ROLLOUT}.val_kwargs.do_sample is on at temperature {val.temperature}: give it one above 0"


def secret(subject: Subject) -> Iterator[str]:
    """The configuration is written to the run folder and shown by Ray, so no key of a service may be in it."""
    secrets = [variable.name for variable in VARIABLES if variable.secret]
    for key, value in _leaves(OmegaConf.to_container(subject.config), ""):
        name = subject.settings.reveals(str(value)) or next((name for name in secrets if key.endswith(name)), None)
        if name and value is not None:
            yield (
                f"{key} holds {name}, and the configuration is written to the run folder and shown by Ray: take it "
                "out; every process of the run reads .env itself"
            )


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def stale_weights(subject: Subject) -> Iterator[str]:
    """verl 0.6.1 syncs weights only where it frees the cache."""
    if not subject.get(f"{_ROLLOUT}.free_cache_engine"):
        yield (
            f"{_ROLLOUT}.free_cache_engine=False stops weight sync in verl 0.6.1 (verl PR 4248), so the policy that "
            "generates is never the one that is trained: leave it True"
        )


def lost_rule(subject: Subject) -> Iterator[str]:
    """What is done about trajectories that our infrastructure loses (verl_ext/lost.py)."""
    word, ratio = subject.get("verl_ext.on_lost"), subject.get("verl_ext.max_lost_ratio")
    if word not in ("pause", "stop"):
        yield f"verl_ext.on_lost is {word!r}: pause (wait for the sandbox service) or stop"
    if not 0 <= ratio <= 1:
        yield f"verl_ext.max_lost_ratio is {ratio}: it is a share of a batch, 0 to 1"


def sandbox_limits(subject: Subject) -> Iterator[str]:
    """The run's share of the account must leave it sandboxes."""
    try:
        run_limits(subject.settings, subject.get(f"{_ROLLOUT}.agent.num_workers"))
    except ConfigurationError as error:
        yield str(error)


def rollout_mode(subject: Subject) -> Iterator[str]:
    """The agent loop exists in mode async, in vLLM."""
    mode, engine = subject.get(f"{_ROLLOUT}.mode"), subject.get(f"{_ROLLOUT}.name")
    if mode != "async":
        yield f"{_ROLLOUT}.mode is {mode!r}: the agent loop runs in mode async only"
    if engine != "vllm":
        yield f"{_ROLLOUT}.name is {engine!r}: this project runs vllm"


def tool_response(subject: Subject) -> Iterator[str]:
    """verl's own cut of a tool's answer comes after the tool's and does not say that it cut."""
    longest = subject.get(f"{_ROLLOUT}.multi_turn.max_tool_response_length")
    if longest <= 256:
        yield (
            f"{_ROLLOUT}.multi_turn.max_tool_response_length is verl's {longest} characters: a traceback needs more, "
            "say 4096"
        )
    side = subject.get(f"{_ROLLOUT}.multi_turn.tool_response_truncate_side")
    if side not in ("left", "right", "middle"):
        yield f"{_ROLLOUT}.multi_turn.tool_response_truncate_side is {side!r}: verl knows left, right and middle"


# Options of vLLM 0.11.0 that are on unless it is told otherwise; verl 0.6.1 leaves options out that are False.
_ON_BY_DEFAULT = ("enable_prefix_caching", "enable_chunked_prefill")


def false_options(subject: Subject) -> Iterator[str]:
    """A False that never reaches vLLM is a setting that does nothing."""
    given = subject.get(f"{_ROLLOUT}.engine_kwargs.vllm") or {}
    for name in _ON_BY_DEFAULT:
        off = given[name] is False if name in given else subject.get(f"{_ROLLOUT}.{name}") is False
        if off and not given.get(f"no_{name}"):
            yield (
                f"{name}=False never reaches vLLM, since verl 0.6.1 leaves out what is False and vLLM has it on: "
                f"--set {_ROLLOUT}.engine_kwargs.vllm.no_{name}=true"
            )


def estimator(subject: Subject) -> Iterator[str]:
    """A group needs two members, and lost trajectories must stay out of it."""
    name, count = subject.get("algorithm.adv_estimator"), subject.get(f"{_ROLLOUT}.n")
    if name == "grpo":
        yield (
            "algorithm.adv_estimator is verl's grpo, which counts trajectories that our sandboxes lost as wrong "
            "answers of their group: leave it grpo_without_lost"
        )
    elif name != "grpo_without_lost":
        yield f"algorithm.adv_estimator is {name!r}: this recipe is made for grpo_without_lost"
    if count < 2:
        yield f"{_ROLLOUT}.n is {count}: GRPO compares the trajectories of a prompt, so it needs 2 or more, say 8"


def one_checkpoint(subject: Subject) -> Iterator[str]:
    """With one alone there is nothing to go back to."""
    if subject.get("trainer.max_actor_ckpt_to_keep") == 1:
        yield (
            "trainer.max_actor_ckpt_to_keep is 1: a run whose one checkpoint is damaged would have none to go on "
            "from: keep 2"
        )


def agent_loop(subject: Subject) -> Iterator[str]:
    """A run whose rows come to no tool loop trains without ever calling a tool."""
    rollout = subject.get(_ROLLOUT)
    if not rollout.multi_turn.enable:
        yield f"{_ROLLOUT}.multi_turn.enable is off, so verl would not run the agent loop: leave it on"
    if rollout.agent.default_agent_loop != "tool_agent":
        yield (
            f"{_ROLLOUT}.agent.default_agent_loop is {rollout.agent.default_agent_loop!r}: rows that name no agent "
            "loop would never use the tool (verl issue 3257): leave it tool_agent"
        )


_NAMED = (
    "custom_reward_function.path",
    f"{_ROLLOUT}.multi_turn.tool_config_path",
    f"{_ROLLOUT}.agent.agent_loop_config_path",
)


def named_files(subject: Subject) -> Iterator[str]:
    """Files that verl opens in another process, where the message would be lost."""
    for key in _NAMED:
        value = subject.get(key)
        if value and not Path(str(value)).is_file():
            yield f"{key}: {value} is not there: leave the override away, or give an absolute path"
