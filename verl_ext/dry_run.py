"""`invoke train --dry-run`: where each value comes from, the plan, the bare command, and every problem."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from verl_ext import bare_command
from verl_ext import compose as composition
from verl_ext.gpu_memory import GpuMemory
from verl_ext.plan import Plan
from verl_ext.request import Configured, RunRequest, configure
from verl_ext.settings import Settings, variable_named

WIDTH = 118


def dry_run(request: RunRequest, settings: Settings, wrong_settings: Sequence[str], say: Callable[[str], None]) -> None:
    """Show everything; nothing is started and nothing is written.

    What is wrong with this machine is shown and does not fail: a run can be planned on another.

    Raises:
        ConfigurationError: the configuration has problems. It is shown first, as far as it goes.
    """
    configured = configure(request, settings, wrong_settings)

    def show(text: str) -> None:
        say(settings.redacted(text))  # an override may hold a secret, which is one of the problems below

    show(_text(_layers(request, configured)))
    complaining = {problem.check for problem in configured.problems}
    if not complaining & {"value-type", "sizes", "ranges"}:
        plan = configured.subject.plan
        show(_text(_plan_table(plan)))
        show(_text(_memory_table(plan.memory)) if plan.memory else _no_memory(configured))
    if "value-type" not in complaining:
        show("The same configuration for verl alone (without our sandboxes, records and clean-up):\n")
        show(f"{bare_command.command(configured.config)}\n")
    of_machine = [problem for problem in configured.problems if problem.of_machine]
    if of_machine:
        lines = "".join(f"\n  - {problem}" for problem in of_machine)
        show(f"On this machine it would not start:{lines}\n")
    configured.without_machine().refuse_problems()
    if not of_machine:
        show("No problem was found.")


def _layers(request: RunRequest, configured: Configured) -> Table:
    table = _table("From the lowest layer to the highest; a later one wins", "layer", "where", "sets")
    table.add_row(
        "verl 0.6.1", str(composition.verl_config_dir() / "ppo_trainer.yaml"), _count(composition.verl_defaults())
    )
    for name in composition.recipe_chain(request.recipe):
        values = composition.recipe_values(name)
        table.add_row(f"recipe {name}", str(composition.CONFIG_DIR / f"{name}.yaml"), _count(values))
    hardware = configured.hardware
    found = "" if request.hardware else " (by this machine's GPUs)"
    path = composition.HARDWARE_DIR / f"{hardware}.yaml"
    table.add_row(f"hardware {hardware}{found}", str(path), _count(composition.hardware_values(hardware)))
    for override in configured.from_flags:
        key, _, value = override.partition("=")
        table.add_row("flags", key, value.strip('"'))
    for override in request.overrides:
        key, _, value = override.partition("=")
        if variable_named(key.lstrip("+")) is None:  # a setting is no override, and its value not to be shown
            table.add_row("overrides", key.lstrip("+"), value)
    return table


def _count(values: dict[str, object]) -> str:
    leaves = sum(not isinstance(value, dict) or not value for value in values.values())
    return f"{leaves} keys"


def _plan_table(plan: Plan) -> Table:
    table = _table("The plan", "", "")
    for name, value in _plan_rows(plan):
        table.add_row(name, value)
    return table


def _plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    unknown = "not known without the data"
    yield "one step", f"{plan.prompts} prompts, {plan.rollouts:,} trajectories, {plan.mini_batches} optimiser steps"
    yield (
        "one trajectory",
        (
            f"at most {plan.longest_tokens:,} tokens, {plan.turns or 'any number of'} turns, "
            f"{plan.calls_per_turn} calls a turn"
        ),
    )
    yield "tokens of a step", f"at most {plan.rollouts * plan.longest_tokens:,}"
    waiting = max(plan.sandboxes_wanted - plan.sandboxes_alive, 0)
    yield (
        "sandboxes",
        (
            f"{plan.sandboxes_wanted:,} trajectories want one, {plan.sandboxes_alive:,} may be alive"
            + (f": up to {waiting:,} wait for their turn" if waiting else "")
        ),
    )
    yield (
        "data",
        unknown if plan.train_rows is None else f"{plan.train_rows:,} rows to train on, {plan.val_rows} to judge",
    )
    yield "steps", unknown if plan.steps is None else f"{plan.steps:,}"
    if plan.validations is not None:
        yield "validations", f"{plan.validations} of {plan.val_rollouts or 0:,} trajectories"
    if plan.checkpoints is not None and plan.checkpoint_gib is not None:
        yield (
            "checkpoints",
            f"{plan.checkpoints} of {plan.checkpoint_gib:.1f} GiB, {plan.checkpoints_kept} on disk at once",
        )
    if plan.disk_gib is not None:
        yield "disk", f"at most {plan.disk_gib:.0f} GiB, if every trajectory were as long as it may be"
    if plan.host_gib is not None:
        yield "memory of the machine", f"{plan.host_gib:.0f} GiB for the trainer, beside Ray, data and 2 GiB a process"


def _memory_table(memory: GpuMemory) -> Table:
    title = f"Memory of one GPU of {memory.card_gib:.1f} GiB, by arithmetic (verl_ext/gpu_memory.py)"
    table = _table(title, "phase", "GiB", "left", "of which")
    for column in (1, 2):
        table.columns[column].justify = "right"
    for phase in memory.phases:
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in phase.parts if gib >= 0.05)
        table.add_row(phase.name, f"{phase.total_gib:.1f}", f"{memory.card_gib - phase.total_gib:.1f}", parts)
    whole = memory.cache_tokens // memory.context_tokens
    table.add_row(
        "engine's cache", "", "", f"{max(memory.cache_tokens, 0):,} tokens: {whole} trajectories of full length"
    )
    return table


def _no_memory(configured: Configured) -> str:
    if not configured.subject.on_gpu:
        return "No GPU in this run, so no table of its memory.\n"
    return "Memory of a GPU: not known without the model's config.json and verl_ext.gpu_memory_gib.\n"


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", show_header=any(columns))
    table.columns[-1].overflow = "fold"
    return table


def _text(table: Table) -> str:
    written = io.StringIO()
    # Values are no markup: [console,file] is a list.
    Console(file=written, width=WIDTH, markup=False, emoji=False).print(table)
    return written.getvalue()
