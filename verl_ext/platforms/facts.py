"""Everything that a template may say of a run: each fact once, from where the project has it already."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_ext import compose
from verl_ext.errors import ConfigurationError
from verl_ext.installed import locked
from verl_ext.platforms.builtin import missing_packages
from verl_ext.settings import VARIABLES, variable_named

ROOT = Path(__file__).resolve().parents[2]
IN_IMAGE = "/opt/verl-ags"  # docker/Dockerfile
USER_IN_IMAGE = 10001  # likewise
# What is asked for beside GPUs: agent loops, engine servers, what FSDP offloads; /dev/shm holds Ray's object store and
# NCCL's buffers. Of one GPU; the H200 that the recipe was run on (recipe/retool/LOG.md) had 16 cores and 128 GiB.
CPUS_PER_GPU, MEMORY_GIB_PER_GPU, SHM_GIB_PER_GPU = 12, 120, 8
# Of a whole node that trains in small: the README's "needs".
CPUS_WITHOUT_GPU, MEMORY_GIB_WITHOUT_GPU, SHM_GIB_WITHOUT_GPU = 2, 12, 2
CPUS_OF_A_HEAD, MEMORY_GIB_OF_A_HEAD = 4, 16
# Characters that no shell, YAML or Ray's own joining of words reads as anything else.
_PLAIN = re.compile(r"[\w./:=,@%+\[\]{}-]+")


@dataclass(frozen=True)
class Facts:
    """What is rendered.

    Attributes:
        name: of the job.
        hardware: a file of recipe/retool/config/hardware.
        nodes: with GPUs.
        gpus: of each, 0 where the hardware has none.
        lent: what Ray is told a node has where there are no GPUs: `num-cpus` and `num-gpus`.
        image: of the container.
        project: the project's folder on the nodes: in the image or on shared storage.
        working_dir: the project's folder that RuntimeEnv sends to the nodes, where no image has it.
        data_root: on storage that all nodes share.
        env_file: with the secrets, on storage that all nodes share; "" where the platform brings them.
        secret: name of the Kubernetes secret.
        claim: name of the Kubernetes volume claim behind data_root.
        overrides: KEY=VALUE of the user.
        python: the interpreter of the environment on shared storage, where no image brings one.
    """

    name: str = "verl-ags"
    hardware: str = "h200x8"
    nodes: int = 2
    gpus: int = 8
    lent: Mapping[str, int] = field(default_factory=dict)
    image: str = "verl-ags"
    project: str = IN_IMAGE
    working_dir: str = ""
    data_root: str = "/data"
    env_file: str = ""
    secret: str = "verl-ags-env"  # noqa: S105 - its name
    claim: str = "verl-ags-data"
    overrides: tuple[str, ...] = ()
    python: str = sys.executable

    @property
    def here(self) -> str:
        """The project's folder on this machine."""
        return str(ROOT)

    @property
    def ray_version(self) -> str:
        """That of the lock, which the head and every worker must have."""
        return locked("gpu", ())["ray"]

    @property
    def packages(self) -> list[str]:
        """NAME==VERSION of what a built-in image lacks."""
        return missing_packages()

    @property
    def settings(self) -> list[str]:
        """Names of the variables that come from the user's .env; never their values."""
        own = ("VERL_EXT_DATA_ROOT", "VERL_EXT_ENV_FILE", "VERL_EXT_REQUIRE_E2B")
        return [variable.name for variable in VARIABLES if variable.name not in own]

    @property
    def cpus(self) -> int:
        """Cores of a node."""
        return CPUS_PER_GPU * self.gpus or CPUS_WITHOUT_GPU

    @property
    def memory_gib(self) -> int:
        """Memory of a node, /dev/shm included."""
        return MEMORY_GIB_PER_GPU * self.gpus or MEMORY_GIB_WITHOUT_GPU

    @property
    def shm_gib(self) -> int:
        """Shared memory of a node, within its memory."""
        return SHM_GIB_PER_GPU * self.gpus or SHM_GIB_WITHOUT_GPU

    @property
    def train(self) -> list[str]:
        """The command of a job inside the cluster, as `invoke launch` submits it too, from any folder."""
        # Where the project is sent along, it is the job's own folder.
        path = [] if self.working_dir else ["env", f"PYTHONPATH={self.project}"]
        return [*path, "python", "-m", "verl_ext.launch", *self._flags, *self.overrides]

    @property
    def launch(self) -> list[str]:
        """The command outside the cluster, from the project's folder, with RAY_ADDRESS set."""
        # invoke's own -- divides the task's flags from the words that go to verl.
        return ["invoke", "launch", *self._flags, *(["--", *self.overrides] if self.overrides else [])]

    @property
    def _flags(self) -> list[str]:
        # GPUs of a node and the rest of the cluster's shape are asked of the cluster.
        return [f"--hardware={self.hardware}", f"--nodes={self.nodes}"]


def gather(*, hardware: str, nodes: int, overrides: Sequence[str] = (), **given: str) -> Facts:
    """Facts of a request.

    Args:
        hardware: a file of recipe/retool/config/hardware.
        nodes: with GPUs.
        overrides: KEY=VALUE.
        given: further attributes of Facts, those that are not "".

    Raises:
        ConfigurationError: something is wrong; all that is, is listed.
    """
    compose.check_names("retool", hardware)
    problems = []
    if nodes < 1:
        problems.append(f"{nodes} nodes: at least one is needed")
    for override in overrides:
        key = override.partition("=")[0]
        if variable_named(key):  # its value may be a secret
            problems.append(f"{key} is a setting and no key of verl's: put it into the .env or secret of the nodes")
        elif not _PLAIN.fullmatch(override) or "=" not in override:
            problems.append(
                f"{key}: the platforms' own shells would read this word differently; write KEY=VALUE of letters, "
                "digits and ./:=,@%+-[]{}, or put the value into a recipe file (recipe/retool/config)"
            )
    values = {name: value for name, value in given.items() if value}
    for name in ("name", "secret", "claim"):
        if name in values and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", values[name]):
            problems.append(f"--{name} {json.dumps(values[name])}: small letters, digits and dashes, at most 52")
    for name in ("project", "working_dir", "data_root", "env_file", "python"):
        if name in values and not (values[name].startswith("/") and _PLAIN.fullmatch(values[name])):
            problems.append(
                f"--{name.replace('_', '-')} {json.dumps(values[name])}: an absolute path on the nodes, without blanks"
            )
    if problems:
        raise ConfigurationError.listing(f"{len(problems)} thing(s) to render are wrong", problems)
    machine = compose.hardware_values(hardware)
    on_cpu = machine.get("verl_ext.device") == "cpu"
    gpus = int(machine["trainer.n_gpus_per_node"])
    lent = {"num-cpus": int(machine["ray_kwargs.ray_init.num_cpus"]), "num-gpus": gpus} if on_cpu else {}
    return Facts(
        hardware=hardware,
        nodes=nodes,
        gpus=0 if on_cpu else gpus,
        lent=lent,
        overrides=tuple(overrides),
        **values,
    )
