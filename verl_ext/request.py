"""What a user asks for, and the configuration that it comes to, with everything that is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig

from verl_ext import compose as composition
from verl_ext import preflight, resume, runs
from verl_ext.cluster.shape import Cluster
from verl_ext.data_root import find_model, prepared_data
from verl_ext.errors import ConfigurationError
from verl_ext.gpus import Gpu, visible_gpus
from verl_ext.preflight import Problem, Subject
from verl_ext.settings import Settings, variable_named

# Two drivers count the same card a little differently; two kinds of card differ by more.
_SAME_CARD_GIB = 4.0
# Keys that the launcher fills and reads again itself.
OURS_ALONE = {
    "verl_ext.run_id": "give --run-id",
    "verl_ext.run_dir": "give --run-id and --data-root",
    "verl_ext.config_dir": "it is where the recipes are",
}


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for.

    Attributes:
        recipe: a file of recipe/retool/config.
        hardware: a file of recipe/retool/config/hardware; the one that fits this machine's GPUs if "".
        model: a Hugging Face folder, or a hub id whose folder is below the data root; the recipe's if "".
        train, val: parquet files made by `invoke prepare-data`; those below the data root if "".
        overrides: KEY=VALUE, last and strongest.
        run_id: made from the recipe's name and the time if "".
        server_options: further options for the local sandbox server.
        environment: further variables of every process of the run; no secrets.
        cluster: that the run trains on; this machine alone if None.
        run_dir: a folder that may be there already, of a run that goes on or an evaluation; made from `run_id` if None.
        resume_from: its checkpoint, every byte of which was verified; from the beginning if None.
    """

    recipe: str = "retool"
    hardware: str = ""
    model: str | Path = ""
    train: str | Path = ""
    val: str | Path = ""
    overrides: tuple[str, ...] = ()
    run_id: str = ""
    server_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cluster: Cluster | None = None
    run_dir: Path | None = None
    resume_from: Path | None = None


@dataclass(frozen=True)
class Configured:
    """A request's configuration.

    Attributes:
        hardware: the file that was asked for or found.
        from_flags: what the flags came to, as overrides.
        config: resolved; what is wrong is left out of it.
        run_dir: not made yet.
        problems: everything that is wrong.
        subject: what preflight looked at.
    """

    hardware: str
    from_flags: tuple[str, ...]
    config: DictConfig
    run_dir: Path
    problems: tuple[Problem, ...]
    subject: Subject

    @property
    def resolved(self) -> dict[str, str]:
        """What hardware, model and data came to, to be asked for again from anywhere."""
        flags = dict(flag.split("=", 1) for flag in self.from_flags)
        keys = {"model": "actor_rollout_ref.model.path", "train": "data.train_files", "val": "data.val_files"}
        return {"hardware": self.hardware, **{name: json.loads(flags[key]) for name, key in keys.items()}}

    def without(self, checks: Collection[str]) -> Configured:
        """The same without what these checks found."""
        return replace(self, problems=tuple(problem for problem in self.problems if problem.check not in checks))

    def without_machine(self) -> Configured:
        """The same without what is wrong with this machine only."""
        return replace(self, problems=tuple(problem for problem in self.problems if not problem.of_machine))

    def refuse_problems(self) -> None:
        """Nothing if all is well.

        Raises:
            ConfigurationError: with every problem.
        """
        if self.problems:
            raise ConfigurationError.listing(preflight.headline(len(self.problems)), map(str, self.problems))


