"""The task of the smoke run: two-digit arithmetic, which the tiny model cannot do in its head.

It is ReTool's own claim in small. The model has been taught two habits: to answer hastily with a number
from the question, which is never right, and to ask the tool. All that reinforcement learning has to find is
which one pays. Only sums and differences: products have up to four digits, and copying those takes the tiny
model longer to learn than everything else together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from recipe.retool.questions import DAPO_PREFIX, DAPO_SUFFIX

OPERATORS = ("+", "-")
LOW, HIGH = 10, 99


@dataclass(frozen=True)
class Problem:
    """One question with an exact integer answer."""

    left: int
    operator: str
    right: int

    @property
    def question(self) -> str:
        """The question in words, without any instruction on the form of the answer."""
        return f"What is {self.left} {self.operator} {self.right}?"

    @property
    def expression(self) -> str:
        """Python source whose value is the answer."""
        return f"{self.left} {self.operator} {self.right}"

    @property
    def answer(self) -> int:
        """The exact answer."""
        return self.left + self.right if self.operator == "+" else self.left - self.right


def draw(rng: random.Random) -> Problem:
    """One problem, uniform over operands in [LOW, HIGH] and operators."""
    return Problem(rng.randint(LOW, HIGH), rng.choice(OPERATORS), rng.randint(LOW, HIGH))


def distinct(count: int, seed: int) -> list[Problem]:
    """`count` different problems, the same for the same seed."""
    rng, found = random.Random(seed), dict[Problem, None]()
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def raw_row(problem: Problem, index: int, split: str) -> dict[str, object]:
    """The problem as a row in DAPO-Math-17k's own schema, so that `prepare-data` reads it like real data."""
    prompt = f"{DAPO_PREFIX}\n\n{problem.question}\n\n{DAPO_SUFFIX}"
    return {
        "data_source": "arithmetic",
        "prompt": [{"content": prompt, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(problem.answer), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{split}-{index:05d}"},
    }
