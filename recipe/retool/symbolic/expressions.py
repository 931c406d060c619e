r"""A normalised answer as a tree: numbers, symbols, the usual functions, lists, tuples, intervals, sets, matrices.

Why a parser of our own: sympy 1.14 reads LaTeX with an ANTLR runtime (4.11) that Hydra's pin (4.9.3) rules out, or
with a package that is not locked, and its other parser runs `eval`. Here nothing is ever run: a token that is not
listed ends the reading with `Unreadable`. Left out on purpose: \sum, \prod, \int, \lim, \bmod, \gcd, \max. An
answer that holds one restates a question instead of answering it, and evaluating it is what hangs other graders.

Linear in the length of the text, which is at most `MAX_CHARS`, and no deeper than `MAX_DEPTH`.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from recipe.retool.symbolic.tokens import BASES, FUNCTIONS, GREEK, MATRICES, SHORT_WORDS, SIGNS, Token, tokenise
from recipe.retool.symbolic.tree import Node, Unreadable

MAX_CHARS = 2_000
MAX_DEPTH = 40
"""Brackets, exponents and function arguments inside each other."""


def parse(text: str) -> Node:
    """The tree of a normalised answer.

    Raises:
        Unreadable: it is not all maths of the kinds above, or one of its marks has two readings.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    parser = _Parser(tokenise(text))
    node = parser.listing()
    parser.end()
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = [*tokens, Token("end", "")]
        self._at = 0
        self._depth = 0
        self._bars = 0

    # Reading tokens.

    def _peek(self, ahead: int = 0) -> Token:
        at = self._at
        while True:
            token = self._tokens[min(at, len(self._tokens) - 1)]
            if token.kind != "gap":
                if ahead == 0 or token.kind == "end":
                    return token
                ahead -= 1
            at += 1

    def _take(self) -> Token:
        while self._tokens[self._at].kind == "gap":
            self._at += 1
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _gap_before(self) -> bool:
        return self._tokens[self._at].kind == "gap"

    def _is(self, *texts: str) -> bool:
        token = self._peek()
        return token.text in texts and token.kind != "text"

    def _accept(self, *texts: str) -> str:
        return self._take().text if self._is(*texts) else ""

    def _expect(self, *texts: str) -> str:
        found = self._accept(*texts)
        if not found:
            raise Unreadable(f"{self._peek().text!r} instead of {texts[0]!r}")
        return found

    def end(self) -> None:
        if self._peek().kind != "end":
            raise Unreadable(f"{self._peek().text!r} is left over")

    def _deeper(self, read: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        node = read()
        self._depth -= 1
        return node

    # From the loosest binding to the tightest.

    def listing(self) -> Node:
        """Items separated by commas, semicolons, "and", "or": a list without order."""
        items = [self._relation()]
        while self._separator():
            items.append(self._relation())
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _separator(self) -> bool:
        token = self._peek()
        if token.kind in ("text", "word") and token.text.lower() in ("and", "or"):
            self._take()
            return True
        if self._accept(",", ";"):
            token = self._peek()
            if token.kind in ("text", "word") and token.text.lower() in ("and", "or"):
                self._take()
            return True
        return False

    def _relation(self) -> Node:
        parts: list[Any] = [self._union()]
        while self._is(*SIGNS):
            parts += [self._take().text, self._union()]
        return parts[0] if len(parts) == 1 else Node("relation", tuple(parts))

    def _union(self) -> Node:
        items = [self._sum()]
        while self._accept("\\cup"):
            items.append(self._sum())
        return items[0] if len(items) == 1 else Node("union", tuple(items))

    def _sum(self) -> Node:
        if self._accept("\\pm"):
            node = Node("plus_minus", (None, self._product()))
        elif self._accept("-"):
            node = Node("neg", (self._product(),))
        else:
            self._accept("+")
            node = self._product()
        while sign := self._accept("+", "-", "\\pm"):
            right = self._product()
            if sign == "\\pm":
                node = Node("plus_minus", (node, right))
            else:
                node = Node("add", (node, right if sign == "+" else Node("neg", (right,))))
        return node

    def _product(self) -> Node:
        node = self._factor()
        while True:
            if sign := self._accept("*", "/"):
                negative = bool(self._accept("-"))
                right = self._factor()
                right = Node("neg", (right,)) if negative else right
                node = Node("mul" if sign == "*" else "divide", (node, right))
            elif self._starts_factor():
                node = self._beside(node)
            else:
                return node

    def _beside(self, left: Node) -> Node:
        """Two factors without a sign between them: a product, or a mixed number."""
        number = self._peek().kind == "number"
        if number and not (left.op == "number" and self._gap_before()):
            raise Unreadable("a number right behind a factor")
        is_fraction = self._is("\\frac")
        right = self._factor()
        if number:
            self._expect("/")  # "1 3/4"
            right = Node("divide", (right, self._factor()))
        if left.op == "number" and (number or is_fraction) and right.op == "divide":
            parts = [arg.args[0] for arg in right.args if arg.op == "number"]
            if len(parts) == 2:
                if left.args[0].denominator == 1 and all(part.denominator == 1 for part in parts) and parts[0] < parts[1]:
                    return Node("add", (left, right))
                raise Unreadable("neither a mixed number nor a product")
        if number:
            raise Unreadable("two numbers beside each other")
        return Node("mul", (left, right))

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind == "word":
            return token.text.lower() not in ("and", "or")
        if token.kind == "mark":
            text = token.text
            return (
                text in ("(", "{", "\\frac", "\\sqrt", "\\binom", "\\pi", "\\infty")
                or (text == "|" and not self._bars)
                or text.lstrip("\\") in GREEK | FUNCTIONS
            )
        return token.kind == "number"

    def _factor(self) -> Node:
        node = self._atom()
        while True:
            if self._accept("!"):
                node = Node("factorial", (node,))
            elif self._is("^"):
                self._take()
                if self._is("\\circ") or (self._is("{") and self._peek(1).text == "\\circ"):
                    raise Unreadable("degrees inside an expression")
                node = Node("pow", (node, self._deeper(self._script)))
                if self._is("^"):
                    raise Unreadable("two exponents")
            else:
                return node

    def _script(self) -> Node:
        """What stands behind ^ or _: a group, or one digit or letter or command, as TeX takes it."""
        if self._accept("{"):
            node = self._sum()
            self._expect("}")
            return node
        if self._accept("-"):
            return Node("neg", (self._script(),))
        if self._accept("("):  # 2^(10), as plain text has it
            node = self._sum()
            self._expect(")")
            return node
        token = self._peek()
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            return self._number(self._take().text)  # 2^10: TeX would raise the 1 alone, nobody means that
        if token.kind in ("number", "word") or token.text in ("\\frac", "\\sqrt", "\\pi", "\\infty"):
            return self._argument()
        raise Unreadable(f"{token.text!r} as an exponent")

    def _argument(self) -> Node:
        r"""One argument of a command: a group, or the next digit or letter (`\frac34`, `\sqrt3`)."""
        if self._accept("{"):
            node = self._deeper(self._sum)
            self._expect("}")
            return node
        token = self._take()
        if token.kind in ("number", "word") and token.text.isalnum():
            if len(token.text) > 1:
                self._at -= 1
                self._tokens[self._at] = Token(token.kind, token.text[1:])
            return self._number(token.text[0]) if token.kind == "number" else _letter(token.text[0])
        if token.kind == "mark" and token.text == "\\pi":
            return Node("constant", ("pi",))
        if token.kind == "mark" and token.text in ("\\frac", "\\sqrt"):
            self._at -= 1
            return self._deeper(self._atom)
        raise Unreadable(f"{token.text!r} as an argument")

    def _number(self, digits: str) -> Node:
        return Node("number", (Fraction(digits),))

    def _atom(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return self._based(token.text) or self._number(token.text)
        if token.kind == "word":
            return self._word(token.text)
        if token.kind == "text":
            return Node("word", (token.text.lower(),))
        if token.kind == "mark":
            reader = _ATOMS.get(token.text)
            if reader:
                return self._deeper(lambda: reader(self, token.text))
            name = token.text.lstrip("\\")
            if name in FUNCTIONS:
                return self._deeper(lambda: self._call(name))
            if name in GREEK:
                return self._subscripted(name)
        raise Unreadable(f"{token.text!r}")

    def _based(self, digits: str) -> Node | None:
        """A number in another base: 2516_8."""
        if self._gap_before() or not self._accept("_"):
            return None
        if self._accept("{"):
            token = self._take()
            self._expect("}")
        else:
            token = self._take()
        base = BASES.get(token.text.lower()) or (int(token.text) if re.fullmatch(r"\d{1,2}", token.text) else 0)
        if not digits.isdigit() or base < 2:
            raise Unreadable("a subscript that is no base")
        return Node("based", (digits, base))

    def _word(self, word: str) -> Node:
        if word in FUNCTIONS:
            return self._deeper(lambda: self._call(word))
        if word in ("pi", "infty", "infinity", "sqrt"):
            raise Unreadable(f"{word} without its backslash")
        if len(word) > 3 or word.lower() in SHORT_WORDS:
            return Node("word", (word.lower(),))
        if self._is("_"):
            letters = [_letter(char) for char in word[:-1]]
            letters.append(self._subscripted(word[-1]))
        elif self._is("^", "!") and len(word) > 1:  # ab^2: the exponent belongs to the b alone
            self._at -= 1
            self._tokens[self._at] = Token("word", word[-1])
            letters = [_letter(char) for char in word[:-1]]
            letters.append(self._factor())
        else:
            letters = [_letter(char) for char in word]
        node = letters[0]
        for letter in letters[1:]:
            node = Node("mul", (node, letter))
        return node

    def _subscripted(self, name: str) -> Node:
        if not self._accept("_"):
            return Node("symbol", (name,))
        if self._accept("{"):
            token = self._take()
            self._expect("}")
        else:
            token = self._take()
        if token.kind not in ("number", "word"):
            raise Unreadable("a subscript that is no name")
        return Node("symbol", (f"{name}_{token.text}",))

    def _call(self, name: str) -> Node:
        base = None
        exponent = None
        if name in ("log", "lg") and self._accept("_"):
            base = self._script()
        if self._accept("^"):
            exponent = self._script()
            if exponent.op == "neg":
                raise Unreadable("an inverse function or a reciprocal")
        if self._is("(", "{"):
            argument = self._factor()
        else:
            argument = self._factor()
            while self._starts_factor() and not self._is("(") and self._peek().text.lstrip("\\") not in FUNCTIONS:
                argument = self._beside(argument)
        node = Node("call", (name, argument) if base is None else (name, argument, base))
        return node if exponent is None else Node("pow", (node, exponent))

    # What begins with a mark.

    def _fraction(self, _: str) -> Node:
        return Node("divide", (self._argument(), self._argument()))

    def _binomial(self, _: str) -> Node:
        return Node("binomial", (self._argument(), self._argument()))

    def _root(self, _: str) -> Node:
        index = Node("number", (Fraction(2),))
        if self._accept("["):
            index = self._sum()
            self._expect("]")
        if self._accept("("):  # sqrt(3)
            node = self._sum()
            self._expect(")")
        else:
            node = self._argument_of_root()
        return Node("root", (node, index))

    def _argument_of_root(self) -> Node:
        token = self._peek()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            raise Unreadable("a root whose end cannot be seen")  # \sqrt12 is \sqrt{1}2 in TeX and 2 roots of 3 in intent
        return self._argument()

    def _bars_around(self, _: str) -> Node:
        self._bars += 1
        node = self._sum()
        self._expect("|")
        self._bars -= 1
        return Node("abs", (node,))

    def _group(self, _: str) -> Node:
        node = self.listing()
        self._expect("}")
        if node.op in ("list", "relation"):
            raise Unreadable("a list in braces that are no set")
        return node

    def _brackets(self, opening: str) -> Node:
        """(1, 2), [0, 1), or a plain pair of brackets around one expression."""
        bars, self._bars = self._bars, 0
        items = [self._relation()]
        while self._accept(",", ";"):
            items.append(self._relation())
        closing = self._expect(")", "]")
        self._bars = bars
        if len(items) > 1:
            return Node("tuple", (opening, *items, closing))
        if (opening, closing) == ("(", ")") and items[0].op != "relation":
            return items[0]
        raise Unreadable("brackets that do not match")

    def _set(self, _: str) -> Node:
        if self._accept("\\}"):
            return Node("set", ())
        items = [self._relation()]
        while self._accept(",", ";"):
            items.append(self._relation())
        self._expect("\\}")
        return Node("set", tuple(items))

    def _environment(self, _: str) -> Node:
        kind = self._name_in_braces()
        if kind not in MATRICES:
            raise Unreadable(kind)
        if kind == "array":
            self._name_in_braces()  # the columns' alignment
        rows: list[tuple[Node, ...]] = []
        row = [self._sum()]
        while not self._accept("\\end"):
            if self._expect("&", "\\\\") == "&":
                row.append(self._sum())
                continue
            rows.append(tuple(row))
            if self._is("\\end"):
                row = []
                continue
            row = [self._sum()]
        rows += [tuple(row)] if row else []
        if self._name_in_braces() != kind or len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of unequal length")
        if kind == "vmatrix":
            raise Unreadable("a determinant")
        return Node("matrix", tuple(rows))

    def _name_in_braces(self) -> str:
        self._expect("{")
        name = self._take().text
        self._expect("}")
        return name


def _letter(char: str) -> Node:
    return Node("constant", (char,)) if char in "ei" else Node("symbol", (char,))


_ATOMS: dict[str, Callable[[_Parser, str], Node]] = {
    "\\frac": _Parser._fraction,
    "\\binom": _Parser._binomial,
    "\\sqrt": _Parser._root,
    "|": _Parser._bars_around,
    "{": _Parser._group,
    "(": _Parser._brackets,
    "[": _Parser._brackets,
    "\\{": _Parser._set,
    "\\begin": _Parser._environment,
    "\\pi": lambda *_: Node("constant", ("pi",)),
    "\\infty": lambda *_: Node("constant", ("oo",)),
    "\\emptyset": lambda *_: Node("set", ()),
    "\\varnothing": lambda *_: Node("set", ()),
}
