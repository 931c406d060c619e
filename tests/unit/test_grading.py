"""Golden table of answers: form in, verdict out. Two readings of one text are always wrong."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.retool.answers import MAX_ANSWER_CHARS, normalise, parse_integer
from recipe.retool.grading import grade, own_final_text

SHARED_CASES = Path(__file__).parents[3] / "shared" / "cases" / "grader_cases.jsonl"
# These need a symbolic comparison, which is the fallback's work.
NEEDS_SYMBOLIC = {
    "factorial", "power_eval", "frac_mixed", "frac_short", "frac_dfrac", "frac_decimal", "frac_tfrac", "frac_neg",
    "sqrt_nobrace", "matrix", "sqrt_equiv", "pi_frac", "set_dup", "sqrt_unicode", "interval_ineq", "list_order",
    "text_choice",
}  # fmt: skip

RIGHT = [
    r"\boxed{33}",
    r"\boxed 33",
    r"\boxed 33.",
    r"\boxed {33}",
    r"\fbox{33}",
    "\\boxed{\n33\n}",
    r"\boxed{{33}}",
    r"\boxed{033}",
    r"\boxed{+33}",
    r"\boxed{33.}",
    r"\boxed{33.00}",
    r"\boxed{33\,}",
    r"\boxed{\!33}",
    r"\boxed{'33'}",
    "\\boxed{\u201c33\u201d}",
    r"\boxed{$33$}",
    r"\boxed{$$33$$}",
    r"\boxed{\(33\)}",
    r"\boxed{\$33}",
    r"\boxed{33\%}",
    r"\boxed{33\text{ percent}}",
    r"\boxed{**33**}",
    r"\boxed{x = $33$}",
    r"\boxed{\[33\]}",
    r"\boxed{33^\circ}",
    r"\boxed{33^{\circ}}",
    "\\boxed{33\u00b0}",
    r"\boxed{33\text{ degrees}}",
    r"\boxed{33\text{ cm}^2}",
    r"\boxed{33~\mathrm{km/h}}",
    r"\boxed{\text{33}}",
    r"\boxed{\mathbf{33}}",
    r"\boxed{x = 33}",
    r"\boxed{m+n=33}",
    r"\boxed{a_{1} = 33}",
    "\\boxed{\uff13\uff13}",
    "\\boxed{\U0001d7d1\U0001d7d1}",
    "\\boxed{33\u200b}",
    "\\boxed{33\x00}",
    "\\boxed{\u7b54\u6848\u662f33}",
    r"\boxed{33} " + "and this ends the proof. " * 40,
    r"\boxed{12}, no: the sum was wrong, so it is \boxed{33}",
    r"\boxed{33} = \boxed{033}",
    r"The answer is \boxed{33}, put into \boxed{} as asked.",
    r"\boxed{\boxed{33}}",
    "Answer: 33",
    "Answer: $33$.",
    "**Answer:** 33",
    "**Final Answer: 33**",
    "answer:\n\n33",
    "Answer: 12\nNo.\nAnswer: 33",
    "\u7b54\u6848\uff1a33",
    "so\n#### 33",
    "Answer: 12, that is\n\\boxed{33}",
    r"<think>maybe \boxed{12}</think>\boxed{33}",
]

WRONG = [
    ("", "no_text"),
    (" \n", "no_text"),
    (None, "no_text"),
    (b"", "no_text"),
    ("33", "no_answer"),
    (r"\boxed{}", "no_answer"),
    ("Answer:", "no_answer"),
    (r"\boxedx{33}", "no_answer"),
    (r"\boxed{34}", "different"),
    (r"\boxed{-33}", "different"),
    (r"\boxed{3", "truncated_box"),
    (r"\boxed", "truncated_box"),
    (r"\boxed{33} so finally \boxed{3", "truncated_box"),
    (r"\boxed{12} or \boxed{33}", "several_answers"),
    (r"\boxed{12} \text{ or } \boxed{33}", "several_answers"),
    (r"\boxed{12}, \boxed{33}", "several_answers"),
    ("Answer: 12 or Answer: 33", "several_answers"),
    (r"\boxed{12 or 33}", "needs_symbolic"),
    (r"\boxed{12\text{ or }33}", "needs_symbolic"),
    (r"\boxed{12, 33}", "needs_symbolic"),
    (r"\boxed{\boxed{12} or \boxed{33}}", "needs_symbolic"),
    (r"\boxed{33\text{ million}}", "needs_symbolic"),
    (r"\boxed{33_{8}}", "needs_symbolic"),
    (r"\boxed{33i}", "needs_symbolic"),
    (r"\boxed{x \ne 33}", "needs_symbolic"),
    (r"\boxed{x != 33}", "needs_symbolic"),
    (r"\boxed{x \ge 33}", "needs_symbolic"),
    (r"\boxed{x=12, y=33}", "needs_symbolic"),
    ("\\boxed{3\u00b3}", "needs_symbolic"),
    (r"\boxed{3.3e1}", "needs_symbolic"),
    (r"\boxed{33" + " 0" * MAX_ANSWER_CHARS + "}", "too_long"),
    ("Answer: 33\n\\boxed{34}", "different"),
    (r"\boxed{33}</think>I do not know.", "no_answer"),
    (r"I do not know.<think>or \boxed{33}", "no_answer"),
    ("<tool_response>\n\\boxed{33}\n</tool_response>I could not find it.", "no_answer"),
    ("<tool_response>\n</tool_response>\\boxed{33}\n</tool_response>I could not find it.", "no_answer"),
    ("I run it.<tool_response>\n\\boxed{33}", "no_answer"),
    ("<tool_call>print('\\boxed{33}')</tool_call>", "no_answer"),
    ("<tool_call>print('\\boxed{33}')", "no_answer"),
    (r"\boxed{33+0*len(__import__('os').popen('id').read())}", "needs_symbolic"),
    (r"\boxed{10^{10^{10}}}", "needs_symbolic"),
    (r"\boxed{9 \times 10^{99999}}", "needs_symbolic"),
]


@pytest.mark.parametrize("text", RIGHT)
def test_form_of_the_right_answer_is_right(text):
    assert grade(text, "33").correct, grade(text, "33")


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_everything_else_is_wrong_with_its_reason(text, reason):
    verdict = grade(text, "33")
    assert (verdict.correct, verdict.reason) == (False, reason)


@pytest.mark.parametrize(
    ("box", "truth"),
    [
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        (r"1,\!234", "1234"),
        ("1 234 567", "1234567"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("- 3", "-3"),
        ("-0", "0"),
        ("33", "033"),
        ("33", 33),
        (r"2\times 10^{22}", "20000000000000000000000"),
        (r"2.5 \cdot 10^3", "2500"),
        ("20000000000000000000000", "20000000000000000000000"),
        (r"2\sqrt{3}", r"2\sqrt{3}"),
        (r"\text{C}", "C"),
    ],
)
def test_equal_values(box, truth):
    assert grade(rf"\boxed{{{box}}}", truth).correct


@pytest.mark.parametrize(
    ("box", "truth"),
    [
        ("20000000000000000000001", "20000000000000000000000"),
        ("1000000001", "1000000000"),
        ("3", "-3"),
        ("1, 234", "1234"),
        ("12,34", "1234"),
        ("0,123", "123"),
        (r"2.5 \times 10^0", "2"),
        ("10\u00b2", "102"),
        ("12 34", "1234"),
        ("33.5", "33"),
        ("2**5", "25"),
        ("$12$$33$", "1233"),
        ("$12$ $345$", "12345"),
        (r"\(12\)\(33\)", "1233"),
        (r"5\text{ k}", "5"),
    ],
)
def test_unequal_values(box, truth):
    assert not grade(rf"\boxed{{{box}}}", truth).correct


@pytest.mark.parametrize("truth", [None, "", "  ", True, 3.0, [], pytest.param(10**5000, id="5001 digits")])
def test_a_bad_ground_truth_matches_nothing(truth):
    for text in (r"\boxed{}", r"\boxed{33}", r"\boxed{None}", "Answer: True", r"\boxed{1}", r"\boxed{3}"):
        assert not grade(text, truth).correct


def test_fallback_decides_only_what_integers_cannot():
    asked = []

    def fallback(answer, truth):
        asked.append((answer, truth))
        return True

    assert not grade(r"\boxed{34}", "33", fallback=fallback).correct
    assert grade(r"\boxed{2^{10}}", "1024", fallback=fallback).correct
    assert asked == [("2^{10}", "1024")]


MEGA = 10_000_000


@pytest.mark.parametrize(
    ("start", "repeated", "end"),
    [
        ("\\boxed{", "{", ""),
        ("", "\\boxed{", ""),
        ("", "\\boxed{}", ""),
        ("", "\\boxedx", ""),
        ("", "Answer: ", ""),
        ("Answer:", " ", "x"),
        ("", "<tool_call>", ""),
        ("", "\\", ""),
        ("", "$", "\\boxed{12}"),
        ("\\boxed{", "9", "}"),
        ("\\boxed{", "\\text{ ", "}"),
    ],
)
@pytest.mark.timeout(20)  # a quadratic path would take hours; how long it takes is measured elsewhere
def test_hostile_texts_end(start, repeated, end):
    assert not grade(start + repeated * (MEGA // len(repeated)) + end, "33").correct


@pytest.mark.parametrize(
    "inside", ["\\text{ " * 500 + "}" * 500, "a=" * 1900, "1 " * 1990, "1" + "$" * 3900 + "x", "{" * 1900 + "}" * 1900]
)
def test_hostile_boxes_end(inside):
    assert not grade(f"\\boxed{{{inside}}}", "33").correct


@given(st.text(st.characters(), max_size=200), st.one_of(st.none(), st.text(max_size=20), st.integers()))
def test_never_raises(text, truth):
    grade(text, truth)
    grade(text.encode("utf-8", "surrogatepass"), truth)
    grade(f"\\boxed{{{text}}}", truth)


@given(st.integers())
def test_every_integer_is_read_back(number):
    for written in (str(number), f"{number:,}", f"{number}.0", rf"\text{{{number}}}", f"${number}$"):
        assert parse_integer(normalise(written)) == number


@given(st.integers(), st.integers())
def test_different_integers_are_never_equal(answer, truth):
    assert grade(rf"\boxed{{{answer}}}", str(truth)).correct == (answer == truth)


def test_grades_in_a_thread_as_in_the_main_one():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(grade(r"\boxed{33}", "33")))
    thread.start()
    thread.join()
    assert verdicts == [grade(r"\boxed{33}", "33")]


def test_text_before_a_tool_call_stays():
    assert own_final_text("so \\boxed{33}<tool_call>{}</tool_call> done") == "so \\boxed{33} done"


@pytest.mark.skipif(not SHARED_CASES.exists(), reason="the larger table of cases is not beside this checkout")
def test_larger_table_of_cases():
    wrong = {
        case["id"]
        for case in map(json.loads, SHARED_CASES.read_text().splitlines())
        if grade(case["text"], case["ground_truth"]).correct != case["correct"]
    }
    assert wrong == NEEDS_SYMBOLIC
