"""The numbers on top of a report and its tables: of data, versions and configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.report.accuracy import Accuracy
from verl_ext.report.run_folder import Run


@dataclass(frozen=True)
class Tile:
    """One number on top: `value` in large, `detail` below it."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A table; each row has as many cells as `head`."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str = ""


# What somebody asks first about a run, in the recipe's own words.
MAIN_KEYS = (
    "actor_rollout_ref.model.path", "data.train_batch_size", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.loss_agg_mode", "algorithm.adv_estimator",
    "data.max_prompt_length", "data.max_response_length", "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls", "actor_rollout_ref.rollout.val_kwargs.n",
    "custom_reward_function.reward_kwargs.shaping", "trainer.total_training_steps", "trainer.nnodes",
    "trainer.n_gpus_per_node", "verl_ext.device",
)  # fmt: skip


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A nested mapping by dotted keys; a list is one value, and text stands without quotes."""
    if isinstance(value, Mapping) and value:
        return {key: text for name, inner in value.items() for key, text in flat(inner, f"{prefix}.{name}").items()}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return {prefix.removeprefix("."): text}


def tiles(run: Run, accuracies: Sequence[Accuracy]) -> list[Tile]:
    """The newest numbers of a run, those that there are."""
    return list(_tiles(run, accuracies))


def newest_numbers(runs: Sequence[Run], accuracies: Sequence[Sequence[Accuracy]]) -> Table:
    """The newest numbers of several runs beside each other."""
    found = [{tile.label: tile for tile in tiles(run, its)} for run, its in zip(runs, accuracies, strict=True)]
    labels = dict.fromkeys(label for one in found for label in one)
    cells = [[f"{tile.value} ({tile.detail})" if (tile := one.get(label)) else "" for one in found] for label in labels]
    rows = [(label, *row) for label, row in zip(labels, cells, strict=True)]
    return Table("Newest numbers", ("", *(run.name for run in runs)), rows)


def _tiles(run: Run, accuracies: Sequence[Accuracy]) -> Iterator[Tile]:
    steps = [step for step, numbers in run.metrics.items() if "timing_s/step" in numbers]
    total = (run.config.get("trainer") or {}).get("total_training_steps")
    done = max(steps, default=0)
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.logged_s)) if run.logged_s else "nothing logged"
    if run.logged_s and run.phases:
        said += f", {duration(run.logged_s - run.phases[0]['time_s'])} since the start"
    yield Tile("Steps", f"{done} of {total}" if total else str(done), said)
    rewards = run.series("agent/reward_mean")[1]
    if rewards:
        yield Tile("Reward", f"{rewards[-1]:+.3f}", f"{rewards[0]:+.3f} in the first step")
    training = [one for one in accuracies if not one.validation]
    if training:
        last = training[-1]
        of = f"{last.prompts} prompts, step {last.step}"
        yield Tile("Accuracy, training", f"{last.mean:.1%}", f"{_interval_of(last)}; {of}")
    for source in sorted({one.source for one in accuracies if one.validation}):
        its = [one for one in accuracies if one.validation and one.source == source]
        first, last = its[0], its[-1]
        before = f"; {first.mean:.1%} at step {first.step}" if first.step != last.step else f"; step {last.step}"
        yield Tile(f"Accuracy, {source}", f"{last.mean:.1%}", _interval_of(last) + before)
    yield from _shares(run)
    seconds = run.series("timing_s/step")[1][-5:]
    if seconds:
        parts = {"rollout": run.last("timing_s/gen"), "update": run.last("timing_s/update_actor")}
        said = ", ".join(f"{part} {value:.1f} s" for part, value in parts.items() if value is not None)
        yield Tile("Time of a step", duration(sum(seconds) / len(seconds)), f"mean of {len(seconds)}; {said}")
    if (speed := run.last("perf/throughput")) is not None:
        yield Tile("Throughput", f"{speed:,.0f}", "tokens/s a GPU")


def _shares(run: Run) -> Iterator[Tile]:
    if (calls := run.last("agent/tool_calls_per_trajectory")) is not None:
        yield Tile("Tool use", f"{run.last('agent/tool_use_ratio') or 0:.0%}", f"{calls:.2f} calls a trajectory")
    if (errors := run.last("agent/tool_error_ratio")) is not None:
        bad = run.last("agent/parse_failure_ratio") or 0
        yield Tile("Tool errors", f"{errors:.1%}", f"{bad:.1%} of calls not readable")
    if (tokens := run.last("agent/response_tokens")) is not None:
        yield Tile("Response", f"{tokens:,.0f}", f"tokens; {run.last('agent/truncated_ratio') or 0:.1%} cut by length")
    if lost := run.series("agent/infra_failed")[1]:
        of = sum(run.series("agent/trajectories")[1])
        yield Tile("Lost", f"{sum(lost):,.0f}", f"of {of:,.0f} trajectories, to our infrastructure")


def _interval_of(one: Accuracy) -> str:
    return f"95 %: {one.interval[0]:.1%} to {one.interval[1]:.1%}" if one.interval else f"{one.prompts} prompt"


def duration(seconds: float) -> str:
    """Seconds as people say them: 8.4 s, 12 min 5 s, 3 h 20 min."""
    if seconds < 59.95:  # what would be written as 60.0 s is a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def run_tables(run: Run) -> list[Table]:
    """Data, start, versions and configuration of one run."""
    config = flat(run.config) if run.config else {}
    found = [
        Table("Main settings", ("key", "value"), [(key, config[key]) for key in MAIN_KEYS if key in config]),
        data_table(run),
        Table("Start", ("phase", "seconds"), _start(run)),
        *manifest_tables(run.manifest),
        Table("Whole configuration", ("key", "value"), sorted(config.items())),
    ]
    return [table for table in found if table.rows]


def manifest_tables(manifest: Mapping[str, Any]) -> Iterator[Table]:
    """The manifest by its parts."""
    facts = {key: value for key, value in manifest.items() if not isinstance(value, Mapping | list)}
    facts["command"] = " ".join(map(str, manifest.get("command") or ()))
    yield Table("Run", ("what", "value"), list(flat(facts).items()) if manifest else [])
    for title, key in (("Versions", "versions"), ("Model", "model"), ("Settings", "settings"), ("Locks", "locks")):
        yield Table(title, ("name", "value"), list(flat(manifest[key]).items()) if manifest.get(key) else [])


def data_table(run: Run) -> Table:
    """What the run was trained and validated on."""
    report = run.data_report
    if not report:
        files = run.manifest.get("data") or {}
        note = "No report of prepare-data is in the run folder: another program made the data, or an older version."
        return Table("Data", ("file", "sha256"), list(flat(files).items()) if files else [], note)
    sides = [report.get("train") or {}, report.get("val") or {}]
    rows = [("source", *(", ".join(str(file.get("name")) for file in side.get("files", [])) for side in sides))]
    named = (("rows read", "rows_raw"), ("different questions", "questions"), ("rows kept", "rows_kept"))
    rows += [(label, *(_number(side.get(key)) for side in sides)) for label, key in named]
    for label, key in (
        ("left out: ", "rows_left_out"), ("of ", "data_sources"), ("language ", "languages"),
        ("answer: ", "answer_kinds"),
    ):  # fmt: skip
        for name in sorted({name for side in sides for name in side.get(key) or {}}):
            rows.append((label + name, *(_number((side.get(key) or {}).get(name, 0)) for side in sides)))
    for label, key in (("prompt characters", "prompt_chars"), ("prompt tokens", "prompt_tokens")):
        for part in ("median", "p99", "max"):
            rows.append((f"{label}, {part}", *(_number((side.get(key) or {}).get(part)) for side in sides)))
    rows.append(("content sha256", *(str(side.get("content_sha256", ""))[:16] for side in sides)))
    return Table("Data", ("", "training", "validation"), rows)


def _number(value: Any) -> str:
    return "not counted" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _start(run: Run) -> list[tuple[str, str]]:
    return [(str(phase["phase"]), f"{phase['time_s'] - run.phases[0]['time_s']:.0f}") for phase in run.phases]


def evaluation_table(run: Run) -> Table:
    """Evaluations whose subject was a checkpoint of the run, a row for each setting and data source."""
    rows = []
    for summary in run.evaluations:
        for result in summary.get("results") or ():
            rows.append((
                str(summary.get("id")), str(summary["subject"].get("step")), str(result.get("setting")),
                str(result.get("data_source")), _interval(result), _best(result.get("pass_at_k")),
                _best(result.get("majority_at_k")), f"{result.get('tool_use_ratio') or 0:.0%}",
                f"{result.get('tool_error_ratio') or 0:.1%}", f"{result.get('truncated_ratio') or 0:.1%}",
            ))  # fmt: skip
    head = ("evaluation", "step", "setting", "data", "mean@k", "pass@k", "majority@k", "tool use", "tool errors", "cut")
    return Table("Evaluations", head, rows)


def _interval(result: Mapping[str, Any]) -> str:
    mean, low, high = (result.get(name) for name in ("mean", "low", "high"))
    if mean is None:
        return "none"
    return f"{mean:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None and high is not None else "")


def _best(shares: Mapping[str, float] | None) -> str:
    """The share of the largest k."""
    if not shares:
        return ""
    k = max(shares, key=int)
    return f"{shares[k]:.1%} of {k}"


def alarm_table(runs: Sequence[Run]) -> Table:
    """Alarms that started or ended, newest first."""
    several = len(runs) > 1
    rows = [
        (
            *((run.name,) if several else ()), str(event.get("step")), str(event.get("alarm")),
            str(event.get("state", "started")), _short(event.get("value")), _short(event.get("threshold")),
            str(event.get("cause", "")), str(event.get("cure", "")),
        )
        for run in runs for event in reversed(run.alarms)
    ]  # fmt: skip
    head = ("step", "alarm", "state", "value", "threshold", "cause", "cure")
    return Table("Alarms", ("run", *head) if several else head, rows)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
