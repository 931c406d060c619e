"""The same configuration as one command of verl's own, so that nobody depends on our launcher to compose a run.

verl finds the reward, the agent loop and, by VERL_USE_EXTERNAL_MODULES, the advantage estimator. What it does not
have alone is what verl_ext/trainer.py puts in its place: the pool of sandboxes, the records, the clean-up.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.compose import verl_defaults

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ("python", "-m", "verl.trainer.main_ppo")
# What Hydra reads as text when it stands alone; everything else is quoted.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*")
_NO_TEXT = re.compile(r"(?i:null|true|false|nan|inf)")


def overrides(config: DictConfig) -> list[str]:
    """Every key that differs from verl's own default, as an override of Hydra's command line.

    Args:
        config: resolved. Keys that verl's YAML does not have get Hydra's `+`.
    """
    defaults = verl_defaults()
    # verl's interpolations follow the keys that they name, so they are compared as they come out.
    resolved = _resolved_defaults(defaults, config)
    found = []
    for key, value in _different(OmegaConf.to_container(config), "", resolved):
        found.append(f"{'' if key in defaults else '+'}{key}={hydra_value(value)}")
    return found


def command(config: DictConfig) -> str:
    """The command, one override a line, for a shell."""
    cpu = OmegaConf.select(config, "verl_ext.device") == "cpu"
    modules = "verl_ext.cpu,verl_ext.advantage" if cpu else "verl_ext.advantage"
    variables = [f"PYTHONPATH={shlex.quote(str(ROOT))}", f"VERL_USE_EXTERNAL_MODULES={modules}"]
    lines = [" ".join([*variables, *PROGRAM]), *(shlex.quote(override) for override in overrides(config))]
    return " \\\n    ".join(lines)


def _resolved_defaults(defaults: Mapping[str, Any], config: DictConfig) -> dict[str, Any]:
    """verl's defaults; where one is an interpolation, what it comes to in this configuration."""
    scratch = config.copy()
    plain = {key: value for key, value in defaults.items() if not (isinstance(value, dict) and value)}
    open_keys = {key: value for key, value in plain.items() if isinstance(value, str) and "${" in value}
    for key, value in open_keys.items():
        OmegaConf.update(scratch, key, value, force_add=True)
    for key in open_keys:
        value = OmegaConf.select(scratch, key)
        plain[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return plain


def _different(node: Any, prefix: str, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys whose value is another than the default; an empty mapping is a value."""
    if prefix in defaults and defaults[prefix] == node:
        return
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _different(value, f"{prefix}.{name}" if prefix else str(name), defaults)
    else:
        yield prefix, node


def hydra_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case dict():
            return "{" + ",".join(f"{hydra_value(name)}:{hydra_value(inner)}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(hydra_value, value)) + "]"
        case _:
            text = str(value)
            if _PLAIN.fullmatch(text) and not _NO_TEXT.fullmatch(text):
                return text
            # A backslash is one unless quotes follow it (Hydra's grammar of quoted values).
            return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
