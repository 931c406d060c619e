r"""A normalised answer as a tree: numbers, symbols, the usual functions, lists, tuples, intervals, sets, matrices.

Why a parser of our own: sympy 1.14 reads LaTeX with an ANTLR runtime (4.11) that Hydra's pin (4.9.3) rules out, or
with a package that is not locked, and its other parser runs `eval`. Here nothing is ever run: a token that is not
listed ends the reading with `Unreadable`. Left out on purpose: \sum, \prod, \int, \lim, \bmod, \gcd, \max. An
answer that holds one restates a question instead of answering it, and evaluating it is what hangs other graders.

Linear in the length of the text, which is at most `MAX_CHARS`, and no deeper than `atoms.MAX_DEPTH`.
"""

from typing import Any

from recipe.retool.symbolic.atoms import Atoms
from recipe.retool.symbolic.tokens import FUNCTIONS, GREEK, SIGNS, tokenise
from recipe.retool.symbolic.tree import Node, Unreadable

MAX_CHARS = 2_000
MAX_TOKENS = 250
"""Keeps every tree so shallow that walking it cannot exhaust the stack; the longest of MATH-500 has 60."""


def parse(text: str) -> Node:
    """The tree of a normalised answer.

    Raises:
        Unreadable: it is not all maths of the kinds above, or one of its marks has two readings.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    tokens = tokenise(text)
    if len(tokens) > MAX_TOKENS:
        raise Unreadable("too long")
    parser = _Parser(tokens)
    node = parser.listing()
    parser.end()
    return node


class _Parser(Atoms):
    # From the loosest binding to the tightest.

    def listing(self) -> Node:
        """Items separated by commas, semicolons, "and", "or": a list without order."""
        items = [self._relation()]
        while self._separator():
            items.append(self._relation())
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _separator(self) -> bool:
        token = self.peek()
        if token.kind in ("text", "word") and token.text.lower() in ("and", "or"):
            self.take()
            return True
        if self.accept(",", ";"):
            token = self.peek()
            if token.kind in ("text", "word") and token.text.lower() in ("and", "or"):
                self.take()
            return True
        return False

    def _relation(self) -> Node:
        parts: list[Any] = [self._union()]
        while self.is_next(*SIGNS):
            parts += [self.take().text, self._union()]
        return parts[0] if len(parts) == 1 else Node("relation", tuple(parts))

    def _union(self) -> Node:
        items = [self._sum()]
        while self.accept("\\cup"):
            items.append(self._sum())
        return items[0] if len(items) == 1 else Node("union", tuple(items))

    def _sum(self) -> Node:
        if self.accept("\\pm"):
            node = Node("plus_minus", (None, self._product()))
        elif self.accept("-"):
            node = Node("neg", (self._product(),))
        else:
            self.accept("+")
            node = self._product()
        while sign := self.accept("+", "-", "\\pm"):
            right = self._product()
            if sign == "\\pm":
                node = Node("plus_minus", (node, right))
            else:
                node = Node("add", (node, right if sign == "+" else Node("neg", (right,))))
        return node

    def _product(self) -> Node:
        node = self._factor()
        while True:
            if sign := self.accept("*", "/"):
                negative = bool(self.accept("-"))
                right = self._factor()
                right = Node("neg", (right,)) if negative else right
                node = Node("mul" if sign == "*" else "divide", (node, right))
            elif self._starts_factor():
                node = self._beside(node)
            else:
                return node

    def _beside(self, left: Node) -> Node:
        """Two factors without a sign between them: a product, or a mixed number."""
        number = self.peek().kind == "number"
        if number and not (left.op == "number" and self.gap_before()):
            raise Unreadable("a number right behind a factor")
        is_fraction = self.is_next("\\frac")
        right = self._factor()
        if number:
            self.expect("/")  # "1 3/4"
            right = Node("divide", (right, self._factor()))
        if left.op == "number" and (number or is_fraction) and right.op == "divide":
            parts = [left.args[0], *(arg.args[0] for arg in right.args if arg.op == "number")]
            if len(parts) == 3:
                if all(part.denominator == 1 for part in parts) and parts[1] < parts[2]:
                    return Node("add", (left, right))
                raise Unreadable("neither a mixed number nor a product")
        if number:
            raise Unreadable("two numbers beside each other")
        return Node("mul", (left, right))

    def _starts_factor(self) -> bool:
        token = self.peek()
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
            if self.accept("!"):
                node = Node("factorial", (node,))
            elif self.is_next("^"):
                self.take()
                if self.is_next("\\circ") or (self.is_next("{") and self.peek(1).text == "\\circ"):
                    raise Unreadable("degrees inside an expression")
                node = Node("pow", (node, self._deeper(self._script)))
                if self.is_next("^"):
                    raise Unreadable("two exponents")
            else:
                return node
