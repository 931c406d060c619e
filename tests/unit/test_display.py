"""verl_ext.display: what a run shows on a terminal, in a file, and to a program."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from verl_ext.display import display, on_terminal

STEP = {"step": 3, "total_steps": 24, "left_s": 90.0, "reward": 0.5}
ALARM = "ALARM truncation at step 3: 0.5. Cause: [too short]"


def test_a_file_has_every_line_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    with display() as shown:
        shown.begin(24)
        shown.say("step 1/2  reward [+0.5]")
        shown.tell(STEP)
    assert capsys.readouterr() == ("step 1/2  reward [+0.5]\n", "")


def test_a_program_has_one_object_a_step_on_standard_output_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    with display(as_json=True) as shown:
        shown.begin(24)
        shown.say("run x: /runs/x")
        shown.tell(STEP)
        shown.say(ALARM)
        shown.tell(STEP | {"step": 4})
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [STEP, STEP | {"step": 4}]
    assert err == f"run x: /runs/x\n{ALARM}\n"


def test_a_program_is_never_given_what_is_no_json(capsys: pytest.CaptureFixture[str]):
    with display(as_json=True) as shown, pytest.raises(ValueError, match="JSON"):
        shown.tell(STEP | {"reward": float("nan")})


def test_a_terminal_has_the_lines_above_a_bar_that_is_gone_at_the_end():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system="standard", highlight=False)
    with on_terminal(console) as shown:
        shown.say("before the start")
        assert written.getvalue() == "before the start\n"
        shown.begin(24)
        shown.say("step 3/24  " + "x" * 100)
        shown.tell(STEP)
        shown.say(ALARM)
        shown.say("alarm truncation ended at step 4: 0.1")
    text = written.getvalue()
    assert "step 3/24  " + "x" * 100 in text, "a line is not broken"
    assert f"\x1b[1;31m{ALARM}\x1b[0m" in text, "brackets are no markup"
    assert "\x1b[32malarm truncation ended" in text
    assert "3/24" in text.replace("step 3/24", "")
    assert "1:30 left" in text
    assert text.rstrip().endswith("\x1b[2K"), "the bar is wiped away"


def test_a_terminal_is_found(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    with display() as shown:
        shown.say("a line")
    assert "a line" in sys.stdout.getvalue()
