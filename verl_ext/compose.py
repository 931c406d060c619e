"""Recipe + hardware + overrides -> one resolved configuration, without importing torch, Ray or verl.

verl's own YAML stays the base: it is found by path (`find_spec`), since Hydra's `pkg://` would import verl
and with it torch (9.7 s against 1.0 s).
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigurationError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "recipe" / "retool" / "config"
HARDWARE_DIR = CONFIG_DIR / "hardware"

# Keys that are free-form in verl: what is below them is the engine's business, not the schema's.
OPEN_BELOW = (
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "custom_reward_function.reward_kwargs",
    "data.apply_chat_template_kwargs",
    "ray_kwargs.ray_init",
)
# Keys that verl 0.6.1 reads with .get() and leaves out of its YAML.
KNOWN_BEYOND_YAML = frozenset(
    {
        "actor_rollout_ref.actor.optim.override_optimizer_config",
        "custom_reward_function.reward_kwargs",
    }
)


def verl_config_dir() -> Path:
    """verl's own folder of YAML files, found without importing verl.

    Raises:
        ConfigurationError: verl is not installed.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError("verl is not installed in this environment: run `invoke setup` first")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"


def hardware_names() -> list[str]:
    """The names that `--hardware` takes."""
    return sorted(path.stem for path in HARDWARE_DIR.glob("*.yaml"))


def recipe_names() -> list[str]:
    """The names that `--recipe` takes: files that build on others, so not the list of agent loops."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.yaml") if "defaults" in _yaml(path))


def hardware_values(name: str) -> dict[str, Any]:
    """What a hardware file sets, by key."""
    return {key: value for key, value in items(_yaml(HARDWARE_DIR / f"{name}.yaml")) if not isinstance(value, dict)}


def recipe_chain(name: str) -> list[str]:
    """The recipe files that a recipe is made of, lowest first, itself last; verl's own is not one of them."""
    below = [entry for entry in _yaml(CONFIG_DIR / f"{name}.yaml")["defaults"] if entry in recipe_names()]
    return [*(part for entry in below for part in recipe_chain(entry)), name]


def recipe_values(name: str) -> dict[str, Any]:
    """What one recipe file sets itself, by key."""
    content = _yaml(CONFIG_DIR / f"{name}.yaml")
    content.pop("defaults")
    return {key: value for key, value in items(content) if not isinstance(value, dict)}


def hub_ids() -> dict[str, str]:
    """`model`, `train` and `val`: what the recipe takes from a hub."""
    return _yaml(CONFIG_DIR / "retool.yaml")["verl_ext"]["hub"]


def check_names(recipe: str, hardware: str) -> None:
    """Whether there are such files.

    Raises:
        ConfigurationError: with the nearest name and all that there are.
    """
    _known(recipe, recipe_names(), "recipe")
    _known(hardware, hardware_names(), "hardware")


