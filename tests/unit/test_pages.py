"""The operations page and the page of our keys say what the code says."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe.retool import reward
from verl_ext import alarms
from verl_ext.alarms.__main__ import table
from verl_ext.alarms.rules import NAMES, RULES
from verl_ext.compose import CONFIG_DIR, items
from verl_ext.progress import STEP_NUMBERS
from verl_ext.runs import read_jsonl

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "verl_ext" / "alarms" / "README.md").read_text(encoding="utf-8")
KEYS = (CONFIG_DIR / "README.md").read_text(encoding="utf-8")
STEP = read_jsonl(ROOT / "tests" / "data" / "healthy_metrics.jsonl")[-1]["data"]


def test_the_operations_page_has_the_table_of_the_alarms():
    assert table() in OPERATIONS, "put in what `python -m verl_ext.alarms` prints"


def test_a_row_is_whole():
    for rule in RULES:
        for text in (rule.what, rule.cause, rule.cure, rule.source):
            assert text, rule.name
            assert "|" not in text, rule.name
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+|truncation", rule.name)
        assert (rule.start <= rule.end) if rule.below else (rule.start >= rule.end), rule.name


def test_the_alarms_that_the_page_advises_to_stop_on_are_there():
    [named] = re.findall(r"--stop-on ([\w,-]+)`", OPERATIONS)
    [advised] = re.findall(r"Good for most runs: `([\w,-]+)`", OPERATIONS)
    assert {*alarms.names_of(named), *alarms.names_of(advised)} <= set(NAMES)


def test_the_page_and_the_lines_have_the_same_metrics_and_a_real_run_has_them():
    rows = re.findall(r"^\| [\w, /]+ \| (`.+?`) \| ", OPERATIONS.split("## Alarms")[0], re.M)
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    assert named >= set(STEP_NUMBERS.values()) - {"agent/response_tokens"}
    assert named <= set(STEP)


def rows(section: str) -> dict[str, str]:
    """Key and default of each row below a heading."""
    text = KEYS.split(f"## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| \S", text, re.M))


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_every_key_of_ours_is_on_the_page_with_its_default():
    block = yaml.safe_load((CONFIG_DIR / "retool.yaml").read_text())["verl_ext"]
    leaves = {key: value for key, value in items({"verl_ext": block}) if not isinstance(value, dict)}
    assert rows("verl_ext") == {key: shown(value) for key, value in leaves.items()}


def test_the_tools_keys_are_on_the_page():
    [tool] = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())["tools"]
    assert rows("The tool") == {key: shown(value) for key, value in tool["config"].items()}


def test_the_rewards_options_are_on_the_page_with_their_defaults():
    parameters = inspect.signature(reward.compute_score).parameters
    recipe = yaml.safe_load((CONFIG_DIR / "retool.yaml").read_text())["custom_reward_function"]["reward_kwargs"]
    written = rows("The reward")
    for name, default in written.items():
        assert shown(recipe.get(name, parameters[name].default)) == default, name
    with pytest.raises(Exception, match=f"it takes {', '.join(written)}"):
        reward.compute_score("x", "x", "1", nothing=1)


def test_the_page_has_the_fields_of_the_alarms_file():
    assert set(dataclasses.asdict(alarms.Event(0, "", "", 0.0, 0.0, "", ""))) == set(
        re.findall(r"`(\w+)`", re.search(r"alarms\.jsonl` \((.*?)\)", OPERATIONS, re.S)[1])  # type: ignore[index]
    )
