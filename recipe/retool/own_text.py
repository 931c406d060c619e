"""What of a transcript is the model's own last word: no prompt, no tool output, no thoughts, no program.

In training the agent loop knows the turns and gives the last one, so that most of this is needed only for what is
graded from a file, and for verl's DAPO reward loop, which hands on the decoded response alone.
"""

import re

_TOOL_END = "</tool_response>"
_TURN, _TURN_END = "<|im_start|>", "<|im_end|>"
_FENCE = re.compile(r"^[ \t]{0,3}(```+|~~~+)[ \t]*([\w+-]{0,20})[^\n`]*$", re.MULTILINE)
_PROSE = frozenset(("latex", "tex", "math", "text", "txt", "markdown", "md", "plaintext", "plain"))
_LOOKS_LIKE_CODE = re.compile(
    r"^[ \t]*(?:import |from \w+ import|def |for .*:|while .*:|if .*:|print\(|# |\w+ ?= ?\S)", re.M
)


def own_final_text(transcript: str) -> str:
    """What the model itself wrote after the last tool result and the last thought, without tool calls and code.

    The text after the *last* </tool_response> is taken, so that a program which prints that tag cannot
    smuggle its output in. What tags cannot tell: a transcript cut inside a tool result that prints one.
    """
    text = transcript.rpartition(_TOOL_END)[2]
    text = text.partition("<tool_response>")[0]  # cut inside a tool result: the rest is not the model's
    text = _last_assistant_turn(text)
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    # After the last complete call only a call cut in its middle can follow; earlier text is kept, as a
    # model may answer and then still call.
    pieces = text.split("<tool_call>")
    text = pieces[0] + "".join(piece.partition("</tool_call>")[2] for piece in pieces[1:])
    return without_code(text)


def _last_assistant_turn(text: str) -> str:
    _, mark, turn = text.rpartition(_TURN)
    if mark:
        role, _, turn = turn.partition("\n")
        if role.strip() != "assistant":
            return ""  # the last to speak was someone else: a prompt, a user, a system message
    return turn.partition(_TURN_END)[0] if mark or _TURN_END in turn else text


def without_code(text: str) -> str:
    """The text without fenced blocks of program code: a comment or a print in one is no answer.

    A fence without a language is code if it looks like it; an open fence reaches to the end of the text.
    """
    kept, start = [], 0
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2]:
            kept.append(text[start : opening.start()] + _prose(opening, text[opening.end() : fence.start()]))
            opening, start = None, fence.end()
    if opening is None:
        return "".join([*kept, text[start:]])
    return "".join([*kept, text[start : opening.start()], _prose(opening, text[opening.end() :])])


def _prose(opening: re.Match[str], block: str) -> str:
    language = opening[2].lower()
    is_code = language not in _PROSE if language else bool(_LOOKS_LIKE_CODE.search(block))
    return "" if is_code else block
