"""The tables that `invoke evaluate` ends with, from summary.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

LABELS = {"no_tools": "no tools", "tools": "tools", "trained": "tools, after training"}


def tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """One table of the settings side by side for each data set, and one of their differences if there are several."""
    for data_source in dict.fromkeys(entry["data_source"] for entry in summary["results"]):
        yield _side_by_side(summary, [one for one in summary["results"] if one["data_source"] == data_source])
    if summary["differences"]:
        yield _differences(summary)


def _side_by_side(summary: Mapping[str, Any], results: list[Mapping[str, Any]]) -> Table:
    results.sort(key=lambda entry: list(LABELS).index(entry["setting"]))
    unfinished = "" if summary["complete"] else ", unfinished"
    table = Table(title=f"{results[0]['data_source']}: {summary['subject']['name']}{unfinished}")
    table.add_column("")
    for entry in results:
        table.add_column(LABELS[entry["setting"]], justify="right")
    for name, cell in _rows(summary, min(entry["k"] for entry in results)).items():
        table.add_row(name, *(cell(entry) for entry in results))
    return table


def _rows(summary: Mapping[str, Any], k: int) -> dict[str, Any]:
    percent = f"{summary['statistics']['confidence']:.0%}"
    return {
        f"mean@{k}": lambda one: _number(one["mean"]),
        f"  {percent} interval over problems": lambda one: f"{_number(one['low'])} to {_number(one['high'])}",
        f"pass@{k}": lambda one: _number(one["pass_at_k"].get(str(k))),
        f"majority@{k}": lambda one: _number(one["majority_at_k"].get(str(k))),
        "problems": lambda one: str(one["problems"]),
        "samples, lost": lambda one: f"{one['samples']}, {one['lost']}",
        "assistant turns": lambda one: f"{one['turns']:.2f}",
        "tool calls a sample": lambda one: f"{one['tool_calls']:.2f}",
        "samples with a tool call": lambda one: f"{one['tool_use_ratio']:.1%}",
        "tool errors": lambda one: f"{one['tool_error_ratio']:.1%}",
        "calls that cannot be read": lambda one: f"{one['parse_failure_ratio']:.1%}",
        "truncated": lambda one: f"{one['truncated_ratio']:.1%}",
        "no answer found": lambda one: f"{one['no_answer_ratio']:.1%}",
        "response tokens, mean": lambda one: _tokens(one["response_tokens"]["mean"]),
        "response tokens, 95th percentile": lambda one: _tokens(one["response_tokens"]["p95"]),
    }


def _differences(summary: Mapping[str, Any]) -> Table:
    table = Table("data", "from", "to", title="Differences of the mean, problem by problem")
    table.add_column("difference", justify="right")
    table.add_column(f"{summary['statistics']['confidence']:.0%} interval", justify="right")
    for entry in summary["differences"]:
        table.add_row(
            entry["data_source"], LABELS[entry["from"]], LABELS[entry["to"]], f"{entry['difference']:+.3f}",
            f"{entry['low']:+.3f} to {entry['high']:+.3f}",
        )  # fmt: skip
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
