"""Golden table of answers: form in, verdict out. Two readings of one text are always wrong."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.retool.answers import MAX_ANSWER_CHARS, normalise, parse_integer
from recipe.retool.grading import grade
from recipe.retool.own_text import own_final_text
from recipe.retool.symbolic.equality import same_value

SHARED_CASES = Path(__file__).parents[3] / "shared" / "cases" / "grader_cases.jsonl"
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
    r"If $a = 1$ or $b = 2$ then it is \boxed{33}.",
    r"\boxed{33}, or in words thirty-three",
    r"The answer is \boxed{33}, put into \boxed{} as asked.",
    r"\boxed{\boxed{33}}",
    "Answer: 33",
    "Answer: $33$.",
    "**Answer:** 33",
    "**Final Answer: 33**",
    "answer:\n\n33",
    "Answer: 12\nNo.\nAnswer: 33",
    "\u7b54\u6848\uff1a33",
    "\u7b54\u6848\u662f\uff1a$33$\u3002",
    "The final answer is $33$. I hope it is correct.",
    "Answer: 33<|im_end|>",
    "so\n#### 33",
    "Answer: 12, that is\n\\boxed{33}",
    r"<think>maybe \boxed{12}</think>\boxed{33}",
    r"\\boxed{33}",
    "\boxed{33}",
    r"\boxed{\bf 33}",
    r"\boxed{33 cm}",
    r"\boxed{33cm^2}",
    r"\boxed{33 apples}",
    "\\boxed{33\u4e2a}",
    "\\boxed{\u20ac33}",
    r"\boxed{2^5 + 1 = 33}",
    r"\boxed{m+n = 30+3 = 33}",
    r"\boxed{\textbf{(C)}\ 33}",
    "```latex\n\\boxed{33}\n```",
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
    (r"\boxed{12 = 33}", "needs_symbolic"),
    (r"\boxed{is$x=$ + - + x=33}", "needs_symbolic"),
    (r"\boxed{\frac{66}{3} = 33}", "needs_symbolic"),
    (r"\boxed{33 squared}", "needs_symbolic"),
    (r"\boxed{33 ab}", "needs_symbolic"),
    ("\\boxed{33\u4e07}", "needs_symbolic"),
    (r"\boxed{12\text{ hours } 33\text{ minutes}}", "needs_symbolic"),
    ("The answer is 12. Or rather 33.", "several_answers"),
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
        (r"\text{(C)}", "C"),
        (r"\textbf{(C)}\ 33", "C"),
        ("(C)", r"\text{(C)}"),
        (r"\text{No solution}", "no solution"),
        (r"12\text{ cm}", r"12\text{ centimeters}"),
        (r"12\text{ km/h}", r"12\text{ kilometers per hour}"),
        (r"12\text{ cm}^2", r"12\text{ square cm}"),
        ("12", r"12\text{ cm}"),
        ("33", 33.0),
        ("0.5", 0.5),
        ("x=5", "5"),
        ("5", "x=5"),
        ("x^2+y^2 = 1", "x^2+y^2 = 1"),
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
        (r"12\text{ m}", r"12\text{ cm}"),
        (r"12\text{ cm}^3", r"12\text{ cm}^2"),
        ("y=5", "x=5"),
        ("1", "x^2+y^2 = 1"),
        ("x+y=1", "x^2+y^2 = 1"),
        ("x^2+y^2 = 0", "0"),
        ("B", "C"),
    ],
)
def test_unequal_values(box, truth):
    assert not grade(rf"\boxed{{{box}}}", truth).correct


@pytest.mark.parametrize(
    "truth",
    [None, "", "  ", True, float("nan"), float("inf"), [], "None", "nan", pytest.param(10**5000, id="5001 digits")],
)
def test_a_bad_ground_truth_matches_nothing(truth):
    for text in (r"\boxed{}", r"\boxed{33}", r"\boxed{None}", "Answer: True", r"\boxed{1}", r"\boxed{3}"):
        assert not grade(text, truth).correct


def test_fallback_decides_only_what_integers_cannot():
    asked = []

    def fallback(answer, truth):
        asked.append((answer, truth))
        return "equal"

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


BY_VALUE = [
    (r"2^{10}", "1024"),
    ("8!", "40320"),
    (r"\frac{66}{2}", "33"),
    ("66/2", "33"),
    (r"\sqrt{1089}", "33"),
    (r"\binom{10}{2}", "45"),
    (r"1\frac{3}{4}", r"\frac{7}{4}"),
    ("1 3/4", "1.75"),
    (r"\frac34", "0.75"),
    (r"0.\overline{3}", r"\frac13"),
    (r"0.1\overline{36}", r"\frac{3}{22}"),
    (r"75\%", r"\frac34"),
    ("0.75", r"75\%"),
    (r"\frac{\pi}{3}", r"60^\circ"),
    (r"\$32,348.50", "32348.5"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
    (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
    ("2\u221a3", r"\sqrt{12}"),
    (r"60^\circ", r"\frac{\pi}{3}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"e^{i\pi}", "-1"),
    (r"\log_2 8", "3"),
    (r"2\log 2", r"\log 4"),
    ("(x+1)(x-1)", "x^2-1"),
    (r"\cos 2x", r"1-2\sin^2 x"),
    ("2i+1", "1+2i"),
    ("2,1", "1,2"),
    (r"x=1 \text{ or } x=2", "1,2"),
    (r"1\pm\sqrt2", r"1-\sqrt2, 1+\sqrt2"),
    (r"\{1,2,2\}", r"\{1,2\}"),
    (r"0\le x<1", "[0,1)"),
    (r"x \in (5,\infty)", "x > 5"),
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"),
    (r"(3,\infty)\cup(-\infty,2)", r"(-\infty,2)\cup(3,\infty)"),
    (r"\left(1,\tfrac12\right)", "(1, 0.5)"),
    (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("y - 2x = 3", "y=2x+3"),
    ("2x+2y-2=0", "x+y=1"),
    ("2516_{8}", "2516_8"),
]
NOT_BY_VALUE = [
    ("12 or 33", "33"), ("12, 33", "33"), (r"\pm 33", "33"), (r"\{33, 12\}", "33"), ("33 - 12", "33"), ("33/12", "33"),
    ("0.33", r"\frac13"), ("0.3333333333", r"\frac13"), ("3.14159265358979", r"\pi"), ("1.7320508", r"\sqrt3"),
    (r"\approx 33", "33"), (r"33\ldots", "33"), ("33.0000000001", "33"),
    (r"20000000000000000000001", r"2\times 10^{22}"),
    ("(2,1)", "(1,2)"), ("[0,1]", "[0,1)"), ("(0,1)", "0,1"), ("1,2,2", "1,2"), ("1", "1,2"), ("x^3", "x^2"),
    (r"\frac{a}{b}", r"\frac{b}{a}"), (r"\ln 2", r"\log 2"), ("2516", "2516_8"), ("1358", "2516_8"),
    ("2516_9", "2516_8"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), ("listen", "silent"), ("even", "odd"),
    ("1-2i", "1+2i"), (r"\infty", r"-\infty"), ("x+y=2", "x+y=1"), ("2x+3", "y=2x+4"), (r"\sqrt{1+10^{-30}}", "1"),
    (r"\sum_{k=1}^{3} 11", "33"), (r"133 \bmod 100", "33"), (r"\gcd(33, 66)", "33"), ("1+2+4+8+18", "33"),
    (r"9^{9^{9^{9}}}", "33"), (r"99999999!", "33"), (r"\sin(\cos(\tan(x^{x})))", "33"),
]  # fmt: skip


@pytest.mark.parametrize(("box", "truth"), BY_VALUE)
def test_equal_values_in_another_form(box, truth):
    assert grade(rf"\boxed{{{box}}}", truth, fallback=same_value).correct
    assert not grade(rf"\boxed{{{box}}}", truth).correct


@pytest.mark.parametrize(("box", "truth"), NOT_BY_VALUE)
def test_other_values_in_another_form(box, truth):
    assert not grade(rf"\boxed{{{box}}}", truth, fallback=same_value).correct


@pytest.mark.skipif(not SHARED_CASES.exists(), reason="the larger table of cases is not beside this checkout")
def test_larger_table_of_cases():
    wrong = {
        case["id"]
        for case in map(json.loads, SHARED_CASES.read_text().splitlines())
        if grade(case["text"], case["ground_truth"], fallback=same_value).correct != case["correct"]
    }
    assert wrong == set()


MATH_500 = SHARED_CASES.parents[1] / "data" / "math_500.jsonl"
# The same number with a unit and without, or the same value in two forms; all others of 90,300 pairs differ.
SAME_IN_MATH_500 = {
    ("10,\\!080", "10080"), ("120", "120^\\circ"), ("15", "15\\mbox{ cm}^2"), ("30", "30^\\circ"), ("36", "36^\\circ"),
    ("36", "\\$36"), ("90", "90^\\circ"), ("5", "x=5"), ("-2,1", "1,-2"), ("2 \\sqrt{5}", "2\\sqrt{5}"),
    ("\\frac14", "\\frac{1}{4}"), ("180^\\circ", "\\pi"),
}  # fmt: skip


@pytest.mark.skipif(not MATH_500.exists(), reason="MATH-500 is not beside this checkout")
def test_every_answer_of_math_500_is_itself_and_no_other():
    answers = sorted({json.loads(line)["answer"] for line in MATH_500.read_text().splitlines()})
    assert [one for one in answers if not grade(rf"\boxed{{{one}}}", one, fallback=same_value).correct] == []
    # Some of the pairs; tests/bench/bench_grading.py has them all.
    pairs = [(one, other) for one in answers for other in answers if one != other][::53]
    same = [pair for pair in pairs if grade(rf"\boxed{{{pair[0]}}}", pair[1], fallback=same_value).correct]
    assert {tuple(sorted(pair)) for pair in same} <= {tuple(sorted(pair)) for pair in SAME_IN_MATH_500}
