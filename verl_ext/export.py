"""A checkpoint as a Hugging Face folder, held against the trainer's own numbers: `invoke export RUN`.

verl's model merger does the work. Verified: the folder loads in transformers, its logits equal those of the
weights that were trained, read straight from the checkpoint's shards, and vLLM's log-probabilities agree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.checkpoint.folder import CheckpointFolder
from verl_ext.errors import ConfigurationError, VerlAgsError
from verl_ext.runs import CHECKPOINTS, CONFIG
from verl_ext.trajectory import read_records

if TYPE_CHECKING:
    import torch

# bfloat16 has 8 bits of mantissa: logits of size 10 differ by a few hundredths between two orders of summation.
LOGIT_TOLERANCE = 0.05
PROBABILITY_TOLERANCE = 0.02
PROBES = 8


def latest_checkpoint(run_dir: Path) -> Path:
    """The `actor` folder of the newest checkpoint of a run that was saved to its end.

    Raises:
        ConfigurationError: the run has none.
    """
    newest = CheckpointFolder(run_dir / CHECKPOINTS).newest_whole()
    if newest is None:
        raise ConfigurationError(
            f"{run_dir} has no whole checkpoint: set trainer.save_freq, or let the run reach its end"
        )
    return newest[0] / "actor"


def export(run_dir: Path, target: Path) -> Path:
    """Merge the newest checkpoint into `target`, which appears whole or not at all.

    Raises:
        ConfigurationError: there is no checkpoint, `target` exists, or the merger failed.
    """
    actor = latest_checkpoint(run_dir)
    if target.exists():
        raise ConfigurationError(f"{target} is there already: delete it or choose another --out")
    scratch = target.with_name(f".{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    done = subprocess.run(
        [*command, "--local_dir", str(actor), "--target_dir", str(scratch)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(scratch, ignore_errors=True)
        words = done.stderr.strip().splitlines()
        raise ConfigurationError(f"{actor} cannot be merged: {words[-1] if words else 'no message'}")
    scratch.replace(target)
    return target


def verify(run_dir: Path, folder: Path) -> dict[str, Any]:
    """Differences between the exported model and the trained one on prompts and responses of the run.

    Returns:
        `ok`, `differences` (largest absolute logit difference in transformers, mean absolute difference of
        vLLM's probabilities of the sampled tokens), `seconds` is left to the caller.
    """
    import torch
    from transformers import AutoModelForCausalLM

    probes = _probes(run_dir)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    trained = AutoModelForCausalLM.from_config(exported.config, dtype=torch.bfloat16)
    trained.load_state_dict(_trained_weights(latest_checkpoint(run_dir)))
    logits = 0.0
    expected: list[torch.Tensor] = []
    with torch.no_grad():
        for prompt, response in probes:
            ids = torch.tensor([prompt + response])
            ours = trained(ids).logits[0].float()
            logits = max(logits, float((exported(ids).logits[0].float() - ours).abs().max()))
            probabilities = ours[len(prompt) - 1 : -1].softmax(-1)
            expected.append(probabilities.gather(-1, torch.tensor(response)[:, None])[:, 0])
    engine = _engine_probabilities(folder, probes)
    gaps = [float((torch.tensor(mine) - theirs).abs().mean()) for mine, theirs in zip(engine, expected, strict=True)]
    differences = {"largest logit difference": logits, "mean vLLM probability difference": sum(gaps) / len(gaps)}
    ok = logits <= LOGIT_TOLERANCE and sum(gaps) / len(gaps) <= PROBABILITY_TOLERANCE
    return {"ok": ok, "differences": differences, "folder": str(folder)}


def _trained_weights(actor: Path) -> dict[str, torch.Tensor]:
    """The weights as the trainer saved them, without the merger: one rank only."""
    import torch

    shards = sorted(actor.glob("model_world_size_*_rank_*.pt"))
    if len(shards) != 1:
        raise ConfigurationError(f"{actor} has {len(shards)} shards: --verify reads checkpoints of one rank")
    state = torch.load(shards[0], map_location="cpu", weights_only=False)
    full = {name: getattr(value, "_local_tensor", value) for name, value in state.items()}
    return {name: value.to(torch.bfloat16) for name, value in full.items()}


def _probes(run_dir: Path) -> list[tuple[list[int], list[int]]]:
    rows: list[tuple[list[int], list[int]]] = []
    for record in read_records(run_dir, validation=False):
        rows.append((record["prompt_ids"], record["response_ids"]))
        if len(rows) == PROBES:
            break
    if not rows:
        raise ConfigurationError(f"{run_dir} has no recorded trajectory to verify with")
    return rows


def _engine_probabilities(folder: Path, probes: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
    """vLLM's probability of each response token, one forward pass over prompt and response."""
    import math

    import torch

    # One process: the engine's own would import torch and vLLM again.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # noqa: TID251 - set for vLLM, before its import
    if not torch.cuda.is_available():
        import verl_ext.cpu  # noqa: F401 - before vLLM's import

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(str(folder), max_model_len=1024, enforce_eager=True, dtype="bfloat16", disable_log_stats=True)
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt + response) for prompt, response in probes],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    rows = []
    for (prompt, response), output in zip(probes, outputs, strict=True):
        entries = (output.prompt_logprobs or [])[len(prompt) :]
        rows.append([math.exp(entry[token].logprob) for entry, token in zip(entries, response, strict=True) if entry])
    return rows


def main(arguments: Sequence[str]) -> int:
    """Parse, export, verify; prints the folder, or JSON."""
    parser = argparse.ArgumentParser(prog="invoke export", description="Merge a checkpoint to Hugging Face format.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, help="default: RUN/export")
    parser.add_argument("--verify", action="store_true", help="load it in transformers and vLLM, compare logits")
    parser.add_argument("--json", action="store_true", help="print what was found as one line of JSON")
    options = parser.parse_args(arguments)
    try:
        if not (options.run / CONFIG).is_file():
            raise ConfigurationError(f"{options.run} is no run folder: it has no {CONFIG}")
        folder = export(options.run, options.out or options.run / "export")
        found: dict[str, Any] = {"folder": str(folder)}
        if options.verify:
            found = verify(options.run, folder)
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps(found) if options.json else f"exported to {found['folder']}: {found}") + "\n")
    return 0 if found.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
