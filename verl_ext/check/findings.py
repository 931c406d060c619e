"""One row of the check's table."""

from __future__ import annotations

from dataclasses import dataclass, field

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


@dataclass(frozen=True)
class Finding:
    """What one part of the check found.

    Attributes:
        name: the part.
        status: ok, warning (a run works, worse), failed (a run would not work), or skipped.
        text: what was found; with a cure, unless ok.
        numbers: the same as numbers; names carry their unit.
    """

    name: str
    status: str
    text: str
    numbers: dict[str, float] = field(default_factory=dict)
