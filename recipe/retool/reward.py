"""The reward of one trajectory: graded answer, shaped as in ReTool. Given to verl as a file.

verl loads this file by its path under the module name `custom_module`, in the trainer and in every reward
worker, and calls `compute_score` by keyword, in threads. So the file stays thin, imports absolutely, holds
no state and uses no signals.

What is graded, best first:
1. `final_text`: the assistant's own text of its last turn. An answer belongs into the final response; a box
   in an earlier turn, before the tool had spoken, does not count when the last turn has none.
2. `assistant_text`: all turns of the assistant, where only that is known.
3. `solution_str`: the decoded response with the tools' output in it, where no agent loop told more. That is
   verl's DAPO reward loop, which passes no tool fields. It is cut at the last </tool_response>; a program
   that prints this tag in a response which ends inside the tool's output would be read as the model.

Source: ReTool (arXiv 2504.11536), whose reward is 1 or -1 on the final answer; verl v0.6.1
recipe/retool/retool.py `compute_score`,
experimental/reward/reward_loop/{naive,dapo}.py, workers/reward_manager/naive.py. What each outcome earns is in
README.md beside this file.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from recipe.retool.answers import normalise, parse_integer
from recipe.retool.grading import Verdict, grade
from recipe.retool.symbolic.equality import same_value
from verl_ext.errors import ConfigurationError

Shaping = Literal["retool", "binary"]
"""How a verdict becomes a score: "binary" is 1 or -1, as in the paper; "retool" is verl's recipe of that name, which
pays a wrong answer a little for using the tool.
"""

CORRECT = 1.0
WRONG = -1.0
WRONG_CAP = -0.6
"""Best score of a wrong answer. Source: verl v0.6.1 recipe/retool/retool.py."""
BONUS_PER_CALL = 0.1
"""What a round trip to the tool adds to a wrong answer. Source: as above."""
_FROM_VERL = frozenset(("reward_router_address", "reward_model_tokenizer"))
"""What verl's reward loops pass besides. Source: verl 0.6.1 experimental/reward/reward_loop/{naive,dapo}.py."""
_MAX_TEXT_CHARS = 200
"""Longest text per returned value: verl makes a fixed-width array of each column."""


def compute_score(
    data_source: str,
    solution_str: str | bytes | None,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    shaping: Shaping = "retool",
    symbolic: bool = True,
    wrong_cap: float = WRONG_CAP,
    bonus_per_call: float = BONUS_PER_CALL,
    **others: Any,
) -> dict[str, float | str]:
    """Score and verdict of one trajectory, always with the same keys and only str and float values.

    verl dies on rows with unequal keys and on numpy scalars; "pred" is the name by which verl takes
    majority votes in validation.

    Args:
        data_source: Name of the data set; every one is graded alike.
        solution_str: The decoded response, tool output included.
        ground_truth: The known answer; None and blank match nothing.
        extra_info: The row's extra_info with the agent loop's fields in it: final_text, assistant_text,
            num_turns, infra_failed.
        shaping: How a verdict becomes a score. This and the following are set with verl's key
            custom_reward_function.reward_kwargs.
        symbolic: Whether equal values in another form are right (2^{10} for 1024); off, only numbers and texts are
            compared. Off where the question itself is such a form ("What is 12 + 34?").
        wrong_cap: Best score of a wrong answer, with shaping "retool".
        bonus_per_call: What each round trip to the tool adds to a wrong answer, with shaping "retool".
        others: What verl passes and this function does not need.

    Returns:
        score: what the trainer learns from. acc: 1.0 if right, else 0.0. verdict: why. extracted: the
        answer as written. pred: the answer normalised.

    Raises:
        ConfigurationError: an option is wrong or unknown. Nothing in a trajectory or a row raises.
        GraderError: the processes that compare answers cannot be started.
    """
    _check_options(shaping, wrong_cap, bonus_per_call, others)
    info = extra_info if isinstance(extra_info, Mapping) else {}
    if info.get("infra_failed"):
        # Masked from the loss and from the group's statistics; the score only fills the place.
        return _result(0.0, None)
    text, known_turns = _graded_text(info, solution_str), _turns(info)
    verdict = grade(text, ground_truth, fallback=same_value if symbolic else None)
    if verdict.correct:
        return _result(CORRECT, verdict)
    if shaping == "binary":
        return _result(WRONG, verdict)
    turns = _count_turns(solution_str) if known_turns is None else known_turns
    return _result(wrong_score(turns, wrong_cap, bonus_per_call), verdict)


