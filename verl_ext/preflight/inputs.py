"""Checks of what the run reads: the model's folder, the data, the tool, and whether prompts fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_ext.compose import hub_ids
from verl_ext.data_root import hub_id_of, raw_data_folder
from verl_ext.errors import ConfigurationError
from verl_ext.model_shape import read_shape, weight_problems
from verl_ext.parquet_files import prompts_longer_than
from verl_ext.preflight.subject import DATA, TOOL_EXAMPLE, Subject
from verl_ext.prompt_length import PromptLengths
from verl_ext.prompt_length import chat_template as template_of

_COLUMNS = frozenset({"prompt", "data_source", "reward_model"})
_FILES = {"train_files": "train.parquet", "val_files": "val.parquet"}
_PREPARE = "make it with `invoke prepare-data`"
# Any tokenizer makes at most one token of a byte, so shorter prompts need not be counted; a little for the marks.
_MARKS = 64


def model(subject: Subject) -> Iterator[str]:
    """A folder with a decoder in it."""
    try:
        read_shape(subject.model)
    except ConfigurationError as error:
        hub_id = hub_id_of(subject.model)
        fetch = f"fetch it with `invoke download --model {hub_id}`, or " if hub_id else ""
        yield f"{error}: {fetch}give its folder with --model"


def weights(subject: Subject) -> Iterator[str]:
    """Whole: a download that broke off leaves a folder that looks like a model."""
    for problem in weight_problems(subject.model):
        yield f"{problem}: fetch it again with `invoke download`, which goes on where it broke off"


_RESUME_MODES = ("disable", "auto", "resume_path")


def resume_path(subject: Subject) -> Iterator[str]:
    """A checkpoint to go on from; verl asserts it when its workers are up. Its data are looked at in resume.py."""
    mode, path = subject.get("trainer.resume_mode"), subject.get("trainer.resume_from_path")
    if mode not in _RESUME_MODES:
        yield f"trainer.resume_mode is {mode!r}: verl knows {', '.join(_RESUME_MODES)}"
    elif mode == "resume_path":
        cure = "give trainer.resume_from_path a folder runs/RUN/checkpoints/global_step_N"
        if not path:
            yield f"trainer.resume_mode is resume_path, but there is no path: {cure}"
        elif not Path(str(path)).expanduser().is_dir() or not Path(str(path)).name.startswith("global_step_"):
            yield f"trainer.resume_from_path {path} is no checkpoint: {cure}"
    elif path:
        yield f"trainer.resume_from_path is set, but resume_mode is {mode}: set trainer.resume_mode=resume_path"


def data_files(subject: Subject) -> Iterator[str]:
    """There, and parquet."""
    for name in DATA:
        if not subject.footers[name]:
            yield f"data.{name} names no file: make one with `invoke prepare-data`"
        for path, found in subject.footers[name].items():
            if path.is_dir():
                yield f"data.{name}: {path} is a folder: name the file in it, as {path / _FILES[name]}"
            elif not path.is_file():
                yield f"data.{name}: {path} is not there: {_make(subject)}"
            elif found is None:
                yield f"data.{name}: {path} is no parquet file that can be read: {_PREPARE}"


def _make(subject: Subject) -> str:
    """The commands that are still to be run for prepared data."""
    ids, root = hub_ids(), subject.settings.data_root
    missing = [name for name in ("train", "val") if not raw_data_folder(root, ids[name]).is_dir()]
    return "make it with `invoke download` and then `invoke prepare-data`" if missing else _PREPARE


def data_columns(subject: Subject) -> Iterator[str]:
    """verl's columns; the hub's own files have others."""
    for name in DATA:
        for path, found in subject.footers[name].items():
            missing = sorted(_COLUMNS - found.columns) if found else []
            if missing:
                yield f"data.{name}: {path} has no column {', '.join(missing)}, so it is not prepared: {_PREPARE}"


def data_rows(subject: Subject) -> Iterator[str]:
    """verl drops an incomplete batch, and asserts that there is one at all."""
    rows = {name: sum(found.rows for found in subject.footers[name].values() if found) for name in DATA}
    batch = subject.config.data.train_batch_size
    if rows["train_files"] < batch:
        yield (
            f"data.train_files has {rows['train_files']} rows, fewer than one batch of data.train_batch_size {batch}: "
            "give more data, or a smaller batch"
        )
    if not rows["val_files"]:
        yield "data.val_files has no rows: give at least one"


def data_pair(subject: Subject) -> Iterator[str]:
    """Files of one folder are of one `prepare-data`; one killed between two renames leaves a new and an old."""
    prepared: dict[Path, dict[str, set[str]]] = {}
    for name in DATA:
        for path, found in subject.footers[name].items():
            if found and found.prepared:
                prepared.setdefault(path.parent, {}).setdefault(found.prepared, set()).add(path.name)
    for folder, names in prepared.items():
        if len(names) > 1:
            one, other, *_ = (" and ".join(sorted(group)) for group in names.values())
            yield f"{folder}: {one} and {other} are of two runs of `invoke prepare-data`: run it again"


def tool_file(subject: Subject) -> Iterator[str]:
    """verl's tool file, with a block that the tool takes."""
    try:
        entry = subject.tool
    except ConfigurationError as error:
        yield str(error)
        return
    if not entry:
        return
    block = {name: value for name, value in entry["config"].items() if name != "type"}
    for name in ("call_timeout_s", "sandbox_ttl_s", "acquire_timeout_s", "max_output_chars"):
        value = block.pop(name, 1)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            yield f"tool config: {name} is {value!r}: it must be a number above 0"
    for name in sorted(block):
        yield f"tool config: {name} is unknown: see {TOOL_EXAMPLE}"
    shown = entry["config"].get("max_output_chars", 4096)
    longest = subject.get("actor_rollout_ref.rollout.multi_turn.max_tool_response_length")
    if isinstance(shown, int) and shown > longest:
        yield (
            f"tool config: max_output_chars {shown} is more than verl's own cut, "
            f"actor_rollout_ref.rollout.multi_turn.max_tool_response_length {longest}, which does not say what it "
            "cut: raise the second"
        )
    if entry["config"].get("call_timeout_s", 30) >= entry["config"].get("sandbox_ttl_s", 300):
        yield "tool config: call_timeout_s is not below sandbox_ttl_s, so a sandbox would end in its first call"