def compose(recipe: str, hardware: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of a run: verl's defaults, the recipe, the hardware file, the overrides.

    Args:
        recipe: a file of recipe/retool/config without `.yaml`.
        hardware: a file of recipe/retool/config/hardware without `.yaml`.
        overrides: `key=value`, as Hydra reads them; a leading `+` is not needed and not harmful.

    Returns:
        The composed configuration, interpolations still open.

    Raises:
        ConfigurationError: a name, key or value is wrong; all that are wrong are listed at once.
    """
    config, problems = compose_what_can_be(recipe, hardware, overrides)
    if problems:
        raise ConfigurationError.listing(f"{len(problems)} problem(s) in the configuration", problems)
    return config


def compose_what_can_be(recipe: str, hardware: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, list[str]]:
    """Like `compose`, but what is wrong is left out and told, so that the rest can be looked at as well.

    Raises:
        ConfigurationError: there is no such recipe or hardware, or the files themselves do not compose.
    """
    check_names(recipe, hardware)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            base = hydra_compose(
                recipe, overrides=[f"hydra.searchpath=[file://{verl_config_dir()}]", f"+hardware={hardware}"]
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(f"recipe {recipe} with hardware {hardware} does not compose: {error}") from error
    OmegaConf.set_struct(base, False)
    problems: list[str] = []
    for override in overrides:
        try:
            key, value = _split(override)
            _update(base, key, value)
        except ConfigurationError as error:
            problems.append(str(error))
    unknown = unknown_keys(base)
    problems += [message for _, message in unknown]
    for key, _ in unknown:
        parent, _, name = key.rpartition(".")
        del (OmegaConf.select(base, parent) if parent else base)[name]
    return base, problems


def _update(config: DictConfig, key: str, value: Any) -> None:
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigurationError(f"override {key}={value}: {first}; compare the key with verl's YAML") from error


def unknown_keys(config: DictConfig) -> list[tuple[str, str]]:
    """Keys that no part of verl's configuration has, the highest only, each with a message and the nearest known.

    Hydra refuses a typo on its command line but accepts it in a YAML file without a word.
    """
    known = known_keys()
    found: list[tuple[str, str]] = []
    for key, value in items(OmegaConf.to_container(config, resolve=False)):
        if key in known or any(key == top or key.startswith(f"{top}.") for top in OPEN_BELOW):
            continue
        parent = key.rpartition(".")[0]
        if parent and parent not in known:
            continue  # its parent is listed already
        leaf = next((f"{key}.{name}" for name, inner in items(value) if not isinstance(inner, dict)), key)
        found.append((key, f"{leaf}: {_nearest(leaf, known)}"))
    return found


def _nearest(key: str, known: frozenset[str]) -> str:
    """The known keys that may have been meant: spelled nearly so, written without their beginning, or ending so."""
    near = [name for name in known if name.endswith(f".{key.lower()}") or name == key.lower()]
    near = near or _spelled_like(key, known)
    if not near:
        last = key.rpartition(".")[2].lower()
        near = [name for name in known if name.rpartition(".")[2] == last]
    if not near:
        return "verl 0.6.1 has no key of this name or a similar one"
    if len(near) > 3:
        return f"verl 0.6.1 has no key of this name; {len(near)} keys end in it, for example {min(near)}"
    return f"verl 0.6.1 has no such key; did you mean {' or '.join(sorted(near))}?"


def _spelled_like(key: str, known: frozenset[str]) -> list[str]:
    """The nearest spelling, and a second that is about as near."""
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.75)
    ratios = [difflib.SequenceMatcher(None, key, name).ratio() for name in near]
    return [name for name, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - 0.06]


def known_keys() -> frozenset[str]:
    """Every key of verl's composed defaults, inner nodes included, and ours as retool.yaml declares them."""
    return frozenset(default_values()) | KNOWN_BEYOND_YAML


def default_values() -> dict[str, Any]:
    """verl's own value of every key, inner nodes included, and ours as retool.yaml declares them; unresolved."""
    ours = {"verl_ext": _yaml(CONFIG_DIR / "retool.yaml")["verl_ext"]}
    return {**verl_defaults(), **dict(items(ours))}


def verl_defaults() -> dict[str, Any]:
    """verl's own value of every key, inner nodes included; unresolved."""
    return _verl_defaults(verl_config_dir())


@functools.cache
def _verl_defaults(folder: Path) -> dict[str, Any]:
    with initialize_config_dir(str(folder), version_base=None):
        defaults = hydra_compose("ppo_trainer")
    return dict(items(OmegaConf.to_container(defaults, resolve=False)))


def resolve(config: DictConfig) -> DictConfig:
    """The same configuration with every interpolation replaced by its value.

    It must happen on the driver: verl hands the configuration to a Ray process unresolved, and `oc.env` is
    read there, in another environment.

    Raises:
        ConfigurationError: values are missing (`???`) or interpolations lead nowhere; all are listed.
    """
    resolved, problems = resolve_what_can_be(config)
    if problems:
        raise ConfigurationError.listing(f"{len(problems)} value(s) are missing", problems)
    return resolved


def resolve_what_can_be(config: DictConfig) -> tuple[DictConfig, list[str]]:
    """Like `resolve`, but a value that is missing or leads nowhere is told and stays None."""
    plain = OmegaConf.to_container(config, resolve=False)
    # Not OmegaConf.missing_keys, which resolves as it goes and fails on a value that depends on a missing one.
    missing = sorted(_missing(plain, ""))
    problems = [f"{key} has no value: give it with --set {key}=VALUE" for key in missing]
    copy = config.copy()
    for key in missing:
        OmegaConf.update(copy, key, None)
    try:
        return DictConfig(OmegaConf.to_container(copy, resolve=True)), problems
    except OmegaConfBaseException:
        pass  # some interpolation leads nowhere: find out which
    for key in _open_interpolations(plain, ""):
        try:
            OmegaConf.select(copy, key, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            problems.append(f"{key} does not resolve: {' '.join(str(error).split())}")
            OmegaConf.update(copy, key, None)
    try:
        return DictConfig(OmegaConf.to_container(copy, resolve=True)), problems
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"the configuration does not resolve: {' '.join(str(error).split())}") from error


def _known(name: str, names: list[str], kind: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigurationError(f"no {kind} named {name!r}: {hint}There are: {', '.join(names)}")


def _split(override: str) -> tuple[str, Any]:
    match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w.@-]*)=(.*)", override, flags=re.DOTALL)
    if match is None:
        raise ConfigurationError(f"override {override!r}: write KEY=VALUE, for example trainer.save_freq=10")
    try:
        value = yaml.load(match.group(2), Loader=_ValueLoader) if match.group(2) != "" else ""  # noqa: S506 - safe
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it is no YAML"
        raise ConfigurationError(f"override {override!r}: the value cannot be read: {problem}; quote it") from error
    return match.group(1), value


class _ValueLoader(yaml.SafeLoader):
    """YAML as Hydra's command line reads values: 1e-6 is a number; on, 010, 1:30 and 2025-01-01 are text."""


_ValueLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"null|~", "n~"),
    ("bool", r"(?i:true|false)", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9]\d*)", "-+0123456789"),
    ("float", r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?", "-+.0123456789"),
):
    _ValueLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


_FILE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there


def _yaml(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_FILE_LOADER)  # noqa: S506 - a safe one


def _missing(node: Any, prefix: str) -> Iterator[str]:
    if node == "???":
        yield prefix
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        inner = f"{prefix}[{name}]" if isinstance(node, list) else f"{prefix}.{name}" if prefix else str(name)
        yield from _missing(value, inner)


def _open_interpolations(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, str) and "${" in node:
        yield prefix
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        inner = f"{prefix}[{name}]" if isinstance(node, list) else f"{prefix}.{name}" if prefix else str(name)
        yield from _open_interpolations(value, inner)


def items(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below a mapping with its value, inner nodes included."""
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key, value
        yield from items(value, key)
