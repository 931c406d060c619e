"""The panels of curves, of one run or of several over each other, drawn by plotly in the browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go

from verl_ext.alarms import STARTED
from verl_ext.report.accuracy import Accuracy
from verl_ext.report.run_folder import Run

# Read on white and on black; the first is the training's own, the second the validation's.
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a78bfa", "#06b6d4", "#ec4899", "#84cc16", "#94a3b8")
HEIGHT_PX = 270
_ALARM = "#ef4444"
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")
_VALIDATION = re.compile(r"val-core/(?P<source>.+)/acc/(?P<score>mean@\d+)")
# What a training step is made of, in its order; whatever else it took is "other".
PHASES = {
    "timing_s/gen": "rollout", "timing_s/reward": "reward", "timing_s/old_log_prob": "old log-prob",
    "timing_s/ref": "reference log-prob", "timing_s/values": "values", "timing_s/adv": "advantage",
    "timing_s/update_critic": "update critic", "timing_s/update_actor": "update actor",
}  # fmt: skip
# Beside the step, not in it (verl/trainer/ppo/ray_trainer.py@v0.6.1, fit).
BESIDE_STEP = {"timing_s/testing": "validation", "timing_s/save_checkpoint": "checkpoint"}


@dataclass(frozen=True)
class Series:
    """One logged number of a panel."""

    key: str
    label: str
    validation: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title: over it.
        about: what to see in it, one sentence.
        series: numbers of metrics.jsonl; those that were not logged are left out.
        unit: of the y axis.
        kind: lines, the accuracies with their intervals, or the stacked phases of a step.
        alarms: whose steps are marked in it, of one run alone.
    """

    title: str
    about: str
    series: tuple[Series, ...] = ()
    unit: str = ""
    kind: Literal["lines", "accuracy", "phases"] = "lines"
    alarms: tuple[str, ...] = ()


PANELS = (
    Panel(
        "Reward", "Mean over a step's trajectories, lost ones left out.",
        (Series("agent/reward_mean", "training"), Series("val-agent/reward_mean", "validation", validation=True)),
        alarms=("no-signal", "reward-flat", "reward-collapsed"),
    ),
    Panel(
        "Accuracy", "With the 95 % interval; prompts are what varies, not the samples of one prompt.", kind="accuracy",
    ),
    Panel(
        "Response length", "Tool output included; what is trained on is the model's own part.",
        (Series("agent/response_tokens", "mean"), Series("response_length/max", "longest"),
         Series("agent/trained_tokens", "mean trained on"),
         Series("val-agent/response_tokens", "validation mean", validation=True)), "tokens",
        alarms=("length-explosion",),
    ),
    Panel(
        "Turns", "The assistant's turns of a trajectory.",
        (Series("agent/assistant_turns", "training"),
         Series("val-agent/assistant_turns", "validation", validation=True)), "turns",
    ),
    Panel(
        "Tool calls", "Of a trajectory; and the share of trajectories with at least one.",
        (Series("agent/tool_calls_per_trajectory", "calls"), Series("agent/tool_use_ratio", "share with a call"),
         Series("val-agent/tool_calls_per_trajectory", "validation calls", validation=True)), "calls",
        alarms=("tools-never-called",),
    ),
    Panel(
        "Errors", "Shares: of the calls that ran, of all calls, of all trajectories.",
        (Series("agent/tool_error_ratio", "tool errors"), Series("agent/tool_timeout_ratio", "tool timeouts"),
         Series("agent/parse_failure_ratio", "calls not readable"), Series("agent/truncated_ratio", "cut by length"),
         Series("agent/out_of_turns_ratio", "out of turns")), "share",
        alarms=("parse-failures", "tool-errors", "truncation"),
    ),
    Panel(
        "Lost trajectories", "Our infrastructure failed: masked, left out of their group, never a wrong answer.",
        (Series("agent/infra_failed", "training"), Series("val-agent/infra_failed", "validation", validation=True),
         Series("agent/retried", "rolled out again")), "trajectories", alarms=("infra-failures",),
    ),
    Panel("Entropy", "Of the policy, a token. Near 0 nothing is explored any more.",
          (Series("actor/entropy", "entropy"),), "nats", alarms=("entropy-collapse",)),
    Panel(
        "KL divergence", "Of one update (old to new policy), to the reference, and from engine to trainer.",
        (Series("actor/ppo_kl", "update"), Series("actor/kl_loss", "to the reference"),
         Series("actor/reward_kl_penalty", "in the reward"), Series("rollout_corr/kl", "engine to trainer")), "nats",
    ),
    Panel("Gradient norm", "Before clipping.", (Series("actor/grad_norm", "norm"),),
          alarms=("grad-norm", "not-finite")),
    Panel(
        "Clipped", "Share of tokens whose ratio met the clip range.",
        (Series("actor/pg_clipfrac", "clipped"), Series("actor/pg_clipfrac_lower", "clipped below")), "share",
    ),
    Panel(
        "Rollout and training disagree",
        "Difference of the sampled tokens' probabilities, engine against trainer: the policy that generates must be "
        "the one that is trained.",
        (Series("training/rollout_probs_diff_mean", "mean"), Series("training/rollout_probs_diff_max", "largest")),
        "probability", alarms=("probability-difference",),
    ),
    Panel("Throughput", "Tokens of prompts and responses over a step's time, a GPU (verl's count).",
          (Series("perf/throughput", "tokens/s"),), "tokens/s", alarms=("throughput-drop",)),
    Panel("Time of a step", "Where it goes; validation and checkpoints stand on top of it.", (), "s", kind="phases"),
    Panel(
        "Sandboxes", "Seconds that a trajectory waits: for a free place, and until a sandbox is there.",
        (Series("sandbox/wait_s/p50", "place, median"), Series("sandbox/wait_s/p95", "place, p95"),
         Series("sandbox/acquire_s/p50", "ready, median"), Series("sandbox/acquire_s/p95", "ready, p95"),
         Series("sandbox/execute_s/p95", "one call, p95")), "s",
    ),
    Panel("Waiting share", "Share of the trajectories' time that was waiting for a sandbox.",
          (Series("sandbox/waiting_share", "waiting"),), "share", alarms=("sandbox-waiting",)),
)  # fmt: skip


