"""The README.md of an exported checkpoint, made from what the run left: nothing in it is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl_ext.checkpoint.kept import Checkpoint
from verl_ext.data_root import hub_id_of
from verl_ext.manifest import sha256
from verl_ext.parquet_files import files
from verl_ext.runs import MANIFEST, METRICS, read_jsonl

# What a reader wants to know of how it was trained; all of it is in the run's config.yaml.
_KEYS = (
    "algorithm.adv_estimator", "data.train_batch_size", "data.max_prompt_length", "data.max_response_length",
    "data.seed", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c", "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "actor_rollout_ref.rollout.multi_turn.format",
    "custom_reward_function.reward_kwargs",
)  # fmt: skip
_METRICS = {
    "agent/reward_mean": "reward",
    "agent/accuracy": "accuracy on training problems",
    "agent/tool_use_ratio": "trajectories with a tool call",
    "agent/tool_error_ratio": "tool calls that failed",
    "agent/truncated_ratio": "trajectories cut at the longest response",
    "agent/response_tokens": "response tokens",
    "actor/entropy": "entropy",
    "training/rollout_probs_diff_mean": "probability difference between engine and trainer",
}


def model_card(checkpoint: Checkpoint, folder: Path) -> str:
    """The card of the model in `folder`; names no path of this machine.

    A fact that the run did not leave is left out.
    """
    manifest = _manifest(checkpoint.run_dir)
    name, revision = _base(checkpoint, manifest)
    verl = manifest.get("versions", {}).get("verl")
    lines = [
        "---",
        *([f"base_model: {name}"] if revision else []),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, verl, tool-use, code-interpreter]",
        "---",
        f"# {checkpoint.run_dir.name}, step {checkpoint.step}",
        "",
        f"{name}{f' at {revision}' if revision else ''} after {checkpoint.step} steps of reinforcement learning with a "
        f"code interpreter, by verl-ags{f' on verl {verl}' if verl else ''}. The base model's licence applies.",
        "",
        "## Data",
        "",
        *_table(("file", "used for", "sha256"), _data(checkpoint, manifest)),
        "## Configuration",
        "",
        *_table(("key", "value"), _configuration(checkpoint)),
        "## Metrics of the run",
        "",
        *_table(("", "first step", f"step {checkpoint.step}"), _metrics(checkpoint)),
        *_table(("validation", "step", "mean"), _validations(checkpoint)),
        "## Use",
        "",
        "The model was trained with the tools below in its chat template, on questions that end with an instruction to "
        "put the answer into `\\boxed{}`.",
        "",
        "```json",
        json.dumps(_tools(checkpoint), indent=2),
        "```",
        "",
        "## Versions",
        "",
        *_table(("", ""), _versions(manifest)),
        "## Files",
        "",
        *_table(("file", "bytes", "sha256"), _files(folder)),
    ]
    return "\n".join(lines)


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        return []
    return [_row(titles), _row(["---"] * len(titles)), *map(_row, cells), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _manifest(run_dir: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((run_dir / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _base(checkpoint: Checkpoint, manifest: dict[str, Any]) -> tuple[str, str]:
    """Name and revision of the base model; the revision is "" where nobody fetched it from a hub."""
    download = (manifest.get("model") or {}).get("download") or {}
    folder = Path(str(checkpoint.config.actor_rollout_ref.model.path))
    return hub_id_of(folder) or folder.name, str(download.get("revision", ""))


def _data(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Sequence[object]]:
    contents = {entry["path"]: entry["content_sha256"] for entry in manifest.get("train_data", [])}
    for use in ("train", "val"):
        for path in files(checkpoint.config.data[f"{use}_files"]):
            if str(path) in contents:
                yield path.name, "training", f"{contents[str(path)]} (of its rows)"
            elif (of_bytes := manifest.get("data", {}).get(str(path))) is not None:
                yield path.name, "training" if use == "train" else "validation", f"{of_bytes} (of its bytes)"


def _configuration(checkpoint: Checkpoint) -> Iterator[Sequence[object]]:
    for key in _KEYS:
        value = OmegaConf.select(checkpoint.config, key)
        if value is not None:
            yield f"`{key}`", OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _metrics(checkpoint: Checkpoint) -> Iterator[Sequence[object]]:
    lines = [line for line in _lines(checkpoint) if "agent/reward_mean" in line["data"]]
    for name, label in _METRICS.items():
        values = [line["data"][name] for line in lines if line["data"].get(name) is not None]
        if values:
            yield label, f"{values[0]:.4g}", f"{values[-1]:.4g}"


def _validations(checkpoint: Checkpoint) -> Iterator[Sequence[object]]:
    for line in _lines(checkpoint):
        for name, value in line["data"].items():
            if name.startswith("val-core/") and value is not None:
                yield name.removeprefix("val-core/"), line["step"], f"{value:.4g}"


def _lines(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What was logged up to the checkpoint: a run goes on behind it."""
    return [line for line in read_jsonl(checkpoint.run_dir / METRICS) if line["step"] <= checkpoint.step]


def _tools(checkpoint: Checkpoint) -> list[Any]:
    path = checkpoint.config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    try:
        return [tool["tool_schema"] for tool in yaml.safe_load(Path(str(path)).read_text(encoding="utf-8"))["tools"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError):  # of a checkout that is gone
        return []


def _versions(manifest: dict[str, Any]) -> Iterator[Sequence[object]]:
    if manifest.get("git_revision"):
        yield "verl-ags", manifest["git_revision"]
    yield from manifest.get("versions", {}).items()


def _files(folder: Path) -> Iterator[Sequence[object]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder), path.stat().st_size, sha256(path)
