"""Trajectories lost to our own infrastructure: found in a batch, rolled out again, or a reason to stop.

The rule, for a batch of which some trajectories are lost:

- training: up to `verl_ext.max_lost_ratio` of the batch they stay masked. Above it the service is taken to be
  down. `verl_ext.on_lost: stop` ends the run with the cause; `pause` asks the service until it answers, at most
  `verl_ext.pause_timeout_s`, and then rolls out the lost ones again, three times in a step at most.
- validation: the lost ones are rolled out again, `verl_ext.validation_retries` times, after a pause if that is what
  `on_lost` says and there were too many. What is lost for good is in no curve, and `n_valid` says how many are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

from verl_ext.agent_loop.loop import RECORD_FIELD
from verl_ext.errors import SandboxUnavailableError
from verl_ext.trajectory import LoopRecord

PROBE_EVERY_S = 15.0
TRAINING_RETRIES = 3


@dataclass(frozen=True)
class LostPolicy:
    """The settings of the rule above."""

    max_ratio: float = 0.2
    pauses: bool = True
    pause_timeout_s: float = 1800.0
    validation_retries: int = 2

    @classmethod
    def of(cls, block: Any) -> LostPolicy:
        """From the `verl_ext` block of the configuration."""
        return cls(
            float(block.max_lost_ratio),
            str(block.on_lost) == "pause",
            float(block.pause_timeout_s),
            int(block.validation_retries),
        )


@dataclass(frozen=True)
class Lost:
    """Which rows of a batch are lost, and why.

    Attributes:
        rows: their numbers.
        size: rows of the batch.
        cause: the most common one, "" if none is lost.
    """

    rows: list[int]
    size: int
    cause: str

    @classmethod
    def of(cls, output: DataProto) -> Lost:
        """Those of what the workers gave."""
        errors = [LoopRecord.from_json(text).infra_error for text in output.non_tensor_batch[RECORD_FIELD]]
        causes = Counter(error for error in errors if error)
        return cls(
            [row for row, error in enumerate(errors) if error],
            len(errors),
            causes.most_common(1)[0][0] if causes else "",
        )

    @property
    def ratio(self) -> float:
        """Share of the batch, 0 to 1."""
        return len(self.rows) / max(1, self.size)


def roll_out(
    prompts: DataProto,
    generate: Callable[[DataProto], DataProto],
    *,
    policy: LostPolicy,
    workers: int,
    wait_for_service: Callable[[str], bool],
) -> tuple[DataProto, Lost, int]:
    """A batch by the rule above.

    Args:
        prompts: verl's.
        generate: makes a batch of the same rows; called again with lost ones only.
        policy: the settings.
        workers: rows given to `generate` are made a multiple of this by repeating some.
        wait_for_service: waits until the service works again; gets the cause, and says whether it does.

    Returns:
        The batch, what is lost in it for good, and how many rows were rolled out again. The caller stops the
        run if too many of a training batch are lost.
    """
    validation = bool(prompts.meta_info.get("validate", False))
    output = generate(prompts)
    tries = retried = 0
    while (lost := Lost.of(output)).rows:
        too_many = lost.ratio > policy.max_ratio
        if tries >= (policy.validation_retries if validation else TRAINING_RETRIES):
            break
        if not validation and not (too_many and policy.pauses):
            break
        if too_many and policy.pauses and not wait_for_service(lost.cause):
            break
        tries += 1
        retried += len(lost.rows)
        padded, padding = pad_dataproto_to_divisor(prompts.select_idxs(lost.rows), workers)
        replace_rows(output, lost.rows, unpad_dataproto(generate(padded), pad_size=padding))
    return output, lost, retried


def replace_rows(output: DataProto, rows: list[int], other: DataProto) -> None:
    """Put the rows of `other` in the place of `rows` of `output`; both have the same columns."""
    for name, tensor in output.batch.items():
        tensor[rows] = other.batch[name].to(tensor.dtype)
    for name, column in output.non_tensor_batch.items():
        values = other.non_tensor_batch[name]
        if column.dtype != values.dtype:  # texts of other lengths
            column = output.non_tensor_batch[name] = column.astype(object)
        for row, value in zip(rows, values, strict=True):
            column[row] = value


def check_not_too_many(lost: Lost, step: int, policy: LostPolicy) -> None:
    """Stop before a batch is trained on that the service, not the model, has decided.

    Raises:
        SandboxUnavailableError: with the cause.
    """
    if not lost.rows or (lost.ratio <= policy.max_ratio and len(lost.rows) < lost.size):
        return
    raise SandboxUnavailableError(
        f"{len(lost.rows)} of {lost.size} trajectories of step {step} were lost, more than verl_ext.max_lost_ratio "
        f"{policy.max_ratio:g} allows: {lost.cause}. See that the sandbox service answers (`invoke check-sandbox`; "
        "logs/ in the run folder has its errors), then start the run again"
    )


def wait_until_it_works(
    probe: Callable[[], str],
    note: Callable[[str], None],
    *,
    cause: str,
    timeout_s: float,
    every_s: float = PROBE_EVERY_S,
) -> bool:
    """Ask the service again and again; whether it works in the end.

    Args:
        probe: "" if the service works, else what is wrong.
        note: told of the pause, so that the run does not look stalled.
        cause: why the pause.
        timeout_s: seconds to wait at most.
        every_s: seconds between two probes.
    """
    deadline_s = time.monotonic() + timeout_s
    note(f"paused: {cause}")
    while wrong := probe():
        if time.monotonic() + every_s > deadline_s:
            note(f"the sandbox service did not come back within {timeout_s:g} s: {wrong}")
            return False
        note(f"still paused: {wrong}")
        time.sleep(every_s)
    note("the sandbox service works again")
    return True


def lost_left_out(lost: list[bool], metrics: Callable[..., Any]) -> Callable[..., Any]:
    """verl's `process_validation_metrics` over the samples that were not lost.

    Args:
        lost: for each sample of the validation, in order; emptied by the call.
        metrics: verl's function.
    """

    def without_lost(data_sources: Any, sample_uids: list[str], infos_dict: dict[str, list[Any]], **kwargs: Any) -> Any:
        gone, lost[:] = list(lost), []
        if len(gone) != len(sample_uids) or not any(gone):
            return metrics(data_sources, sample_uids, infos_dict, **kwargs)
        kept = [index for index, is_gone in enumerate(gone) if not is_gone]
        infos = {name: [values[index] for index in kept] for name, values in infos_dict.items() if values}
        return metrics(np.asarray(data_sources)[kept], [sample_uids[index] for index in kept], infos, **kwargs)

    return without_lost
