"""Checks of what watches the run: trackers and alarms."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from verl_ext.alarms import names_of
from verl_ext.alarms.rules import NAMES
from verl_ext.preflight.subject import Subject

# What each logger imports. Source: verl 0.6.1 utils/tracking.py Tracking.
_PACKAGES: dict[str, str] = {
    "console": "",
    "file": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "clearml": "clearml",
    "trackio": "trackio",
    "vemlp_wandb": "volcengine_ml_platform",
}
_OFFLINE = ("offline", "disabled", "local")


def logger(subject: Subject) -> Iterator[str]:
    """verl asserts the names, and imports their packages, when everything else is running."""
    value = subject.get("trainer.logger")
    names = [value] if isinstance(value, str) else list(value or [])
    for name in names:
        if name not in _PACKAGES:
            yield f"trainer.logger names {name!r}, which verl does not have: {_nearest(name, tuple(_PACKAGES))}"
        elif (package := _PACKAGES[name]) and find_spec(package) is None:
            yield (
                f"trainer.logger names {name}, but the package {package} is not installed here: "
                f"pip install {package} (it is in no lock of this project), or leave {name} out"
            )
    for name, key, mode in (
        ("wandb", "WANDB_API_KEY", subject.settings.wandb_mode),
        ("swanlab", "SWANLAB_API_KEY", subject.settings.swanlab_mode),
    ):
        if name in names and getattr(subject.settings, key.lower()) is None and mode not in _OFFLINE:
            yield (
                f"trainer.logger names {name}, but {key} is not set: put it into .env, set {name.upper()}_MODE=offline "
                f"to keep its files in the run folder, or leave {name} out"
            )


def stop_on(subject: Subject) -> Iterator[str]:
    """A name that is no alarm would never end the run."""
    for name in names_of(subject.get("verl_ext.stop_on")):
        if name not in NAMES:
            yield f"verl_ext.stop_on (--stop-on) names {name!r}, which is no alarm: {_nearest(name, NAMES)}"


def _nearest(name: object, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
