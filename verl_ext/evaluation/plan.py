"""What an evaluation is to take, and what is left of it after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

PLAN = "evaluation.json"
# Samples of one part: what an interruption costs at most is the parts that were being taken.
PART_SAMPLES = 32
BASE, TRAINED = "base", "trained"
# Each setting with the model that it asks, and verl's name of the agent loop (recipe/retool/config/agent_loops.yaml).
SETTINGS = {"no_tools": (BASE, "no_tool"), "tools": (BASE, "tool_agent"), "trained": (TRAINED, "tool_agent")}


@dataclass(frozen=True)
class Plan:
    """What was asked for. Everything in it must be the same for an interrupted evaluation to go on.

    Attributes:
        settings: of `SETTINGS`.
        models: folder of each model that a setting asks, by `BASE` and `TRAINED`.
        data: path of the prepared file.
        content_sha256: of its rows.
        n: samples of each problem in each setting.
        seed: of all samples; each has one of its own, made of this, its problem and its number.
        subject: `subject` of summary.json.
        sampling: `sampling` of summary.json.
        overrides: keys of verl's that were set on top of the recipe.
    """

    settings: tuple[str, ...]
    models: dict[str, str]
    data: str
    content_sha256: str
    n: int
    seed: int
    subject: dict[str, Any]
    sampling: dict[str, Any]
    overrides: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Keep it; nothing is taken before."""
        (folder / PLAN).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan of an evaluation's folder.

        Raises:
            ConfigurationError: it has none that can be read.
        """
        try:
            values = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            lists = {name: tuple(values[name]) for name in ("settings", "overrides")}
            return cls(**{**values, **lists})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{folder} is no evaluation ({error!r}): choose another --run-id") from error

    def refuse_change(self, new: Plan) -> None:
        """Nothing if both ask for the same.

        Raises:
            ConfigurationError: with everything that differs.
        """
        old_values, new_values = asdict(self), asdict(new)
        changed = [
            f"{name} was {old_values[name]} and is {value}"
            for name, value in new_values.items()
            if value != old_values[name]
        ]
        if changed:
            raise ConfigurationError.listing(
                "the evaluation that is there asked for something else; choose another --run-id, or ask for the same",
                changed,
            )

    def settings_of(self, model: str) -> list[str]:
        """The settings that ask a model."""
        return [setting for setting in self.settings if SETTINGS[setting][0] == model]


@dataclass(frozen=True)
class Sample:
    """One answer to be taken: `number` of the problem in `row`."""

    setting: str
    row: Mapping[str, Any]
    number: int
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """As `results.key_of` has it."""
        return self.setting, self.row["data_source"], self.row["extra_info"]["index"], self.number


@dataclass(frozen=True)
class Part:
    """Samples of one setting that are taken and kept together."""

    number: int
    samples: list[Sample]


def parts(plan: Plan, model: str, rows: Sequence[Mapping[str, Any]], done: Collection[tuple], first: int) -> list[Part]:
    """What is still to be taken from a model, the samples of one problem next to each other.

    Args:
        plan: what was asked for.
        model: `BASE` or `TRAINED`.
        rows: the problems, in the schema of prepared data.
        done: keys of samples that need not be taken again.
        first: number of the first part.
    """
    numbers = count(first)
    found = []
    for _, samples in groupby(_samples(plan, model, rows, done), lambda sample: sample.setting):
        left = list(samples)
        while left:
            found.append(Part(next(numbers), left[:PART_SAMPLES]))
            left = left[PART_SAMPLES:]
    return found


def _samples(plan: Plan, model: str, rows: Sequence[Mapping[str, Any]], done: Collection[tuple]) -> Iterator[Sample]:
    for setting in plan.settings_of(model):
        for row in rows:
            for number in range(plan.n):
                problem = f"{row['data_source']}/{row['extra_info']['index']}"
                sample = Sample(setting, row, number, seed_of(plan.seed, problem, number))
                if sample.key not in done:
                    yield sample


def seed_of(seed: int, problem: str, number: int) -> int:
    """The seed of a sample: the same wherever and whenever it is taken, and in each setting.

    48 bits, so that the few that are added for later turns leave it an int64.
    """
    digest = hashlib.sha256(f"{seed}/{problem}/{number}".encode()).digest()
    return int.from_bytes(digest[:6])
