"""`python -m verl_ext.alarms`: the table of the alarms as README.md in this folder has it."""

from __future__ import annotations

import sys

from verl_ext.alarms.rules import RULES, Rule

COLUMNS = ("alarm", "watches", "starts", "ends", "likely cause", "what to do", "source of the numbers")


def table() -> str:
    """All rules, one row each, as Markdown."""
    rows = (COLUMNS, ("---",) * len(COLUMNS), *map(_cells, RULES))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cells(rule: Rule) -> tuple[str, ...]:
    return f"`{rule.name}`", rule.what, rule.condition, rule.way_back, rule.cause, rule.cure, rule.source


if __name__ == "__main__":
    sys.stdout.write(table())
