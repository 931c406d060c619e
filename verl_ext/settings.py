"""Every setting that comes from the environment, read in this file and nowhere else.

`Settings.load()` takes the process environment over `.env`. `VARIABLES` is the one table of names, units,
defaults and meanings; `.env.example` is made from it (`python -m verl_ext.settings --example`).

A secret is a `Secret`: it shows as *** everywhere and refuses to be pickled, so it cannot slip into a Ray
message, a log or a file of the run; each process loads its own. An `.env` means the same to us and to
`docker run --env-file`: what the two read differently is refused (verl_ext/env_file.py).

The data root is `./verl-ags-data` by default: a folder that one sees where one works and can delete, rather
than gigabytes of models hidden in a home folder, which on clusters is small and slow. The image sets its own.
"""

# ruff: noqa: TID251 - this is the file that the ban on os.environ points to

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl_ext.env_file import read_env_file, without_quotes
from verl_ext.errors import ConfigurationError
from verl_ext.setting_values import (
    AGS_DOMAIN,
    Secret,
    WrongValue,
    clean_text,
    key_of_another_service,
    masked,
    parse_domain,
    parse_flag,
    parse_folder,
    parse_number,
    parse_one_of,
    parse_path,
    parse_secret,
    parse_text,
    parse_tracking_uri,
    parse_url,
)

PREFIX = "VERL_EXT_"
ISOLATION = ("auto", "required", "bubblewrap", "landlock", "rlimits", "none")
_LEVELS = ("debug", "info", "warning", "error")
# Source: wandb.Settings.mode; swanlab.init's mode.
_WANDB_MODES = ("online", "offline", "disabled")
_SWANLAB_MODES = ("cloud", "local", "offline", "disabled")


@dataclass(frozen=True)
class Variable:
    """One environment variable: the row of `.env.example` and the check of its value.

    Attributes:
        name: as in the environment; the field of `Settings` has the same name in small letters, without
            our prefix.
        doc: one line, what it decides.
        default: as it would be written in the environment; None if unset means none.
        unit: of a number, else what kind of value it is.
        secret: whether the value is hidden everywhere.
        parse: text to value; raises WrongValue.
    """

    name: str
    doc: str
    default: str | None = None
    unit: str = "text"
    secret: bool = False
    parse: Callable[[str], Any] = parse_text

    def read(self, text: str) -> Any:
        """The value of `text` from an environment.

        Raises:
            WrongValue: it cannot be taken.
        """
        # A word that the variable knows may look like a placeholder: the isolation "none".
        return self.parse(text if text in self.unit.split("|") else clean_text(text))

    @property
    def field(self) -> str:
        """Name in `Settings`."""
        return self.name.removeprefix(PREFIX).lower()