def draw(runs: Sequence[Run], accuracies: Sequence[Sequence[Accuracy]]) -> list[dict[str, Any]]:
    """The panels that have something to show: `title`, `about`, and plotly's `figure` as JSON can hold it.

    Args:
        runs: one, or several to be drawn over each other, one colour each.
        accuracies: from `accuracy.read_accuracies`, for each run.
    """
    drawn = []
    for panel in PANELS:
        traces = list(_traces(panel, runs, accuracies))
        if not traces:
            continue
        layout = _layout(panel, stacked=panel.kind == "phases" and len(runs) == 1)
        layout.height = HEIGHT_PX if len(runs) == 1 else HEIGHT_PX + 22 * (1 + len(traces) // len(runs))  # the legend
        figure = go.Figure(traces, layout)
        if len(runs) == 1:  # several runs' marks over each other could not be told apart
            _mark(figure, panel.alarms, runs[0])
        drawn.append({"title": panel.title, "about": panel.about, "figure": json.loads(figure.to_json() or "")})
    return drawn


def _traces(
    panel: Panel, runs: Sequence[Run], accuracies: Sequence[Sequence[Accuracy]]
) -> Iterator[go.Scatter | go.Bar]:
    for number, (run, found) in enumerate(zip(runs, accuracies, strict=True)):
        look = _Look(run.name, COLORS[number % len(COLORS)]) if len(runs) > 1 else _Look()
        match panel.kind:
            case "accuracy":
                yield from _accuracy(run, found, look)
            case "phases" if len(runs) == 1:
                yield from _phases(run)
            case "phases":
                steps, seconds = run.series("timing_s/step")
                if steps:
                    yield look.line(steps, seconds, "step", 0)
            case _:
                yield from _lines(panel, run, look)


def _mark(figure: go.Figure, alarms: Sequence[str], run: Run) -> None:
    """Tint the steps at which an alarm was on, with its name."""
    last = max(run.metrics, default=0)
    for number, name in enumerate(alarms):
        began: int | None = None
        spans = []
        for event in run.alarms:
            if event.get("alarm") != name or not isinstance(event.get("step"), int):
                continue
            if event.get("state") == STARTED:
                began = event["step"]
            elif began is not None:
                spans.append((began, event["step"]))
                began = None
        if began is not None:
            spans.append((began, max(began, last)))
        for first, end in spans:
            figure.add_vrect(
                x0=first - 0.5, x1=end + 0.5, fillcolor=_ALARM, opacity=0.12, line_width=0, layer="below",
                annotation={"text": name, "font": {"size": 10, "color": _ALARM}, "yshift": -12 * number},
                annotation_position="top left",
            )  # fmt: skip


@dataclass(frozen=True)
class _Look:
    """How the series of one run look: a colour each, or with several runs one colour and a dash each."""

    run: str = ""
    color: str = ""

    def line(self, x: Sequence[int], y: Sequence[float], label: str, number: int, **others: Any) -> go.Scatter:
        color = self.color or COLORS[number % len(COLORS)]
        dash = _DASHES[number % len(_DASHES)] if self.color else "solid"
        looks: dict[str, Any] = {
            "mode": "lines+markers" if len(x) < 60 else "lines",
            "line": {"color": color, "dash": dash, "width": 1.8},
            "marker": {"size": 4, "color": color},
        }
        if self.run:
            looks |= {"legendgroup": self.run, "legendgrouptitle": {"text": self.run}}
        return go.Scatter(x=list(x), y=list(y), name=label, **looks | others)


def _lines(panel: Panel, run: Run, look: _Look) -> Iterator[go.Scatter]:
    for number, series in enumerate(panel.series):
        steps, values = run.series(series.key)
        if steps:
            yield look.line(steps, values, series.label, number, **_points(number, look) if series.validation else {})


def _points(number: int, look: _Look) -> dict[str, Any]:
    """Validations are few: larger points, joined."""
    color = look.color or COLORS[number % len(COLORS)]
    return {"mode": "lines+markers", "marker": {"size": 7, "symbol": "diamond", "color": color}}


def _accuracy(run: Run, found: Sequence[Accuracy], look: _Look) -> Iterator[go.Scatter]:
    training = [one for one in found if not one.validation]
    steps, values = run.series("agent/accuracy")
    if training:
        color = look.color or COLORS[0]
        known = [(one.step, *one.interval) for one in training if one.interval]
        x, lower, upper = ([point[part] for point in known] for part in range(3))
        yield go.Scatter(
            x=x + x[::-1], y=upper + lower[::-1], fill="toself", fillcolor=_faint(color), line={"width": 0},
            mode="lines", hoverinfo="skip", showlegend=False, legendgroup=look.run or None,
        )  # fmt: skip
        yield look.line([one.step for one in training], [one.mean for one in training], "training", 0)
    elif steps:
        yield look.line(steps, values, "training", 0)
    for number, (label, points) in enumerate(_validations(run, found), 1):
        ends = [one.interval or (one.mean, one.mean) for one in points]
        above = [high - one.mean for one, (_, high) in zip(points, ends, strict=True)]
        below = [one.mean - low for one, (low, _) in zip(points, ends, strict=True)]
        looks = {"symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 3}
        bars = {"error_y": looks} if any(one.interval for one in points) else {}
        x, y = [one.step for one in points], [one.mean for one in points]
        yield look.line(x, y, label, number, **_points(number, look), **bars)


def _faint(color: str) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def _validations(run: Run, found: Sequence[Accuracy]) -> Iterator[tuple[str, list[Accuracy]]]:
    """Label and points of each data source that was validated: from trajectories, or without them as verl logged it."""
    scores = {}
    for key in sorted({key for numbers in run.metrics.values() for key in numbers}):
        if match := _VALIDATION.fullmatch(key):
            scores[match["source"]] = (f"{match['source']} {match['score']}", key)
    sources = sorted({one.source for one in found if one.validation} | set(scores))
    for source in sources:
        label, key = scores.get(source, (source, ""))
        points = [one for one in found if one.validation and one.source == source]
        if not points:
            points = [Accuracy(*point, None, 0, 0) for point in
                      ((step, True, source, value) for step, value in zip(*run.series(key), strict=True))]  # fmt: skip
        yield label, points


def _phases(run: Run) -> Iterator[go.Bar]:
    steps, whole = run.series("timing_s/step")
    rest = dict(zip(steps, whole, strict=True))
    bars = []
    for key, label in PHASES.items():
        at, seconds = run.series(key)
        if any(value > 0.001 for value in seconds):
            bars.append((at, seconds, label))
        for step, value in zip(at, seconds, strict=True):
            rest[step] = rest.get(step, 0.0) - value
    if steps:
        bars.append((steps, [max(0.0, rest[step]) for step in steps], "other"))
    for key, label in BESIDE_STEP.items():
        at, seconds = run.series(key)
        if at:
            bars.append((at, seconds, label))
    for number, (at, seconds, label) in enumerate(bars):
        yield go.Bar(x=at, y=seconds, name=label, marker={"color": COLORS[number % len(COLORS)], "line": {"width": 0}})


def _layout(panel: Panel, *, stacked: bool) -> go.Layout:
    y: dict[str, Any] = {"title": {"text": panel.unit}, "rangemode": "tozero" if stacked else "normal"}
    if panel.kind == "accuracy":
        y |= {"tickformat": ".0%"}
    return go.Layout(
        template={}, barmode="stack" if stacked else None, bargap=0.15, hovermode="x unified",
        margin={"l": 56, "r": 12, "t": 8, "b": 40}, showlegend=True,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}},
        xaxis={"title": {"text": "step"}, "rangeslider": {"visible": False}}, yaxis=y,
    )  # fmt: skip
