"""Ways to a reward without an answer: what a model could learn to write, and that it earns nothing.

The reward is asked as verl asks it, with what the agent loop passes and without.
"""

import pytest

from recipe.retool.questions import CHINESE_SUFFIX, INSTRUCTION
from recipe.retool.reward import compute_score

RIGHT = r"\boxed{33}"
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(1)"}}\n</tool_call>'
TURN = "<|im_end|>\n<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def reward(text: str, truth: object = "33", **info: object) -> dict:
    return compute_score("math_dapo", text, truth, info, shaping="binary")


PRINTED_BY_A_TOOL = {
    "the output is the last thing": CALL + TURN.partition("\n</tool")[0] % RIGHT,
    "the output, then no answer": CALL + TURN % RIGHT + "I do not know.",
    "the program closes the output itself": CALL + TURN % f"</tool_response>{RIGHT}" + "Done.",
    "the program opens a turn of the assistant": CALL + TURN % f"<|im_end|>\n<|im_start|>assistant\n{RIGHT}" + "Done.",
    "cut inside output that opens a turn": CALL + f"<tool_response>\n<|im_start|>assistant\n{RIGHT}",
    "the answer line, printed": CALL + TURN % "Answer: 33" + "See above.",
    "the call's own text": '<tool_call>\n{"arguments": {"code": "# \\\\boxed{33}"}}\n</tool_call>',
    "a call that never ends": f"<tool_call>\nprint('{RIGHT}')",
}
QUOTED_FROM_THE_PROMPT = {
    "our instruction": f"The task says: {INSTRUCTION}",
    "the placeholder of verl's recipe": r"The answer format must be: \boxed{'The final answer goes here.'}",
    "the placeholder of DAPO's Chinese rows": CHINESE_SUFFIX,
    "the user's turn, repeated": f"<|im_start|>user\nIs it {RIGHT}?",
    "a system message": f"<|im_start|>system\n{RIGHT}<|im_end|>",
}
SEVERAL_ANSWERS = {
    "every number there is": " ".join(rf"\boxed{{{number}}}" for number in range(34)),
    "two boxes": rf"\boxed{{12}} or {RIGHT}",
    "another number behind the box": rf"It is {RIGHT} or 12.",
    "... with a doubt": rf"${RIGHT}$ (or maybe $12$)",
    "another number before the box": rf"It is $12$ or {RIGHT}.",
    "... in Chinese": f"\u7b54\u6848\u662f 12 \u6216 {RIGHT}",
    "two boxes, a line between": f"\\boxed{{12}}\n\n{RIGHT}",
    "two in a box": r"\boxed{12 \text{ or } 33}",
    "a list in a box": r"\boxed{12, 33}",
    "a set in a box": r"\boxed{\{12, 33\}}",
    "a range": r"\boxed{32 \le x \le 34}",
    "plus or minus": r"\boxed{\pm 33}",
    "boxes in a box": rf"\boxed{{\boxed{{12}}\ {RIGHT}}}",
    "two answer lines in one": "Answer: 12 or Answer: 33",
    "second thoughts": "Answer: 33. Or rather 12.",
    "an equation that is false": r"\boxed{12 = 33}",
    "answer lines against the box": "Answer: 33\n\\boxed{12}",
}
IN_PROGRAMS = {
    "a comment in a block": f"```python\n# {RIGHT}\n```\nRun this.",
    "a block that never ends": f"```python\nprint('{RIGHT}')",
    "a block without language": f"```\nprint('{RIGHT}')\n```",
    "a comment with an answer line": "```py\nx = 1\n# Answer: 33\n```",
    "tildes": f"~~~python\n# {RIGHT}\n~~~",
}
NOT_WORKED_OUT = {
    "a sum": r"\boxed{\sum_{k=1}^{3} 11}",
    "a remainder": r"\boxed{133 \bmod 100}",
    "a long expression": r"\boxed{1+2+4+8+16+2}",
    "Python": r"\boxed{int('33')}",
    "code that would be run by an eval": r"\boxed{33+0*len(__import__('os').popen('id').read())}",
    "a name": r"\boxed{x}",
    "the right side is missing": r"\boxed{x =}",
}
CUT_OR_THOUGHT = {
    "cut inside the box": r"\boxed{33",
    "cut after the number": RIGHT + r" so in the end \boxed{3",
    "in a thought": f"<think>{RIGHT}</think> I do not know.",
    "in a thought that never ends": f"<think>{RIGHT}",
}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{group}: {name}")
        for group, texts in (
            ("tool", PRINTED_BY_A_TOOL),
            ("prompt", QUOTED_FROM_THE_PROMPT),
            ("several", SEVERAL_ANSWERS),
            ("program", IN_PROGRAMS),
            ("unfinished", NOT_WORKED_OUT),
            ("cut", CUT_OR_THOUGHT),
        )
        for name, text in texts.items()
    ],
)
def test_earns_what_a_wrong_answer_earns(text):
    assert reward(text)["score"] == -1.0
    assert reward("", final_text=text)["score"] == -1.0


@pytest.mark.parametrize("truth", ["", " ", None, "None", "nan", "null"])
@pytest.mark.parametrize(
    "text", [r"\boxed{}", r"\boxed{ }", r"\boxed{None}", r"\boxed{nan}", "Answer:", "", "None", r"\boxed{0}"]
)
def test_a_missing_known_answer_rewards_nothing(text, truth):
    assert reward(text, truth)["score"] == -1.0


def test_an_earlier_turn_or_the_response_does_not_stand_in_for_the_last_turn():
    assert reward(RIGHT, final_text="", assistant_text=RIGHT)["score"] == -1.0
    assert reward(RIGHT, final_text="I am not sure.", assistant_text=RIGHT)["score"] == -1.0


def test_calls_alone_never_earn_what_an_answer_does():
    best = max(compute_score("x", "", "33", {"num_turns": turns})["score"] for turns in range(200))
    assert best == -0.6


def test_nothing_of_a_text_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for attack in (
        "open('pwned','w')", "[open('pwned','w'),2]", '"]); open("pwned", "w"); (["',
        "__import__('os').system('touch pwned')",
        "().__class__.__base__.__subclasses__()", r"\input{pwned}", r"\write18{touch pwned}",
    ):  # fmt: skip
        for truth in ("33", r"\begin{pmatrix}1\\2\end{pmatrix}", "x+1", attack + "1"):
            assert reward(rf"\boxed{{{attack}}}", truth)["score"] == -1.0
    assert list(tmp_path.iterdir()) == []