def _check_options(shaping: str, wrong_cap: float, bonus_per_call: float, others: Mapping[str, Any]) -> None:
    key = "custom_reward_function.reward_kwargs"
    if shaping not in get_args(Shaping):
        raise ConfigurationError(f"{key}.shaping is {shaping!r}: use one of {', '.join(get_args(Shaping))}.")
    if not WRONG <= wrong_cap < CORRECT or bonus_per_call < 0:
        raise ConfigurationError(
            f"{key}: wrong_cap is {wrong_cap} and bonus_per_call {bonus_per_call}: give a cap from {WRONG:g} to below "
            f"{CORRECT:g} and a bonus of at least 0, or a wrong answer could earn as much as a right one."
        )
    if unknown := others.keys() - _FROM_VERL:
        known = "shaping, symbolic, wrong_cap, bonus_per_call"
        raise ConfigurationError(f"{key} has no {', '.join(sorted(unknown))}: it takes {known}.")


def wrong_score(num_turns: float, cap: float = WRONG_CAP, bonus_per_call: float = BONUS_PER_CALL) -> float:
    """Score of a wrong answer: -1.0 without a tool call, 0.1 more per round trip, -0.6 at most.

    Args:
        num_turns: As verl counts: the user's turns (tool results among them) + the assistant's + 1; 2 is an
            answer without a tool call.
        cap: Best score.
        bonus_per_call: Per round trip to the tool.

    Source: verl v0.6.1 recipe/retool/retool.py `compute_score`.
    """
    return min(cap, WRONG + (max(num_turns, 2.0) - 2.0) / 2.0 * bonus_per_call)


def _graded_text(info: Mapping[str, Any], solution_str: str | bytes | None) -> str | bytes | None:
    for name in ("final_text", "assistant_text"):
        if isinstance(info.get(name), str):
            return cast(str, info[name])
    return solution_str


def _turns(info: Mapping[str, Any]) -> float | None:
    try:
        turns = float(info["num_turns"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return turns if 0 <= turns < float("inf") else None


_TOOL_TURN = re.compile(r"</tool_response>(?!\s{0,9}<tool_response>)")


def _count_turns(solution_str: str | bytes | None) -> float:
    """Turns in verl's count, as far as a decoded response shows it: several results in a row are one turn."""
    return 2.0 * (1 + len(_TOOL_TURN.findall(solution_str))) if isinstance(solution_str, str) else 2.0


def _result(score: float, verdict: Verdict | None) -> dict[str, float | str]:
    extracted = (verdict and verdict.extracted) or ""
    answer = normalise(extracted)
    value = parse_integer(answer)
    return {
        "score": score,
        "acc": 1.0 if verdict and verdict.correct else 0.0,
        "verdict": verdict.reason if verdict else "infra_failed",
        "extracted": _printable(extracted),
        "pred": _printable(answer if value is None else _digits(value)),
    }


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 4096 else hex(value)  # str() refuses more than 4,300 digits


def _printable(text: str) -> str:
    """At most `_MAX_TEXT_CHARS` characters that any JSON file can hold (no lone surrogates, no NUL)."""
    return text[:_MAX_TEXT_CHARS].encode("utf-8", "replace").decode().replace("\0", "")
