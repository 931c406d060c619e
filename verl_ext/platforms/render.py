"""The platforms, and the files that each wants."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from verl_ext.cluster.start import DASHBOARD_PORT, HEAD_PORT, NODE_ENVIRONMENT
from verl_ext.platforms import facts as facts_module
from verl_ext.platforms.facts import Facts

TEMPLATES = Path(__file__).resolve().parent / "templates"
# What is the same for every run.
_CONSTANTS = {
    "CPUS_OF_A_HEAD": facts_module.CPUS_OF_A_HEAD,
    "DASHBOARD_PORT": DASHBOARD_PORT,
    "HEAD_PORT": HEAD_PORT,
    "MEMORY_GIB_OF_A_HEAD": facts_module.MEMORY_GIB_OF_A_HEAD,
    "NODE_ENVIRONMENT": NODE_ENVIRONMENT,
    "USER_IN_IMAGE": facts_module.USER_IN_IMAGE,
}


@dataclass(frozen=True)
class Platform:
    """One platform.

    Attributes:
        doc: one line.
        files: name of each file and the template that it is made from.
        defaults: of Facts, where this platform's differ.
    """

    doc: str
    files: dict[str, str]
    defaults: dict[str, Any]


# Where TI-ONE mounts shared storage (CFS) unless told otherwise.
_TIONE = {
    "data_root": "/opt/ml/input/data/verl-ags-data",
    "env_file": "/opt/ml/input/data/verl-ags.env",
}
PLATFORMS = {
    "kuberay-job": Platform(
        "a RayJob: a cluster for one run, and gone after it", {"rayjob.yaml": "kuberay-job.yaml.jinja"}, {}
    ),
    "kuberay-cluster": Platform(
        "a RayCluster: stays, and takes one `invoke launch` after another",
        {"raycluster.yaml": "kuberay-cluster.yaml.jinja"},
        {},
    ),
    "tione-image": Platform(
        "TI-ONE, a Ray job in our image",
        {"runtime-env.json": "tione-image.json.jinja", "start-command.sh": "tione.sh.jinja"},
        _TIONE,
    ),
    "tione-builtin": Platform(
        "TI-ONE, a Ray job in the platform's own image, with RuntimeEnv",
        {"runtime-env.json": "tione-builtin.json.jinja", "start-command.sh": "tione.sh.jinja"},
        {**_TIONE, "working_dir": "/opt/ml/input/data/verl-ags"},
    ),
    "slurm": Platform(
        "an sbatch script that starts Ray on its nodes",
        {"train.sbatch": "slurm.sbatch.jinja"},
        {"project": str(facts_module.ROOT), "data_root": str(Path("verl-ags-data").absolute()),
         "env_file": str(Path(".env").absolute())},
    ),
    "compose": Platform(
        "nodes on one machine, as containers",
        {"compose.yaml": "compose.yaml.jinja"},
        {"env_file": str(Path(".env").absolute())},
    ),
}  # fmt: skip


def render(platform: str, facts: Facts) -> dict[str, str]:
    """The platform's files: name and text. No value of a secret is known here, so none can be in them."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - YAML, JSON and shell; each value is quoted for its own language
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = shlex.quote
    environment.filters["tojson"] = json.dumps
    environment.globals.update(_CONSTANTS)
    return {
        name: environment.get_template(template).render(facts=facts).strip() + "\n"
        for name, template in PLATFORMS[platform].files.items()
    }
