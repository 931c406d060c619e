"""verl_ext.tools.observation: what the model sees of an execution."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.sandbox.interface import Execution, ExecutionError
from verl_ext.tools.observation import NOTHING, observation_text, printable, shorten

ERROR = ExecutionError("ValueError", "no", "Traceback (most recent call last)\nValueError: no")


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (Execution(), NOTHING),
        (Execution(stdout="\n \n"), NOTHING),
        (Execution(stdout="\x1b\x00"), NOTHING),
        (Execution(stdout="1\n2\n"), "1\n2"),
        (Execution(results=("42",)), "42"),
        (Execution(stdout="a\n", results=("1", "2"), stderr="w\n"), "a\n1\n2\nw"),
        (Execution(stdout="a", error=ERROR), f"a\n{ERROR.traceback}"),
        (Execution(error=ExecutionError("KeyError", "'x'", "")), "KeyError: 'x'"),
        (Execution(png_count=2), "(2 picture(s) shown; pictures are not returned)"),
        (Execution(stdout="x", dropped_bytes=7), "x\n(7 bytes of output were not kept)"),
        (Execution(dropped_bytes=7), "\n(7 bytes of output were not kept)"),
        (Execution(stdout="  indented\n"), "  indented"),
        (Execution(stdout="\x1b[31mred\x1b[0m\r\x07\x00é\N{GRINNING FACE}\ttab"), "[31mred[0mé\N{GRINNING FACE}\ttab"),
        (Execution(stdout="\ud800 half"), "? half"),
    ],
)
def test_order_and_text(execution: Execution, text: str):
    assert observation_text(execution, 4096) == text


def test_a_long_output_keeps_head_tail_and_the_exception():
    text = observation_text(Execution(stdout="x" * 10_000_000, error=ERROR), 400)
    assert len(text) == 400
    assert text.startswith("xxx")
    assert text.endswith("ValueError: no")
    assert "characters; the middle is cut" in text


@given(st.text(max_size=400), st.integers(80, 300))
def test_a_cut_text_is_never_longer_than_asked_and_states_its_length(text: str, max_chars: int):
    short = shorten(text, max_chars)
    assert len(short) <= max_chars
    assert (short == text) == (len(text) <= max_chars)
    if short != text:
        assert f"({len(text)} characters" in short
        head = short.split("\n... (")[0]
        assert text.startswith(head)


@pytest.mark.parametrize("max_chars", [1, 2, 10, 60])
def test_a_tiny_limit_still_gives_head_and_tail(max_chars: int):
    short = shorten("a" + "-" * 1000 + "z", max_chars)
    assert short[0] == "a"
    assert short[-1] == "z"


@given(st.text(st.characters()))
def test_what_is_shown_can_be_encoded(text: str):
    shown = printable(text)
    shown.encode()
    assert printable(shown) == shown
