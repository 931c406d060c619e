"""The pages for users: both READMEs say the same, the tutorial says what the code prints, every command is a task."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from invoke.exceptions import ParseError
from invoke.parser import Parser
from invoke.program import Program

from recipe.retool.mapping import load_description
from recipe.smoke.rules import checks
from verl_ext.alarms.rules import NAMES
from verl_ext.compose import compose_what_can_be
from verl_ext.progress import Follower
from verl_ext.runs import METRICS

ROOT = Path(__file__).parents[2]
PATHS = {name: ROOT / name for name in ("README.md", "README.zh.md", "recipe/smoke/TUTORIAL.md")}
PAGES = {name: path.read_text(encoding="utf-8") for name, path in PATHS.items()}
ENGLISH, CHINESE, TUTORIAL = PAGES.values()
ALL = sorted(path for place in (".", "docker/**", "recipe/**", "verl_ext/**") for path in ROOT.glob(f"{place}/*.md"))
# Flags that the pages name and that are not ours.
OF_DOCKER = {"--build-arg", "--gpus", "--network", "--target", "--ulimit", "--user"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[tuple[str, list[str]]]:
    """Language and lines of each fenced block, without comments; of the tree only the paths."""
    return [
        (kind, [_bare(line) if kind else line.split(" ")[0] for line in text.splitlines()])
        for kind, text in FENCE.findall(page)
    ]


def _bare(line: str) -> str:
    return re.sub(r"(^|\s+)#\s.*", "", line)


def sections(page: str) -> list[str]:
    """The text below each heading, without fenced blocks."""
    return re.split(r"^#+ .*$", FENCE.sub("", page), flags=re.M)


def spans(text: str) -> list[str]:
    """Code within a text; a line break in it is a blank."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def links(text: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]


def invocations(page: str) -> Iterator[list[str]]:
    """The words behind each `invoke`: in sh blocks, in indented ones, and in code within the text."""
    code = [text for kind, text in FENCE.findall(page) if kind == "sh"]
    code += re.findall(r"^    (?:.*[ /])?invoke .*$", FENCE.sub("", page), re.M)
    lines = [_bare(line) for text in code for line in text.replace("\\\n", " ").splitlines()]
    for text in [*lines, *spans(page)]:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        command: list[str] | None = None
        for word in [*lexer, ";"] if "invoke" in text else ():
            if command is not None and set(word) <= set(";|&()"):
                yield command
                command = None
            elif command is not None:
                command.append(word)
            elif word.rpartition("/")[2] == "invoke":
                command = []


