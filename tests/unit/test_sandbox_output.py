from __future__ import annotations

import json
import tracemalloc

import pytest

from verl_ext.errors import SandboxUnavailableError
from verl_ext.sandbox.events import MAX_LINE_BYTES, ExecutionEvents
from verl_ext.sandbox.interface import OutputLimits
from verl_ext.sandbox.output import CappedText, OutputCollector, cap_text


@pytest.mark.parametrize("chunk", [1, 3, 7, 100, 1000])
@pytest.mark.parametrize("length", [0, 9, 10, 11, 20, 21, 1000])
def test_head_and_tail_are_kept_however_the_text_is_cut(length: int, chunk: int):
    text = "".join(chr(ord("a") + n % 26) for n in range(length))
    capped = CappedText(20)
    for start in range(0, length, chunk):
        capped.add(text[start : start + chunk])
    if length <= 20:
        assert capped.text() == text
        assert capped.dropped_bytes == 0
    else:
        assert capped.dropped_bytes == length - 20
        assert capped.text() == f"{text[:10]}\n[... {length - 20} bytes dropped ...]\n{text[-10:]}"


def test_a_cut_inside_a_character_loses_that_character_only():
    kept, dropped = cap_text("ä" * 100, 11)
    assert dropped == 190
    assert kept.startswith("ä" * 2 + "\n")
    assert kept.endswith("\n" + "ä" * 2)


def test_what_cannot_be_stored_is_replaced():
    assert (
        cap_text("a\x00\ud800b\U0001f600", 100)[0] == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b\U0001f600"
    )


def test_a_flood_does_not_fill_the_memory():
    capped = CappedText(65_536)
    tracemalloc.start()
    for number in range(20_000):
        capped.add(f"{number:063d}\n" * 4)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 300_000
    assert capped.text().endswith(f"{19_999:063d}\n")


def test_results_are_kept_from_the_last_on():
    output = OutputCollector(OutputLimits(max_bytes=10))
    for text in ("aaaa", None, "bbbb", "cccc"):
        output.add_result(text)
    assert output.results == ("bbbb", "cccc")
    assert output.dropped_bytes == 4


def test_a_huge_error_is_capped():
    output = OutputCollector(OutputLimits(max_bytes=100))
    output.set_error("E" * 1000, "v" * 1000, "t" * 1000)
    assert output.error is not None
    assert len(output.error.name) < 250
    assert len(output.error.value) < 150
    assert len(output.error.traceback) < 150
    assert output.dropped_bytes == 1800


def test_events_may_be_cut_anywhere():
    rows = [{"type": "stdout", "text": "ä\n"}, {"type": "result", "text": "1"}, {"type": "end_of_execution"}]
    data = b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows)
    events = ExecutionEvents(OutputCollector(OutputLimits()))
    for position in range(len(data)):
        events.feed(data[position : position + 1])
    assert not events.ended
    events.finish()
    assert events.ended
    assert events.output.stdout.text() == "ä\n"
    assert events.output.results == ("1",)


def test_a_line_too_long_to_hold_is_dropped_and_counted():
    events = ExecutionEvents(OutputCollector(OutputLimits()))
    for _ in range(MAX_LINE_BYTES // 2**20 + 1):
        events.feed(b"x" * 2**20)
    events.feed(b'\n{"type": "stdout", "text": "next"}\n')
    assert events.output.stdout.text() == "next"
    assert events.output.dropped_bytes == MAX_LINE_BYTES + 2**20


@pytest.mark.parametrize("line", [b"<html>", b"[1]", b"\xff\xfe", b"null", b'"text"'])
def test_a_line_that_is_no_event_is_the_services_fault(line: bytes):
    with pytest.raises(SandboxUnavailableError):
        ExecutionEvents(OutputCollector(OutputLimits())).feed(line + b"\n")


def test_events_with_odd_values_do_not_break_the_reader():
    events = ExecutionEvents(OutputCollector(OutputLimits()))
    odd = [
        {"type": "stdout"}, {"type": "stderr", "text": 3}, {"type": "result", "text": {"a": 1}}, {"type": "error"},
        {"type": None}, {}, {"type": "error", "name": 1, "value": None, "traceback": ["a", "b"]},
    ]  # fmt: skip
    for row in odd:
        events.feed(json.dumps(row).encode() + b"\n")
    assert events.output.stderr.text() == "3"
    assert events.output.results == ('{"a": 1}',)
    assert events.output.error is not None
