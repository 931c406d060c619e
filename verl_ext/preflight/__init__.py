"""What can be known to fail before Ray starts, said all at once, each with its cure.

`CHECKS` is the list; README.md in this folder is the same for people, with the test of each. A check is a
function from a `Subject` to messages. One whose inputs another check already complained of is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from omegaconf import DictConfig

from verl_ext.errors import ConfigurationError
from verl_ext.preflight import compiler, configuration, inputs, machine, parallel, watching
from verl_ext.preflight.subject import Subject
from verl_ext.settings import Settings

__all__ = ["CHECKS", "Check", "Problem", "Subject", "check", "headline", "look"]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: for people, and for `verl_ext.waive`.
        find: the check.
        after: checks that must have found nothing for this one to make sense.
        of_machine: whether it looks at this machine, not at what the user wrote.
    """

    name: str
    find: Callable[[Subject], Iterator[str]]
    after: tuple[str, ...] = ()
    of_machine: bool = False


_SOUND = ("value-type", "sizes")
CHECKS: tuple[Check, ...] = (
    Check("value-type", configuration.value_type),
    Check("sizes", configuration.sizes),
    Check("ranges", configuration.ranges, ("value-type",)),
    Check("secret", configuration.secret),
    Check("stale-weights", configuration.stale_weights, ("value-type",)),
    Check("rollout-mode", configuration.rollout_mode, ("value-type",)),
    Check("tool-response", configuration.tool_response, ("value-type",)),
    Check("false-options", configuration.false_options, ("value-type",)),
    Check("estimator", configuration.estimator, _SOUND),
    Check("one-checkpoint", configuration.one_checkpoint, ("value-type",)),
    Check("logger", watching.logger, ("value-type",)),
    Check("stop-on", watching.stop_on, ("value-type",)),
    Check("agent-loop", configuration.agent_loop, ("value-type",)),
    Check("named-files", configuration.named_files),
    Check("lost-rule", configuration.lost_rule, ("value-type",)),
    Check("sandbox-limits", configuration.sandbox_limits, _SOUND),
    Check("workers", parallel.workers, _SOUND),
    Check("mini-batch", parallel.mini_batch, _SOUND),
    Check("micro-batch", parallel.micro_batch, _SOUND),
    Check("gpu-split", parallel.gpu_split, _SOUND),
    Check("heads", parallel.heads, (*_SOUND, "model")),
    Check("model", inputs.model),
    Check("weights", inputs.weights, ("model",)),
    Check("resume-path", inputs.resume_path, ("value-type",)),
    Check("data-files", inputs.data_files),
    Check("data-columns", inputs.data_columns, ("data-files",)),
    Check("data-rows", inputs.data_rows, (*_SOUND, "data-files")),
    Check("data-pair", inputs.data_pair, (*_SOUND, "data-files")),
    Check("tool-file", inputs.tool_file, ("value-type", "named-files", "tool-response")),
    Check("chat-template", inputs.chat_template, ("model", "tool-file", "value-type", "named-files")),
    Check("prompt-length", inputs.prompt_length, (*_SOUND, "model", "weights", "data-columns", "data-files",
                                                  "tool-file", "named-files", "chat-template")),
    Check("context-length", inputs.context_length, (*_SOUND, "model")),
    Check("token-budget", parallel.token_budget, _SOUND),
    Check("gpu-memory", parallel.gpu_memory, (*_SOUND, "ranges", "gpu-split", "model")),
    Check("gpus", machine.gpus, _SOUND, of_machine=True),
    Check("cuda-library", machine.cuda_library, of_machine=True),
    Check("gpu-busy", machine.gpu_busy, (*_SOUND, "gpus"), of_machine=True),
    Check("cascade-attention", machine.cascade_attention, (*_SOUND, "gpus"), of_machine=True),
    Check("kernels", machine.kernels, ("value-type",), of_machine=True),
    Check("compiler", compiler.compiler, of_machine=True),
    Check("ray-address", machine.ray_address, of_machine=True),
    Check("ray-running", machine.ray_running, of_machine=True),
    Check("open-files", machine.open_files, of_machine=True),
    Check("processes", machine.processes, of_machine=True),
    Check("shared-memory", machine.shared_memory, _SOUND, of_machine=True),
    Check("host-memory", machine.host_memory, (*_SOUND, "model"), of_machine=True),
    Check("disk", machine.disk, (*_SOUND, "mini-batch", "model"), of_machine=True),
    Check("tmp-disk", machine.tmp_disk, of_machine=True),
    Check("allocator", machine.allocator, of_machine=True),
    Check("ports", machine.ports, ("value-type",), of_machine=True),
    Check("sandbox-server", machine.sandbox_server, of_machine=True),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """What a check found."""

    text: str
    check: str
    of_machine: bool = False

    def __str__(self) -> str:
        return f"{self.text} [{self.check}]"


def look(subject: Subject) -> list[Problem]:
    """Everything that is wrong; what `verl_ext.waive` names is left out."""
    waived = subject.get("verl_ext.waive")
    waived = list(waived) if waived is not None and not isinstance(waived, str) else [waived] if waived else []
    found = list(_unknown_waivers(waived))
    complained: set[str] = set()
    for item in CHECKS:
        if complained.intersection(item.after):
            continue
        texts = list(item.find(subject))
        if texts:
            complained.add(item.name)
        if item.name not in waived:
            found += [Problem(text, item.name, item.of_machine) for text in texts]
    return found


def _unknown_waivers(waived: list[str]) -> Iterator[Problem]:
    names = [item.name for item in CHECKS]
    for name in waived:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            yield Problem(f"verl_ext.waive names {name!r}, which is no check: {hint}", "waive")


def check(config: DictConfig, settings: Settings) -> None:
    """Refuse a resolved configuration that would fail later.

    Raises:
        ConfigurationError: with every problem found.
    """
    problems = look(Subject(config, settings))
    if problems:
        raise ConfigurationError.listing(headline(len(problems)), map(str, problems))


def headline(count: int) -> str:
    """The first line of a list of problems."""
    return f"{count} problem(s) before the start"
