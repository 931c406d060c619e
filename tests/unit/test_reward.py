"""The reward function as verl sees it: same keys, plain values, never an exception for what a model wrote."""

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipe.retool.reward
from recipe.retool.grading import Reason
from recipe.retool.reward import compute_score, wrong_score
from verl_ext.errors import ConfigurationError

KEYS = ["score", "acc", "verdict", "extracted", "pred"]
RIGHT, WRONG = r"\boxed{33}", r"\boxed{34}"


def score(text=RIGHT, truth="33", info=None, **kwargs):
    return compute_score(data_source="math_dapo", solution_str=text, ground_truth=truth, extra_info=info, **kwargs)


def test_right_and_wrong():
    assert score() == {"score": 1.0, "acc": 1.0, "verdict": "equal", "extracted": "33", "pred": "33"}
    assert score(WRONG) == {"score": -1.0, "acc": 0.0, "verdict": "different", "extracted": "34", "pred": "34"}


@pytest.mark.parametrize(("turns", "expected"), [(2, -1.0), (4, -0.9), (6, -0.8), (10, -0.6), (40, -0.6), (0, -1.0)])
def test_wrong_answers_are_paid_for_turns_as_in_verls_recipe(turns, expected):
    assert score(WRONG, info={"num_turns": turns})["score"] == pytest.approx(expected)
    assert wrong_score(turns) == pytest.approx(expected)
    assert score(WRONG, info={"num_turns": turns}, shaping="binary")["score"] == -1.0
    assert score(RIGHT, info={"num_turns": turns})["score"] == 1.0


def test_final_text_beats_everything_else():
    info = {"final_text": WRONG, "assistant_text": RIGHT, "num_turns": 4}
    assert score(RIGHT, info=info)["extracted"] == "34"
    assert score(RIGHT, info=info | {"final_text": ""})["verdict"] == "no_text"
    assert score(WRONG, info={"assistant_text": RIGHT})["acc"] == 1.0
    assert score(RIGHT, info={"final_text": None, "assistant_text": None})["acc"] == 1.0


def test_without_tool_fields_the_response_is_read_without_tool_output():
    turn = "I compute.\n<tool_call>\n{}\n</tool_call>\nuser\n<tool_response>\n%s\n</tool_response>\nassistant\n"
    assert score(turn % RIGHT + "No idea.")["verdict"] == "no_answer"
    assert score(turn % WRONG + RIGHT)["acc"] == 1.0
    assert score(turn % RIGHT + WRONG)["score"] == pytest.approx(-0.9)
    assert score(turn % "1" + turn % "2" + WRONG)["score"] == pytest.approx(-0.8)
    two_results_in_one_turn = "<tool_response>1</tool_response>\n<tool_response>2</tool_response>\n"
    assert score(two_results_in_one_turn + WRONG)["score"] == pytest.approx(-0.9)


def test_failed_infrastructure_is_neither_right_nor_wrong():
    result = score(RIGHT, info={"infra_failed": True, "final_text": RIGHT})
    assert result == {"score": 0.0, "acc": 0.0, "verdict": "infra_failed", "extracted": "", "pred": ""}


def test_equal_integers_vote_together():
    assert {score(rf"\boxed{{{box}}}")["pred"] for box in ("1,234", "1234.0", "01234")} == {"1234"}


@pytest.mark.parametrize("truth", [None, "", " "])
def test_a_missing_ground_truth_is_wrong(truth):
    assert score(RIGHT, truth)["verdict"] == "no_ground_truth"
    assert score(r"\boxed{}", truth)["score"] == -1.0


def test_unknown_shaping_is_refused():
    with pytest.raises(ConfigurationError, match="retool, binary"):
        score(shaping="retol")  # type: ignore[arg-type]


anything = st.one_of(
    st.none(), st.text(st.characters()), st.binary(), st.integers(), st.floats(), st.lists(st.text()), st.booleans()
)


@given(anything, anything, st.dictionaries(st.sampled_from(["final_text", "num_turns", "infra_failed"]), anything))
def test_same_keys_and_plain_values_whatever_comes(text, truth, info):
    for result in (score(text, truth, info), score(f"\\boxed{{{text}}}", truth, info)):
        assert list(result) == KEYS
        assert {key: type(value) for key, value in result.items()} == {
            key: float if key in ("score", "acc") else str for key in KEYS
        }
        json.dumps(result, ensure_ascii=False).encode()
        assert all(len(value) <= 200 for value in result.values() if isinstance(value, str))


def test_loads_by_file_path_under_verls_module_name():
    path = Path(recipe.retool.reward.__file__)
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "custom_module" not in sys.modules
    assert module.compute_score("math_dapo", RIGHT, "33", {}, reward_router_address=None)["acc"] == 1.0


README = Path(recipe.retool.reward.__file__).with_name("README.md").read_text(encoding="utf-8")
ROWS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:2] == "| "]


def test_the_readmes_table_of_outcomes_is_what_is_paid():
    paid = {row[0]: row[1:] for row in ROWS if len(row) == 4}
    turns_of = {"turns 2": 2, "turns 4": 4, "turns 6": 6, "turns 10": 10}
    told = {turns: paid[name] for name in paid for words, turns in turns_of.items() if f"({words})" in name}
    assert sorted(told) == [2, 4, 6, 10]
    for turns, (verdict, retool, binary) in told.items():
        result = score(WRONG, info={"num_turns": turns})
        assert (result["verdict"], result["score"]) == (verdict, pytest.approx(float(retool)))
        assert score(WRONG, info={"num_turns": turns}, shaping="binary")["score"] == float(binary)
    assert {row[1] for row in ROWS if len(row) == 4} >= {*get_args(Reason), "infra_failed"} - {
        "needs_symbolic",
        "too_long",
    }


def test_the_readmes_table_of_options_is_the_signature():
    told = {row[0]: row[1] for row in ROWS if len(row) == 3}
    parameters = inspect.signature(compute_score).parameters
    options = {name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert {name: str(value).lower() for name, value in options.items()} == {
        k: v for k, v in told.items() if k != "key"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"wrong_cap": 1.0}, "wrong_cap"), ({"bonus_per_call": -1}, "bonus"), ({"shapping": "binary"}, "no shapping")],
)
def test_options_that_would_train_the_wrong_thing_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        score(**options)


def test_options_change_what_a_wrong_answer_earns():
    info = {"num_turns": 6}
    assert score(WRONG, info=info, bonus_per_call=0.0)["score"] == -1.0
    assert score(WRONG, info=info, bonus_per_call=0.5, wrong_cap=-0.2)["score"] == -0.2
    assert score(r"\boxed{2^5+1}")["score"] == 1.0
    assert score(r"\boxed{2^5+1}", symbolic=False)["verdict"] == "needs_symbolic"
