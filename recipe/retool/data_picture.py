"""The report on prepared data as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BLUE, _GREY, _ORANGE = "#3b6ea5", "#b8bec6", "#d9822b"


def draw_report(report: dict, path: Path) -> None:
    """Write a PNG: what became of the rows, how long prompts are, and what answers are. Same report, same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    train = report["train"]
    _draw_rows(axes[0][0], train)
    _draw_lengths(axes[0][1], train)
    _draw_counts(axes[1][0], "Answers (training)", train["answer_kinds"])
    sources = {f"train: {name}": count for name, count in train["languages"].items()}
    sources |= {f"val: {name}": count for name, count in report["val"]["data_sources"].items()}
    _draw_counts(axes[1][1], "Languages; validation sets", sources)
    figure.suptitle(
        f"{train['rows_kept']:,} training questions of {train['rows_raw']:,} rows, "
        f"{report['val']['rows_kept']:,} for validation"
    )
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_rows(axes: Any, side: dict) -> None:
    left_out = sorted(side["rows_left_out"].items(), key=lambda item: -item[1])
    names = ["kept", *(name for name, _ in left_out)]
    counts = [side["rows_kept"], *(count for _, count in left_out)]
    _bars(axes, names, counts, [_BLUE, *[_ORANGE] * len(left_out)])
    axes.set_xscale("symlog")  # the duplicates are a hundred times the rest
    axes.set_xlim(0, 20 * max(counts))
    axes.set_title("Rows read (training), logarithmic")


def _draw_lengths(axes: Any, side: dict) -> None:
    tokens = side["prompt_tokens"]
    unit, lengths = ("tokens", tokens) if tokens else ("characters", side["prompt_chars"])
    ends = [f"≤ {end:,}" if end else "more" for end, _ in lengths["up_to"]]
    axes.bar(ends, [count for _, count in lengths["up_to"]], color=_BLUE)
    axes.tick_params(axis="x", labelrotation=60)
    axes.set_title(f"Prompts in {unit}: median {lengths['median']:,}, p99 {lengths['p99']:,}, max {lengths['max']:,}")
    axes.title.set_fontsize(10)


def _draw_counts(axes: Any, title: str, counts: dict[str, int]) -> None:
    _bars(axes, list(counts), list(counts.values()), [_BLUE] * len(counts))
    axes.set_title(title)


def _bars(axes: Any, names: Sequence[str], counts: Sequence[int], colors: Sequence[str]) -> None:
    bars = axes.barh(names, counts, color=colors)
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=3)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_color(_GREY)