VARIABLES: tuple[Variable, ...] = (
    Variable("E2B_API_KEY", "key of the sandbox service (AGS or E2B); without it sandboxes run on this machine",
             unit="key", secret=True, parse=parse_secret),
    Variable("E2B_DOMAIN", "service that the key belongs to: <region>.tencentags.com for AGS, e2b.app for E2B",
             AGS_DOMAIN, unit="domain", parse=parse_domain),
    Variable("E2B_API_URL", "address of the control plane in place of https://api.<domain>; for a local server",
             unit="URL", parse=parse_url),
    Variable("E2B_SANDBOX_URL", "address of the sandboxes; for a local server, E2B_API_URL if unset",
             unit="URL", parse=parse_url),
    Variable("VERL_EXT_SANDBOX_BACKEND", "where code runs; auto: e2b with a key, local without", "auto",
             unit="auto|e2b|local", parse=parse_one_of("auto", "e2b", "local")),
    Variable("VERL_EXT_SANDBOX_TEMPLATE", "template (AGS: sandbox tool) that sandboxes are made from",
             "code-interpreter-v1", unit="name"),
    Variable("VERL_EXT_SANDBOX_MAX_ALIVE", "sandboxes alive at once, all workers together (AGS gives 10)", "10",
             unit="sandboxes", parse=parse_number(1, whole=True)),
    Variable("VERL_EXT_SANDBOX_MAX_STARTING", "sandboxes starting at once, all workers together", "10",
             unit="sandboxes", parse=parse_number(1, whole=True)),
    Variable("VERL_EXT_SANDBOX_CREATE_RATE_PER_S", "sandboxes started per second (E2B: 1 Hobby, 5 Pro; AGS: 20)",
             "5", unit="per second", parse=parse_number(0.01, whole=False)),
    Variable("VERL_EXT_SANDBOX_SHARE", "share of the three limits above that one run takes; two runs: 0.5 each", "1",
             unit="0 to 1", parse=parse_number(0.001, high=1, whole=False)),
    Variable("VERL_EXT_SANDBOX_QUOTA_RELEASE_S", "how long the account counts a killed sandbox (check-sandbox)", "0",
             unit="s", parse=parse_number(0, whole=False)),
    Variable("VERL_EXT_SANDBOX_MODE", "sandbox: one a trajectory; context: several share one (files, CPU, memory too)",
             "sandbox", unit="sandbox|context", parse=parse_one_of("sandbox", "context")),
    Variable("VERL_EXT_SANDBOX_CONTEXTS", "trajectories that share one sandbox in mode context", "8",
             unit="contexts", parse=parse_number(1, whole=True)),
    Variable("VERL_EXT_SANDBOX_AHEAD", "sandboxes that a worker has ready before they are asked for, mode sandbox", "2",
             unit="sandboxes", parse=parse_number(0, whole=True)),
    Variable("VERL_EXT_SANDBOX_ISOLATION", "local sandboxes; auto: the best that works here, required: or refuse",
             "auto", unit="|".join(ISOLATION), parse=parse_one_of(*ISOLATION)),
    Variable("VERL_EXT_DATA_ROOT", "folder that holds data, models, cache and runs", "./verl-ags-data",
             unit="folder", parse=parse_folder),
    Variable("VERL_EXT_ENV_FILE", "file to read instead of ./.env; on shared storage it serves every node",
             unit="file", parse=parse_path),
    Variable("VERL_EXT_LOG_LEVEL", "how much the project says", "info", unit="|".join(_LEVELS),
             parse=parse_one_of(*_LEVELS)),
    Variable("VERL_EXT_SANDBOX_LOG_LEVEL", "how much is said of sandboxes; debug shows every execution", "info",
             unit="|".join(_LEVELS), parse=parse_one_of(*_LEVELS)),
    Variable("VERL_EXT_REQUIRE_E2B", "tests fail instead of skipping when there is no key", "0", unit="0|1",
             parse=parse_flag),
    Variable("HF_ENDPOINT", "hub to download from, for example a mirror", unit="URL", parse=parse_url),
    Variable("HF_TOKEN", "token of the hub, for gated models", unit="token", secret=True, parse=parse_secret),
    Variable("WANDB_API_KEY", "key of Weights & Biases, if trainer.logger names wandb", unit="key", secret=True,
             parse=parse_secret),
    Variable("WANDB_MODE", "offline: W&B's files stay in the run folder, and no key is needed",
             unit="|".join(_WANDB_MODES), parse=parse_one_of(*_WANDB_MODES)),
    Variable("SWANLAB_API_KEY", "key of SwanLab, if trainer.logger names swanlab", unit="key", secret=True,
             parse=parse_secret),
    Variable("SWANLAB_MODE", "local, offline: SwanLab's files stay in the run folder, and no key is needed",
             unit="|".join(_SWANLAB_MODES), parse=parse_one_of(*_SWANLAB_MODES)),
    Variable("MLFLOW_TRACKING_URI", "MLflow's server or sqlite:////FILE; unset: a file in the run folder", unit="URI",
             parse=parse_tracking_uri),
    Variable("MLFLOW_TRACKING_TOKEN", "token of MLflow's server, if it wants one", unit="token", secret=True,
             parse=parse_secret),
    Variable("CUDA_COMPAT", "CUDA compatibility libraries in the image; auto: on if the driver is older", "auto",
             unit="auto|on|off", parse=parse_one_of("auto", "on", "off")),
)  # fmt: skip
_NAMES = tuple(variable.name for variable in VARIABLES)
# Flags of commands that say what a variable says.
FLAGS = {"--sandbox": "VERL_EXT_SANDBOX_BACKEND", "--data-root": "VERL_EXT_DATA_ROOT"}
# Read by other libraries themselves: the hub's and the trackers'.
_FOREIGN = tuple(name for name in _NAMES if name.startswith(("HF_", "WANDB_", "SWANLAB_", "MLFLOW_")))


