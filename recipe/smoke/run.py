"""`invoke smoke`: a tiny model learns to use its tool, through everything a real run uses: on two CPU cores, or on
a GPU to see that the stack works there.

    tiny model (cached) -> arithmetic rows -> prepare-data -> the launcher, with recipe `smoke` and hardware
    `cpu` or another -> export and reload -> report, and the rule for "it learned"

Exit status: 0 it learned and everything was put away; 1 the run went through but a check failed; others as
in `verl_ext.launch`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from recipe.retool import prepare_data
from recipe.smoke import arithmetic, rules, tiny_model
from verl_ext import launch, runs
from verl_ext.compose import CONFIG_DIR, check_names
from verl_ext.display import Display, display
from verl_ext.errors import ConfigurationError, TrainingDiedError
from verl_ext.run_environment import child_environment
from verl_ext.settings import Settings

TRAIN_PROBLEMS, VAL_PROBLEMS = 512, 32
EXIT_NOT_LEARNED = 1


@dataclass(frozen=True)
class Control:
    """A run that must not learn: the same in everything but one thing.

    Attributes:
        overrides: verl's keys.
        server_options: for the local sandbox server.
        environment: of every process of the run.
    """

    overrides: tuple[str, ...] = ()
    server_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


CONTROLS = {
    "no-learning": Control(overrides=("actor_rollout_ref.actor.optim.lr=0.0",)),
    "wrong-values": Control(
        server_options=("--faults",), environment={"VERL_EXT_SANDBOX_TEMPLATE": "fault-wrong-values"}
    ),
    # verl 0.6.1's own fault (PR 4248), asked for on purpose.
    "no-weight-sync": Control(
        overrides=(
            "actor_rollout_ref.rollout.free_cache_engine=false",
            "actor_rollout_ref.rollout.load_format=auto",
            "verl_ext.waive=[stale-weights]",
        )
    ),
}


def tool_schemas() -> list[dict[str, Any]]:
    """The recipe's tools, as the agent loop gives them to the chat template."""
    tools = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text(encoding="utf-8"))["tools"]
    return [tool["tool_schema"] for tool in tools]


def prepare(settings: Settings, say: Callable[[str], None]) -> tuple[Path, Path, Path]:
    """The tiny model, and arithmetic problems as training and validation files; all cached."""
    cache, out = settings.folder("cache").absolute(), settings.folder("data").absolute() / "smoke"
    raw = out / "raw"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        raw.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{settings.data_root} cannot be used ({error}): set VERL_EXT_DATA_ROOT to a folder of yours"
        ) from error
    model = tiny_model.folder_for(cache, tool_schemas())
    if (model / "config.json").is_file():
        say(f"tiny model: cached in {model}")
    else:
        _make_tiny_model(cache)
    problems = arithmetic.distinct(TRAIN_PROBLEMS + VAL_PROBLEMS, seed=1)
    random.Random(1).shuffle(problems)
    for name, part in (("train", problems[:TRAIN_PROBLEMS]), ("val", problems[TRAIN_PROBLEMS:])):
        rows = [arithmetic.raw_row(problem, index, name) for index, problem in enumerate(part)]
        pq.write_table(pa.Table.from_pylist(rows), raw / f"{name}.parquet")
    prepare_data.prepare(str(raw / "train.parquet"), str(raw / "val.parquet"), out, picture=False)
    say(f"data: {TRAIN_PROBLEMS} problems to train on, {VAL_PROBLEMS} to validate, in {out}")
    return model, out / "train.parquet", out / "val.parquet"


def _make_tiny_model(cache: Path) -> None:
    """Make it in a process of its own: the launcher's stays light, and forks later."""
    scratch = cache / f".tiny-{os.getpid()}"
    command = [sys.executable, "-m", "recipe.smoke.tiny_model", str(cache), str(scratch), json.dumps(tool_schemas())]
    try:
        status = subprocess.run(command, check=False, env=child_environment(OMP_WAIT_POLICY="PASSIVE")).returncode
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if status:
        raise TrainingDiedError(f"the tiny model could not be made (status {status}); its own words are above")


def smoke(
    settings: Settings,
    show: Display,
    *,
    hardware: str = "cpu",
    control: str = "",
    overrides: Sequence[str] = (),
    run_id: str = "",
) -> int:
    """Run it all; returns the exit status."""
    check_names("smoke", hardware)
    started_s, say = time.monotonic(), show.say
    model, train, val = prepare(settings, say)
    prepared_s = time.monotonic() - started_s
    change = CONTROLS[control] if control else Control()
    request = launch.RunRequest(
        recipe="smoke",
        hardware=hardware,
        model=model,
        train=train,
        val=val,
        overrides=(*change.overrides, *overrides),
        run_id=run_id,
        server_options=change.server_options,
        environment=change.environment,
    )
    result = launch.run(request, settings, show)
    trained_s = time.monotonic() - started_s - prepared_s
    checked = _verify(result.run_dir, say) if not control else {}
    seconds = {
        "prepare": prepared_s,
        "train": trained_s,
        "verify": time.monotonic() - started_s - prepared_s - trained_s,
    }
    report = rules.report(result, checked, seconds)
    (result.run_dir / "report.json").write_text(
        json.dumps(runs.without_nan(report.numbers), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    text = report.render()
    (result.run_dir / "report.txt").write_text(text, encoding="utf-8")
    say(text)
    return 0 if report.passed else EXIT_NOT_LEARNED


def _verify(run_dir: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Export the last checkpoint and hold it against what was trained, in a process that imports torch."""
    say("exporting the checkpoint and loading it again in transformers and vLLM")
    command = [sys.executable, "-m", "verl_ext.export", str(run_dir), "--verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = run_dir / "logs" / "export.log"
    log.write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        return {"error": f"export failed, see {log}: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="invoke smoke", description="Train a tiny model for real.")
    parser.add_argument("--hardware", default="cpu", help="a file of recipe/retool/config/hardware")
    parser.add_argument("--control", choices=sorted(CONTROLS), default="", help="break one thing: it must not learn")
    parser.add_argument("--run-id", default="")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    status = 0

    def action() -> None:
        nonlocal status
        with display() as show:
            status = smoke(
                Settings.load(),
                show,
                hardware=options.hardware,
                control=options.control,
                overrides=options.overrides,
                run_id=options.run_id,
            )

    return launch.guarded(action) or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