def tasks_for(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """tasks.py as it is for a command: how many words `report` takes depends on them."""
    monkeypatch.setattr(sys, "argv", ["invoke", *words])
    monkeypatch.setattr(Program, "parse_tasks", Program.parse_tasks)  # which tasks.py replaces
    spec = spec_from_file_location("tasks_of_the_pages", ROOT / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.namespace.to_contexts()


COMMANDS = sorted({shlex.join(words) for path in ALL for words in invocations(path.read_text(encoding="utf-8"))})


def test_commands_are_found():
    assert set(PATHS.values()) <= set(ALL)
    assert {"smoke", "train --resume", "report RUN OTHER", "evaluate RUN -n 4", "grade runs/RUN"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_a_task_with_these_flags(command: str, monkeypatch: pytest.MonkeyPatch):
    words = shlex.split(command)
    if words in (["--list"], []):
        return
    contexts = tasks_for(words, monkeypatch)
    if len(words) == 1:  # a task that is only named may want words
        assert words[0] in {context.name for context in contexts}
    else:
        parsed = Parser(contexts=contexts).parse_argv(words)  # what invoke itself does; raises ParseError
        assert [context.name for context in parsed] == words[:1]


def test_each_key_that_a_command_sets_is_one():
    words = {word for command in COMMANDS for word in shlex.split(command)}
    keys = sorted(word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=.+", word))
    assert len(keys) > 5
    assert compose_what_can_be("retool", "cpu", keys)[1] == []


@pytest.mark.parametrize("command", ["evaluate RUN --n 4", "trian --resume", "export RUN OTHER --verify"])
def test_a_command_that_is_none_is_seen(command: str, monkeypatch: pytest.MonkeyPatch):
    words = shlex.split(command)
    with pytest.raises(ParseError, match="No idea what"):
        Parser(contexts=tasks_for(words, monkeypatch)).parse_argv(words)


@pytest.mark.parametrize("name", PAGES)
def test_each_flag_alone_is_one_of_ours(name: str, monkeypatch: pytest.MonkeyPatch):
    ours = {flag for context in tasks_for([], monkeypatch) for flag in context.flags}
    named = {re.split("[ =]", span)[0] for span in spans(PAGES[name]) if span.startswith("--")}
    assert named - ours - OF_DOCKER == set()


def test_both_have_the_same_commands_in_the_same_order():
    assert blocks(CHINESE) == blocks(ENGLISH)


def test_both_have_the_same_headings_and_rows():
    for pattern in (r"^#+ ", r"^\|.*\|$", r"^!\["):
        assert len(re.findall(pattern, CHINESE, re.M)) == len(re.findall(pattern, ENGLISH, re.M)), pattern
    assert [len(mark) for mark in re.findall(r"^#+", CHINESE, re.M)] == [
        len(mark) for mark in re.findall(r"^#+", ENGLISH, re.M)
    ]


@pytest.mark.parametrize("of", [spans, links])
def test_both_name_the_same_in_each_section(of: Any):
    pairs = list(zip(sections(ENGLISH), sections(CHINESE), strict=True))
    for english, chinese in pairs:
        english, chinese = english.replace("README.zh.md", ""), chinese.replace("(README.md)", "()")
        assert Counter(of(chinese)) == Counter(of(english))
    assert sum(len(of(english)) for english, _ in pairs) > 20


def test_each_leads_to_the_other():
    assert "README.zh.md" in links(ENGLISH.partition("\n## ")[0])
    assert "README.md" in links(CHINESE.partition("\n## ")[0])
    assert PATHS["recipe/smoke/TUTORIAL.md"].relative_to(ROOT).as_posix() in links(ENGLISH)


@pytest.mark.parametrize("name", PAGES)
def test_each_link_leads_somewhere(name: str):
    for target in links(PAGES[name]):
        file, _, anchor = target.partition("#")
        path = PATHS[name].parent / file
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


# --- the tutorial's figures are those of the log, its lines those of the code


def test_the_tutorials_steps_are_those_that_the_code_prints(tmp_path: Path):
    metrics = ROOT / "tests" / "data" / "healthy_metrics.jsonl"
    (tmp_path / METRICS).write_bytes(metrics.read_bytes())
    said: list[str] = []
    Follower(tmp_path, said.append, 16).poll()
    shown = [line for line in TUTORIAL.splitlines() if line.startswith(("step ", "validation at "))]
    assert shown == [*said[:3], *said[-2:]]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in TUTORIAL.splitlines() if line[:1] == "│"]
    assert [row[0] for row in rows] == ["step", "1", "16"]
    for row, line in zip(rows[1:], (said[1], said[-2]), strict=True):
        assert f"reward {float(row[1]):+.3f}  accuracy {float(row[2]):.2f}" in line
        assert f"  {row[9]} s (generate {row[10]}, update {row[12]})" in line


def test_the_tutorials_rule_is_that_of_the_code_with_the_logs_figures():
    log = (ROOT / "recipe" / "retool" / "LOG.md").read_text(encoding="utf-8")
    assert "| smoke | 0.383 | 0.934 | -0.228 | +0.872 | 0.98 | 0.0021 |" in log
    assert "0.0% of 113 trajectories were right" in log
    assert "largest logit difference 0, mean vLLM probability difference 0.00079" in log
    numbers = {
        "accuracy_first": 0.383, "accuracy_last": 0.934, "tool_use_last": 0.98, "mask_errors": 0, "mask_rows": 16 * 64,
        "accuracy_without_tool": {"accuracy": 0.0, "trajectories": 113.0}, "probability_difference_last": 0.0021,
        "left": 0, "export": {"ok": True, "differences": {
            "largest logit difference": 0.0, "mean vLLM probability difference": 0.00079}},
    }  # fmt: skip
    assert all(check.passed for check in checks(numbers))
    for check in checks(numbers):
        assert f"| {check.name} | {check.found} |" in TUTORIAL


def test_the_tutorials_evaluation_is_the_logs():
    log = (ROOT / "recipe" / "retool" / "LOG.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\|$", TUTORIAL.partition("## Evaluate")[2].partition("## ")[0], re.M)
    assert len(rows) == 7
    assert [row for row in rows if row not in log] == []
    assert "Validation on 32 held-out problems: step 0: 0.281, step 16: 0.938" in log


def test_the_tutorials_description_of_data_is_one(tmp_path: Path):
    [text] = [text for kind, text in FENCE.findall(TUTORIAL) if kind == "yaml"]
    (tmp_path / "my_maths.yaml").write_text(text)
    assert load_description(tmp_path / "my_maths.yaml").mapping.answer == "solution.final"


def test_as_many_alarms_as_the_pages_say():
    assert len(NAMES) == 15
    assert "Fifteen alarms" in TUTORIAL
    assert "twelve more" in ENGLISH
    assert "十二种" in CHINESE