def configure(request: RunRequest, settings: Settings, wrong_settings: Sequence[str] = ()) -> Configured:
    """The configuration of a request, and everything that is wrong with it, its settings and this machine.

    Args:
        request: what is asked for.
        settings: as read, with defaults where they were wrong.
        wrong_settings: what was wrong.

    Raises:
        ConfigurationError: there is nothing to look at: no such recipe or hardware, or its files do not compose.
    """
    problems = [Problem(text, "settings") for text in wrong_settings]
    try:
        hardware = request.hardware or fitting_hardware(visible_gpus())
        composition.check_names(request.recipe, hardware)
    except ConfigurationError as error:
        if not problems:
            raise
        texts = [*map(str, problems), str(error)]
        raise ConfigurationError.listing(preflight.headline(len(texts)), texts) from error
    try:
        run_id = runs.check_run_id(request.run_id or runs.new_run_id(request.recipe))
    except ConfigurationError as error:
        problems.append(Problem(str(error), "run-id"))
        run_id = runs.new_run_id(request.recipe)
    run_dir = request.run_dir or (settings.folder("runs") / run_id).absolute()
    if run_dir.exists() and not request.run_dir:
        problems.append(Problem(f"{run_dir} is there already: choose another --run-id or delete the folder", "run-id"))
    from_flags = _from_flags(request, settings, run_id, run_dir)
    overrides = []
    for override in request.overrides:
        key = override.partition("=")[0].strip().lstrip("+")
        if variable_named(key):  # its value is not shown: it may be a secret
            text = f"{key} is a setting and no key of verl's: put it into .env or the environment"
            problems.append(Problem(text, "override"))
        elif key in OURS_ALONE:
            problems.append(Problem(f"{key} follows from the flags: {OURS_ALONE[key]}", "override"))
        else:
            overrides.append(override)
    composed, wrong = composition.compose_what_can_be(
        request.recipe, hardware, [*from_flags, *overrides, *_checkpoint(request)]
    )
    resolved, missing = composition.resolve_what_can_be(composed)
    problems += [Problem(text, "keys") for text in (*wrong, *missing)]
    subject = Subject(resolved, settings)
    told = {text.partition(" ")[0] for text in missing}
    found = [problem for problem in preflight.look(subject) if problem.text.partition(" ")[0] not in told]
    # On a cluster this process may be on a machine without GPUs; what it has of the run's is the data root.
    elsewhere = request.cluster is not None
    problems += [problem for problem in found if not (elsewhere and problem.of_machine) or problem.check == "disk"]
    if not problems:  # it reads the whole of the data
        try:
            resume.check(resolved, verified=request.resume_from)
        except ConfigurationError as error:
            problems.append(Problem(str(error), "resume"))
    shown = tuple(replace(problem, text=settings.redacted(problem.text)) for problem in problems)
    return Configured(hardware, from_flags, resolved, run_dir, shown, subject)


def _from_flags(request: RunRequest, settings: Settings, run_id: str, run_dir: Path) -> tuple[str, ...]:
    model = find_model(settings.data_root, str(request.model or composition.hub_ids()["model"]))
    train, val = prepared_data(settings.data_root)
    values = {
        "verl_ext.run_id": run_id,
        "verl_ext.run_dir": run_dir,
        "verl_ext.config_dir": composition.CONFIG_DIR,
        "actor_rollout_ref.model.path": model,
        "data.train_files": Path(request.train or train).expanduser().absolute(),
        "data.val_files": Path(request.val or val).expanduser().absolute(),
    }
    # Quoted as JSON, so that a path may hold any character.
    flags = tuple(f"{key}={json.dumps(str(value))}" for key, value in values.items())
    if request.cluster:
        flags = (*flags, *request.cluster.overrides)
    # verl validates a step before it saves it.
    return (*flags, "trainer.val_before_train=false") if request.resume_from else flags


def _checkpoint(request: RunRequest) -> tuple[str, ...]:
    """Where a run goes on, said last: what an earlier attempt was given must not win."""
    if request.resume_from is None:
        return ()
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={json.dumps(str(request.resume_from))}"


def fitting_hardware(gpus: Sequence[Gpu]) -> str:
    """The hardware file that was made for these GPUs.

    Raises:
        ConfigurationError: none was, or there are no GPUs.
    """
    names = composition.hardware_names()
    if not gpus:
        raise ConfigurationError(
            "no GPU is to be seen here (nvidia-smi), so name the machine that is meant: --hardware, one of "
            f"{', '.join(names)}. In a container use --gpus all; cpu trains a small model"
        )
    machines = {name: composition.hardware_values(name) for name in names}
    for name, values in machines.items():
        card_gib = values.get("verl_ext.gpu_memory_gib")
        same_card = card_gib and abs(gpus[0].memory_gib - card_gib) < _SAME_CARD_GIB
        if same_card and values.get("trainer.n_gpus_per_node") == len(gpus):
            return name
    kinds = ", ".join(sorted({f"{gpu.name}, {gpu.memory_gib:.0f} GiB" for gpu in gpus}))
    raise ConfigurationError(
        f"no hardware file was made for {len(gpus)} GPUs of this kind ({kinds}): take the nearest with --hardware "
        f"({', '.join(names)}) and change its sizes with --set, or write recipe/retool/config/hardware/NAME.yaml"
    )