def chat_template(subject: Subject) -> Iterator[str]:
    """One that tells the model of tools."""
    if not (subject.model / "tokenizer.json").is_file() or not subject.tool:
        return  # `weights` says what is missing; without tools any template will do
    try:
        template = template_of(subject.model)
    except ConfigurationError as error:
        yield f"{error}: take an instruction-tuned model"
        return
    if "tools" not in template:
        yield (
            f"the chat template of {subject.model} knows no tools, so the model would never hear of the code "
            "interpreter: take a model that was tuned to use tools"
        )


def prompt_length(subject: Subject) -> Iterator[str]:
    """The tool's schema is part of every prompt, and a prompt that is too long ends the run at its step."""
    config, limit = subject.config, subject.config.data.max_prompt_length
    schemas = [subject.tool["tool_schema"]] if subject.tool else []
    try:
        lengths = PromptLengths(subject.model, schemas, dict(config.data.get("apply_chat_template_kwargs") or {}))
        fixed = lengths.count([{"role": "user", "content": ""}])
        if fixed >= limit:
            yield (
                f"the chat template and the tool's schema alone take {fixed} tokens, and data.max_prompt_length is "
                f"{limit}: raise it"
            )
            return
        for name in DATA:
            longer = [
                count
                for path in subject.footers[name]
                for prompt in prompts_longer_than(path, limit - fixed - _MARKS)
                if (count := lengths.count(prompt)) > limit
            ]
            yield from _too_long(subject, name, longer, limit)
    except ConfigurationError as error:
        yield str(error)


def _too_long(subject: Subject, name: str, counts: list[int], limit: int) -> Iterator[str]:
    if not counts:
        return
    rows = sum(found.rows for found in subject.footers[name].values() if found)
    needed = subject.config.data.train_batch_size if name == "train_files" else 1
    if not subject.config.data.filter_overlong_prompts:
        yield (
            f"data.{name}: {len(counts)} prompts have more than data.max_prompt_length {limit} tokens with the tool's "
            f"schema, the longest {max(counts)}: set data.filter_overlong_prompts=true, or raise the limit"
        )
    elif rows - len(counts) < needed:
        yield (
            f"data.{name}: {len(counts)} of {rows} prompts have more than data.max_prompt_length {limit} tokens with "
            f"the tool's schema and are left out, so {rows - len(counts)} are left of the {needed} that are needed: "
            "raise the limit"
        )


def context_length(subject: Subject) -> Iterator[str]:
    """The engine's longest sequence is prompt + response (verl 0.6.1 vllm_async_server.py)."""
    data, shape = subject.config.data, subject.shape
    longest = data.max_prompt_length + data.max_response_length
    if shape and shape.max_positions and longest > shape.max_positions:
        yield (
            f"prompt + response = {longest} tokens, and the model was made for {shape.max_positions}: lower "
            "data.max_response_length"
        )
