"""What a check of the doctor says: one line, its colour, and the cure of a red one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "red"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at.
        state: ok; note: worth knowing, and wrong for some runs; red: a run will fail.
        text: what was found.
        cure: what to do; every red line has one.
    """

    name: str
    state: State
    text: str
    cure: str = ""

    def __post_init__(self) -> None:
        if self.state == "red" and not self.cure:
            raise ValueError(f"the red line {self.name!r} has no cure")


def ok(name: str, text: str) -> Finding:
    """As it should be."""
    return Finding(name, "ok", text)


def note(name: str, text: str, cure: str = "") -> Finding:
    """Worth knowing."""
    return Finding(name, "note", text, cure)


def red(name: str, problem: str) -> Finding:
    """A problem in the form that this project's messages have: what is wrong: the cure."""
    text, _, cure = problem.rpartition(": ")
    return Finding(name, "red", text or problem, cure)
