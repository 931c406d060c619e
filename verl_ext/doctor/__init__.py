"""`invoke doctor`: what a run would meet here, each red line with its cure. Imports no torch, ray, vllm or verl."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_ext.doctor import belongings, installation, machine
from verl_ext.doctor.findings import Finding
from verl_ext.installed import installed, stack_of
from verl_ext.settings import Settings

__all__ = ["Finding", "examine", "is_well", "to_json", "to_text"]

_COLOURS = {"ok": "green", "note": "yellow", "red": "bold red"}


def examine(*, deep: bool = False) -> Iterator[Finding]:
    """Look at everything, in the order in which a run would meet it.

    Args:
        deep: import torch, flash-attn, vllm and verl too, which takes most of a minute.
    """
    settings, wrong = Settings.read()
    versions = installed()
    wants_gpu = stack_of(versions) == "gpu"
    subject = machine.subject_of(settings, on_gpu=wants_gpu)
    yield from machine.driver(settings, wants_gpu=wants_gpu)
    yield from machine.gpus(subject, wants_gpu=wants_gpu)
    yield from installation.packages(versions)
    yield from installation.imports()
    if deep:
        yield from installation.deep(versions)
    if stack_of(versions) == "cpu":
        yield from machine.cpp_compiler(subject)
    yield from machine.limits(subject)
    yield from machine.disk(settings, subject)
    yield from machine.network(subject)
    yield from machine.ray_clusters(subject)
    yield from machine.clock()
    yield from belongings.settings(settings, wrong)
    yield from belongings.model_and_data(settings)


def is_well(findings: list[Finding]) -> bool:
    """Whether no line is red."""
    return not any(finding.state == "red" for finding in findings)


def to_json(findings: list[Finding]) -> str:
    """`{"well": bool, "findings": [{"name", "state", "text", "cure"}, ...]}`."""
    return json.dumps({"well": is_well(findings), "findings": [asdict(finding) for finding in findings]}, indent=2)


def to_text(findings: list[Finding], *, colour: bool = False, width: int = 118) -> str:
    """A table, and the cures below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = f"[{_COLOURS[finding.state]}]{finding.state}[/]"
        cure = f"\n-> {finding.cure}" if finding.cure else ""
        table.add_row(mark, escape(finding.name), escape(finding.text + cure))
    bad = sum(finding.state == "red" for finding in findings)
    with io.StringIO() as page:
        console = Console(file=page, width=width, force_terminal=colour, highlight=False)
        console.print(table)
        console.print(f"\n{bad} red line(s), each with its cure behind ->" if bad else "\nno red line")
        return page.getvalue()
