"""An exported model held against the one that was trained.

The trained one is put together from the shards without the merger, with its adapter beside the weights as in training.
The folder must load in transformers with the same logits, and vLLM's probabilities of what the run rolled out must
agree with them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.checkpoint.kept import Checkpoint
from verl_ext.errors import ConfigurationError
from verl_ext.trajectory import read_records

if TYPE_CHECKING:
    import torch

# bfloat16 has 8 bits of mantissa: logits of size 10 differ by a few hundredths between two orders of summation.
LOGIT_TOLERANCE = 0.05
# An adapter is rounded to bfloat16 once when it is merged, and at each layer when it is not: a share of the largest
# logit. A tiny model differs by 0.06 of it; without its adapter by 1.4 (tests/contract/test_export.py).
ADAPTER_LOGIT_SHARE = 0.1
PROBABILITY_TOLERANCE = 0.02
PROBES, PROBE_TOKENS = 8, 1024


def verify(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Differences between the exported model and the trained one on prompts and responses of the run.

    Returns:
        `ok`, and `differences`: largest absolute difference of a logit in transformers, mean absolute difference of
        vLLM's probabilities of the tokens.

    Raises:
        ConfigurationError: the run has no recorded trajectory, or a shard holds something else than the model.
    """
    probes = _probes(checkpoint.run_dir)
    expected, logits, tolerance = compare_in_transformers(checkpoint, folder, probes)
    gaps = [
        abs(mine - theirs)
        for found, wanted in zip(_in_vllm(folder, probes), expected, strict=True)
        for mine, theirs in zip(found, wanted, strict=True)
    ]
    gap = sum(gaps) / len(gaps)
    return {
        "ok": logits <= tolerance and gap <= PROBABILITY_TOLERANCE,
        "differences": {"largest logit difference": logits, "mean vLLM probability difference": gap},
    }


def compare_in_transformers(
    checkpoint: Checkpoint, folder: Path, probes: Sequence[list[int]]
) -> tuple[list[list[float]], float, float]:
    """The trained model's probability of each token but the first; the largest difference of a logit, and its limit."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    exported: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    exported.to(device)
    trained: Any = AutoModelForCausalLM.from_config(exported.config, dtype=torch.bfloat16)
    weights = trained_weights(checkpoint)
    has_adapter = any("lora_" in name for name in weights)
    if has_adapter:
        trained = _with_adapter(trained, checkpoint)
    trained.load_state_dict({name: value.to(torch.bfloat16) for name, value in weights.items()})
    trained.to(device).eval()
    difference, size, expected = 0.0, 0.0, []
    with torch.no_grad():
        for ids in probes:
            tokens = torch.tensor([ids], device=device)
            theirs = trained(tokens).logits[0].float()
            difference = max(difference, float((exported(tokens).logits[0].float() - theirs).abs().max()))
            size = max(size, float(theirs.abs().max()))
            probabilities = theirs[:-1].softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
            expected.append(probabilities.tolist())
    del exported, trained
    if device == "cuda":
        torch.cuda.empty_cache()  # vLLM asks for most of the card
    return expected, difference, ADAPTER_LOGIT_SHARE * size if has_adapter else LOGIT_TOLERANCE


def _with_adapter(model: Any, checkpoint: Checkpoint) -> Any:
    """As verl 0.6.1 makes it. Source: workers/fsdp_workers.py, _build_model_optimizer."""
    from omegaconf import OmegaConf
    from peft import LoraConfig, TaskType, get_peft_model

    block: Any = OmegaConf.to_container(checkpoint.config.actor_rollout_ref.model)
    same = ("lora_alpha", "target_modules", "exclude_modules")
    named = {name: block[name] for name in same}
    return get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=block["lora_rank"], bias="none", **named))


def trained_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights as the trainer saved them, put together from all shards without the merger.

    Raises:
        ConfigurationError: a shard cannot be loaded, or holds other weights than the others.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard

    shards = []
    for path in checkpoint.shards():
        try:
            shards.append(torch.load(path, map_location="cpu", weights_only=False))
        except (OSError, RuntimeError, EOFError) as error:
            raise ConfigurationError(f"{path} cannot be loaded: {error}") from error
        if shards[0].keys() != shards[-1].keys():
            raise ConfigurationError(f"{path} holds other weights than {checkpoint.shards()[0]}")
    full = {}
    for name, first in shards[0].items():
        if not isinstance(first, DTensor):
            full[name] = first
            continue
        # With replicas the last dimension of the mesh is the one that is split, and its first row is a whole model.
        placement = first.placements[-1]
        ranks = first.device_mesh.mesh.reshape(-1, first.device_mesh.mesh.shape[-1])[0].tolist()
        pieces = [shards[rank][name].to_local() for rank in ranks]
        full[name] = torch.cat(pieces, dim=placement.dim) if isinstance(placement, Shard) else pieces[0]
    return full


def _probes(run_dir: Path) -> list[list[int]]:
    """Ids of prompts with their responses, each cut to what is quick to look at."""
    found: list[list[int]] = []
    for record in read_records(run_dir, validation=False):
        found.append((record["prompt_ids"] + record["response_ids"])[:PROBE_TOKENS])
        if len(found) == PROBES:
            break
    if not found:
        raise ConfigurationError(f"{run_dir} has no recorded trajectory to verify with")
    return found


def _in_vllm(folder: Path, probes: Sequence[list[int]]) -> list[list[float]]:
    """vLLM's probability of each token but the first, in one forward pass."""
    import torch

    # One process: the engine's own would import torch and vLLM again.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # noqa: TID251 - set for vLLM, before its import
    if not torch.cuda.is_available():
        import verl_ext.cpu  # noqa: F401 - before vLLM's import

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(str(folder), max_model_len=PROBE_TOKENS + 1, enforce_eager=True, dtype="bfloat16",
                 disable_log_stats=True)  # fmt: skip
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in probes],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    rows = []
    for ids, output in zip(probes, outputs, strict=True):
        entries = output.prompt_logprobs or []  # None for the first token
        rows.append([math.exp(entry[token].logprob) for entry, token in zip(entries, ids, strict=True) if entry])
    return rows
