"""An evaluation from request to summary, one model after the other; what was interrupted goes on.

plan -> for each model: its weights as a folder -> preflight -> the launcher, with our runner -> numbers
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq

from verl_ext import attempts, launch, runs
from verl_ext.display import Display
from verl_ext.errors import ConfigurationError
from verl_ext.evaluation.plan import SETTINGS, TRAINED, Plan, parts
from verl_ext.evaluation.process import EvaluationRunnerProcess
from verl_ext.evaluation.results import SUMMARY, key_of, read_parts, write_results
from verl_ext.evaluation.subject import Subject, wanted_settings
from verl_ext.export import exported
from verl_ext.request import Configured, RunRequest, configure
from verl_ext.settings import Settings

# Checks of what a training alone does or needs.
TRAINING_CHECKS = frozenset(
    {"stale-weights", "estimator", "one-checkpoint", "logger", "workers", "mini-batch", "micro-batch", "data-rows",
     "token-budget", "gpu-memory", "host-memory", "disk"}
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What a user wants.

    Attributes:
        subject: see `find_subject`.
        data: prepared file.
        content_sha256: of its rows.
        settings: names of settings, all that make sense if empty.
        n: samples a problem, the recipe's if None.
        seed: of all samples.
        recipe, hardware, overrides, environment: as for a training.
        run_id: of the evaluation.
    """

    subject: Subject
    data: Path
    content_sha256: str
    settings: Sequence[str] = ()
    n: int | None = None
    seed: int = 1
    recipe: str = "retool"
    hardware: str = ""
    overrides: tuple[str, ...] = ()
    run_id: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def evaluate(asked: Asked, settings: Settings, say: Callable[[str], None], wrong_settings: Sequence[str] = ()) -> Path:
    """Take every sample that is not there yet; gives the evaluation's folder, with its summary.

    Raises:
        ConfigurationError: before anything was started, or an evaluation of this name asked for something else.
        TrainingDiedError, SandboxError: as of a run; what was kept stays, and the same command goes on with it.
    """
    run_id = runs.check_run_id(asked.run_id or runs.new_run_id("evaluate"))
    folder = (settings.folder("runs") / run_id).absolute()
    wanted = wanted_settings(asked.subject, asked.settings)
    models = {name: _model_folder(asked.subject, name) for name in dict.fromkeys(SETTINGS[one][0] for one in wanted)}
    requests = {name: _request(asked, name, model, run_id, folder) for name, model in models.items()}
    # All of them before anything is taken or made: a slip in the second must not cost the first.
    looked = {name: _configured(request, settings, wrong_settings) for name, request in requests.items()}
    plan = _plan(asked, wanted, models, next(iter(looked.values())))
    began = _begin(plan, folder)
    say(f"evaluation {run_id}: {folder}")
    with attempts.held(folder):  # two would number their parts alike
        try:
            for name in models:
                _take_model(name, asked, plan, requests[name], looked[name], settings, say)
        finally:
            if (left := _summarise(plan, folder, began)) > 0:
                say(f"{left} samples are left; the same command with --run-id={run_id} goes on with them")
    return folder