@dataclass(frozen=True)
class Settings:
    """What the environment says, checked. `VARIABLES` has the meaning and the unit of each."""

    e2b_api_key: Secret | None
    e2b_domain: str
    e2b_api_url: str | None
    e2b_sandbox_url: str | None
    sandbox_backend: str
    sandbox_template: str
    sandbox_max_alive: int
    sandbox_max_starting: int
    sandbox_create_rate_per_s: float
    sandbox_share: float
    sandbox_quota_release_s: float
    sandbox_mode: str
    sandbox_contexts: int
    sandbox_ahead: int
    sandbox_isolation: str
    data_root: Path
    env_file: Path | None
    log_level: str
    sandbox_log_level: str
    require_e2b: bool
    hf_endpoint: str | None
    hf_token: Secret | None
    wandb_api_key: Secret | None
    wandb_mode: str | None
    swanlab_api_key: Secret | None
    swanlab_mode: str | None
    mlflow_tracking_uri: str | None
    mlflow_tracking_token: Secret | None
    cuda_compat: str

    given: frozenset[str] = frozenset()  # the fields that somebody set, also to their default

    @classmethod
    def load(
        cls,
        env_file: Path | str | None = None,
        *,
        flags: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Settings from the command's flags over the process environment over a file.

        Args:
            env_file: file to read; if None the one that VERL_EXT_ENV_FILE names, else `./.env` if there is one.
            flags: what the user gave as flags of `FLAGS`, by flag; "" is not given.
            environ: stands for the process environment in tests. `os.environ` is never changed.

        Raises:
            ConfigurationError: with every problem found, each naming its variable and the cure, never a value
                of a secret.
        """
        settings, problems = cls.read(env_file, flags=flags, environ=environ)
        if problems:
            raise ConfigurationError.listing(f"{len(problems)} setting(s) are wrong", problems)
        return settings

    @classmethod
    def read(
        cls,
        env_file: Path | str | None = None,
        *,
        flags: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> tuple[Settings, list[str]]:
        """Like `load`, but what is wrong is told and has its default, so that the rest can be checked too."""
        process = os.environ if environ is None else environ
        by_flag = {FLAGS[flag]: (flag, value) for flag, value in (flags or {}).items() if value}
        problems: list[str] = []
        named = env_file or without_quotes(process.get("VERL_EXT_ENV_FILE", "")) or None
        path = Path(named).expanduser() if named else Path(".env")
        found: dict[str, str] = {}
        if named or path.is_file():
            found, problems = read_env_file(path, wanted=_is_meant_for_us)
        raw = {**found, **{name: value for name, value in process.items() if _is_ours(name)}}
        raw |= {name: value for name, (_, value) in by_flag.items()}
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            values[variable.field] = variable.parse(variable.default) if variable.default else None
            try:
                if (text := raw.get(variable.name)) is not None:
                    values[variable.field] = variable.read(text)
            except WrongValue as wrong:
                if variable.name in by_flag:
                    said = by_flag[variable.name][0]
                else:
                    said = f"{variable.name} ({'the environment' if variable.name in process else path})"
                problems.append(f"{said} {wrong}")
        problems += _unknown(raw)
        if values["sandbox_backend"] == "e2b" and "E2B_API_KEY" not in raw:
            said = by_flag.get("VERL_EXT_SANDBOX_BACKEND", ("VERL_EXT_SANDBOX_BACKEND",))[0]
            problems.append(f"{said} is e2b but E2B_API_KEY is not set: set it, or choose local")
        if wrong_service := key_of_another_service(values["e2b_api_key"], values["e2b_domain"]):
            problems.append(wrong_service)
        values["env_file"] = path.absolute() if named or path.is_file() else None
        given = frozenset(variable.field for variable in VARIABLES if variable.name in raw)
        return cls(**values, given=given), problems

    @classmethod
    def read_with(cls, given: Mapping[str, str]) -> tuple[Settings, list[str]]:
        """Like `read`, with what the user gave as flags over everything."""
        return cls.read(environ={**os.environ, **given})

    @property
    def backend(self) -> str:
        """`e2b` or `local`: what `sandbox_backend` comes to."""
        if self.sandbox_backend != "auto":
            return self.sandbox_backend
        return "e2b" if self.e2b_api_key else "local"

    @property
    def needs_own_server(self) -> bool:
        """Whether no service is named, neither by a key nor by an address: whoever wants sandboxes starts one here."""
        return self.backend == "local" and not self.e2b_api_url

    def is_default(self, field: str) -> bool:
        """Whether nobody set it; who sets it to its default means that value."""
        return field not in self.given

    def folder(self, name: str) -> Path:
        """`data`, `models`, `cache` or `runs` under the data root; not made."""
        if name not in ("data", "models", "cache", "runs"):
            raise ValueError(f"the data root has no folder {name!r}: data, models, cache or runs")
        return self.data_root / name

    def public_dict(self) -> dict[str, str | int | float | bool | None]:
        """Name of each variable and its value, for logs and manifests; a secret is `set` or None."""
        public: dict[str, str | int | float | bool | None] = {}
        for variable in VARIABLES:
            value = getattr(self, variable.field)
            if variable.secret:
                value = "set" if value else None
            public[variable.name] = str(value) if isinstance(value, Path) else value
        return public

    def export_foreign(self) -> list[str]:
        """Put what other libraries read by themselves (hub, tracker) into `os.environ`; names of those put.

        For settings that came from a file, and for values that a `docker run --env-file` passed on with their
        quotes, which those libraries would take for part of the value.
        """
        put = []
        for name in _FOREIGN:
            value = getattr(self, name.lower())
            text = value.reveal() if isinstance(value, Secret) else value
            if text is not None and os.environ.get(name) != text:
                os.environ[name] = text
                put.append(name)
        return put

    def redacted(self, text: str) -> str:
        """`text` with every secret in it replaced by ***: the known ones, and what has the shape of one."""
        for variable in VARIABLES:
            value = getattr(self, variable.field)
            if isinstance(value, Secret):
                text = text.replace(value.reveal(), "***")
        return masked(text)

    def reveals(self, text: str) -> str | None:
        """What secret is in `text`: a variable's name, or that something has the shape of one; None if none is."""
        for variable in VARIABLES:
            value = getattr(self, variable.field)
            if isinstance(value, Secret) and value.reveal() in text:
                return variable.name
        return "what has the shape of a key" if masked(text) != text else None


# Sandboxes of a local server: about 10 MiB each, so 64 fit anywhere; creates are bounded by its CPU alone.
LOCAL_MAX_ALIVE, LOCAL_CREATE_RATE_PER_S = 64, 1000


def sandboxes_alive(settings: Settings) -> int:
    """How many sandboxes a run may have at once: the account's, or a local server's if nobody said otherwise."""
    local = settings.backend == "local" and settings.is_default("sandbox_max_alive")
    return LOCAL_MAX_ALIVE if local else settings.sandbox_max_alive


def exempt_from_proxy(url: str) -> None:
    """Let this process and its children reach `url` directly, though a proxy is set for the rest.

    HTTP_PROXY in the environment applies to loopback and to neighbours of a cluster too; a local sandbox
    server is never behind it.
    """
    host = urlsplit(url).hostname or url
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [entry for entry in os.environ.get(name, "").split(",") if entry]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])


