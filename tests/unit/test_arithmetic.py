"""recipe.smoke.arithmetic: problems with exact answers, in the form of real data."""

from __future__ import annotations

import random

import pytest

from recipe.smoke.arithmetic import HIGH, LOW, OPERATORS, Problem, distinct, draw, raw_row


@pytest.mark.parametrize(("problem", "answer"), [(Problem(57, "+", 68), 125), (Problem(17, "-", 98), -81)])
def test_answers_are_exact(problem: Problem, answer: int):
    assert problem.answer == answer
    assert eval(problem.expression) == answer


def test_every_answer_is_what_python_says():
    rng = random.Random(0)
    for _ in range(500):
        problem = draw(rng)
        assert problem.answer == eval(problem.expression)
        assert LOW <= problem.left <= HIGH
        assert LOW <= problem.right <= HIGH
        assert problem.operator in OPERATORS


def test_the_same_seed_gives_the_same_problems_all_different():
    problems = distinct(300, seed=1)
    assert problems == distinct(300, seed=1) != distinct(300, seed=2)
    assert len(set(problems)) == 300


def test_one_answer_for_all_is_rarely_right():
    answers = [problem.answer for problem in distinct(544, seed=1)]
    most = max(answers.count(answer) for answer in set(answers))
    assert most / len(answers) < 0.03


def test_a_row_is_one_of_dapos():
    row = raw_row(Problem(12, "-", 13), 7, "val")
    assert row["reward_model"] == {"ground_truth": "-1", "style": "rule-lighteval/MATH_v2"}
    assert row["extra_info"] == {"index": "val-00007"}
    [message] = row["prompt"]
    assert message["role"] == "user"
    assert "What is 12 - 13?" in message["content"]