def _take_model(
    name: str,
    asked: Asked,
    plan: Plan,
    request: RunRequest,
    configured: Configured,
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    run_dir = configured.run_dir
    rows = pq.read_table(plan.data).to_pylist()
    done = {key_of(row) for row in read_parts(run_dir.parent) if not row["infra_failed"]}
    left = sum(len(part.samples) for part in parts(plan, name, rows, done, 1))
    say(f"{name} model {plan.models[name]}: {left} samples to take for {', '.join(plan.settings_of(name))}")
    if not left:
        return
    if name == TRAINED and asked.subject.checkpoint is not None:
        exported(asked.subject.checkpoint, Path(plan.models[name]), say)
        configured = _configured(request, settings, ())
    (run_dir / runs.PHASES).unlink(missing_ok=True)  # an earlier attempt's, which would be told again
    launch.carry_out(configured, request, settings, Display(say), runner_class=EvaluationRunnerProcess)


def _model_folder(subject: Subject, name: str) -> Path:
    if name == TRAINED and subject.checkpoint is not None:
        return subject.checkpoint.export_folder
    if subject.checkpoint is not None and not (subject.base / "config.json").is_file():
        raise ConfigurationError(
            f"the model that {subject.name} began from is not at {subject.base}: say with --base where it is, or leave "
            f"it out with --settings={TRAINED}"
        )
    return subject.base


def _request(asked: Asked, name: str, model: Path, run_id: str, folder: Path) -> RunRequest:
    sampling = [f"actor_rollout_ref.rollout.val_kwargs.n={asked.n}"] if asked.n else []
    return RunRequest(
        recipe=asked.recipe,
        hardware=asked.hardware or ("cpu" if asked.subject.on_cpu else ""),
        model=model,
        train=asked.data,
        val=asked.data,
        overrides=(
            *asked.subject.overrides,
            "actor_rollout_ref.rollout.calculate_log_probs=false",  # no trainer to compare them with
            *sampling,
            *asked.overrides,
        ),
        run_id=run_id,
        run_dir=folder / name,
        environment=asked.environment,
    )


def _configured(request: RunRequest, settings: Settings, wrong_settings: Sequence[str]) -> Configured:
    """The configuration of one model's part, its problems refused but those of a training alone.

    A checkpoint that is not exported yet has no folder to look at.
    """
    passed = TRAINING_CHECKS
    if not Path(request.model).exists():
        passed |= {"model", "weights"}
    configured = configure(request, settings, wrong_settings).without(passed)
    configured.refuse_problems()
    return configured


def _plan(asked: Asked, wanted: Sequence[str], models: dict[str, Path], configured: Configured) -> Plan:
    config = configured.config
    rollout = config.actor_rollout_ref.rollout
    folders = {name: str(path) for name, path in models.items()}
    return Plan(
        settings=tuple(wanted),
        models=folders,
        data=str(asked.data),
        content_sha256=asked.content_sha256,
        n=int(rollout.val_kwargs.n),
        seed=asked.seed,
        subject=asked.subject.facts(folders),
        sampling={
            "n": int(rollout.val_kwargs.n),
            "temperature": float(rollout.val_kwargs.temperature),
            "top_p": float(rollout.val_kwargs.top_p),
            "seed": asked.seed,
            "max_prompt_tokens": int(config.data.max_prompt_length),
            "max_response_tokens": int(config.data.max_response_length),
            "max_assistant_turns": rollout.multi_turn.max_assistant_turns,
            "max_user_turns": rollout.multi_turn.max_user_turns,
        },
        overrides=tuple(asked.overrides),
    )


@dataclass(frozen=True)
class _Began:
    """When: `created` of the first attempt, seconds of all earlier ones, the clock of this one."""

    created: str
    earlier_s: float
    started_s: float


def _begin(plan: Plan, folder: Path) -> _Began:
    """Make the folder, or go on in it.

    Raises:
        ConfigurationError: what is there asked for something else, or the folder cannot be made.
    """
    began = _Began(time.strftime("%Y-%m-%dT%H:%M:%S%z"), 0.0, time.monotonic())
    if not folder.exists():
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be made ({error}): set VERL_EXT_DATA_ROOT to a folder of yours"
            ) from error
        plan.write(folder)
        return began
    Plan.read(folder).refuse_change(plan)
    try:
        before = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return replace(began, created=before["created"], earlier_s=before["seconds"])
    except (OSError, ValueError, KeyError, TypeError):  # killed before there was one
        return began


def _summarise(plan: Plan, folder: Path, began: _Began) -> int:
    """Write the numbers; gives how many samples are not taken yet."""
    samples = read_parts(folder)
    counts = Counter(row["data_source"] for row in pq.read_table(plan.data).to_pylist())
    left = counts.total() * plan.n * len(plan.settings) - len(samples)
    facts = {
        "id": folder.name,
        "created": began.created,
        "complete": not left,
        "seconds": round(began.earlier_s + time.monotonic() - began.started_s, 1),
        "subject": plan.subject,
        "data": {
            "path": plan.data,
            "content_sha256": plan.content_sha256,
            "sets": [{"data_source": name, "problems": count} for name, count in counts.items()],
        },
        "sampling": plan.sampling,
    }
    write_results(folder, facts, samples)
    return left