def foreign(name: str) -> str | None:
    """A variable of another program's, for checks that a run would fail on it; None if it is not set."""
    if _is_ours(name):
        raise ValueError(f"{name} is one of VARIABLES: Settings has it")
    return os.environ.get(name)


def variable_named(name: str) -> Variable | None:
    """The row of VARIABLES of that name."""
    return next((variable for variable in VARIABLES if variable.name == name), None)


def _is_ours(name: str) -> bool:
    return name.startswith(PREFIX) or name in _NAMES


def _is_meant_for_us(name: str) -> bool:
    """Whether a line of `.env` is judged: our variables, and names so near to one that they must be a slip."""
    return _is_ours(name) or bool(difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.9))


def _unknown(raw: Mapping[str, str]) -> list[str]:
    problems = []
    for name in raw:
        if name not in _NAMES:
            close = difflib.get_close_matches(name, _NAMES, n=1)
            cure = f"did you mean {close[0]}?" if close else "see .env.example for the names"
            problems.append(f"{name} is no setting of this project: {cure}")
    return problems


def example_text() -> str:
    """The text of `.env.example`: every variable, commented out, with unit, default and meaning."""
    lines = [
        "# Made by `python -m verl_ext.settings --example`; change verl_ext/settings.py instead.",
        "# Copy to .env and uncomment what you need. Plain NAME=value: no quotes, no blanks, no comment behind,",
        "# so that docker --env-file reads the same. The process environment wins over the file.",
    ]
    for variable in VARIABLES:
        kind = f"{variable.unit}, SECRET" if variable.secret else variable.unit
        default = "unset" if variable.default is None else variable.default
        lines += ["", f"# {variable.doc}", f"# ({kind}; default {default})"]
        lines += [f"#{variable.name}={variable.default or ''}"]
    return "\n".join(lines) + "\n"


def _main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.settings", description="Check the settings and show them."
    )
    parser.add_argument("--example", action="store_true", help="print the text of .env.example instead")
    if parser.parse_args(arguments).example:
        sys.stdout.write(example_text())
        return 0
    try:
        settings = Settings.load()
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{name}={value}\n" for name, value in settings.public_dict().items() if value is not None)
    return 0


assert {field.name for field in fields(Settings) if field.default is MISSING} == {v.field for v in VARIABLES}  # noqa: S101

if __name__ == "__main__":
    raise SystemExit(_main())
