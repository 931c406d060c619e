r"""The words of LaTeX and of plain text that an answer may consist of."""

import re
from typing import NamedTuple

from recipe.retool.symbolic.tree import Unreadable

_TOKEN = re.compile(
    r"(?P<space>(?:\s|\\(?:left|right)(?![A-Za-z])\.?)+)"
    r"|(?P<repeating>\d*\.\d*\\overline\s*\{\d+\})"
    r"|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<text>\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{[^{}\\$]*\})"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|%])"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<mark>[-+*/^_!(){}\[\],;=<>|&\u00b0\u03c0\u221a\u221e\u00d7\u00b7\u22c5\u00f7\u2264\u2265\u222a\u00b1\u2208]|\\\\)"
)
_UNICODE_ROOT = re.compile("\u221a(\\d+)")
_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,])")
_ALIASES = {
    "\u03c0": "\\pi", "\u221a": "\\sqrt", "\u221e": "\\infty", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*",
    "\\times": "*", "\\cdot": "*", "\u00f7": "/", "\\div": "/", "\u2264": "\\le", "\\leq": "\\le", "\\leqslant": "\\le",
    "\u2265": "\\ge", "\\geq": "\\ge", "\\geqslant": "\\ge", "\\lt": "<", "\\gt": ">", "\u222a": "\\cup",
    "\u00b1": "\\pm", "\u2208": "\\in", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac",
    "\\dbinom": "\\binom", "\\tbinom": "\\binom", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\mid": "|",
    "\\lbrace": "\\{", "\\rbrace": "\\}", "\\langle": "(", "\\rangle": ")", "\\lbrack": "[", "\\rbrack": "]",
    "\\lor": "or", "\\vee": "or",
    "\\varphi": "\\phi", "\\varepsilon": "\\epsilon", "\\ln": "ln",
}  # fmt: skip
# fmt: off
FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg",
    "exp",
))
GREEK = frozenset((
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi",
    "Psi", "Omega",
))
# fmt: on
SIGNS = frozenset(("=", "<", ">", "\\le", "\\ge", "\\in"))
SHORT_WORDS = frozenset(("yes", "no", "odd", "all", "one", "two", "six", "ten", "red", "none"))
BASES = {
    name: number
    for number, name in enumerate(("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 2)
}
MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "array"))


class Token(NamedTuple):
    r"""One word.

    Attributes:
        kind: number, repeating (0.1\overline{3}), word (letters), text (the inside of a text command), mark (a sign or
            a command), or gap (blanks behind a number, which tell "1 3/4" from "13/4").
        text: as written, with one spelling for what has several.
    """

    kind: str
    text: str


def tokenise(text: str) -> list[Token]:
    """The tokens of a normalised answer.

    Raises:
        Unreadable: it holds a character that no answer needs.
    """
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", text)
    if not re.search(r"[(\[{]", text):
        # "32,348.50" is one number, but inside brackets a comma always separates.
        text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise Unreadable(f"{text[at : at + 20]!r}")
        kind, value, at = match.lastgroup, match[0], match.end()
        if kind == "space":
            if tokens and tokens[-1].kind == "number":
                tokens.append(Token("gap", " "))
        elif kind == "text":
            tokens.append(Token("text", value[value.index("{") + 1 : -1].strip()))
        else:
            tokens.append(
                Token(kind if kind in ("number", "repeating", "word") else "mark", _ALIASES.get(value, value))
            )
    return tokens


class Cursor:
    """A place in a list of tokens, and how deep inside brackets it is."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = [*tokens, Token("end", "")]
        self._at = 0

    def put_back(self, kind: str, text: str) -> None:
        """Make the token that was just taken the next one again, with this text."""
        self._at -= 1
        self._tokens[self._at] = Token(kind, text)

    def peek(self, ahead: int = 0) -> Token:
        """The token that comes next, or one further on; gaps are not counted."""
        at = self._at
        while True:
            token = self._tokens[min(at, len(self._tokens) - 1)]
            if token.kind != "gap":
                if ahead == 0 or token.kind == "end":
                    return token
                ahead -= 1
            at += 1

    def take(self) -> Token:
        """The next token, and the place behind it."""
        while self._tokens[self._at].kind == "gap":
            self._at += 1
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def gap_before(self) -> bool:
        """Whether blanks stand before the next token (known behind numbers only)."""
        return self._tokens[self._at].kind == "gap"

    def is_next(self, *texts: str) -> bool:
        """Whether the next token is one of these marks or words."""
        token = self.peek()
        return token.text in texts and token.kind != "text"

    def accept(self, *texts: str) -> str:
        """The next token's text if it is one of these, else ""."""
        return self.take().text if self.is_next(*texts) else ""

    def expect(self, *texts: str) -> str:
        """The next token's text, which must be one of these.

        Raises:
            Unreadable: it is another.
        """
        found = self.accept(*texts)
        if not found:
            raise Unreadable(f"{self.peek().text!r} instead of {texts[0]!r}")
        return found

    def end(self) -> None:
        """Raises Unreadable unless all tokens were taken."""
        if self.peek().kind != "end":
            raise Unreadable(f"{self.peek().text!r} is left over")
