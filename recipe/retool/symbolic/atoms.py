"""What a term of an answer is made of: numbers, names, commands with their arguments, and everything in brackets."""

import re
from collections.abc import Callable
from fractions import Fraction

from recipe.retool.symbolic.tokens import BASES, FUNCTIONS, GREEK, MATRICES, SHORT_WORDS, Cursor, Token
from recipe.retool.symbolic.tree import Node, Unreadable

MAX_DEPTH = 40
"""Brackets, exponents and function arguments inside each other."""


class Atoms(Cursor):
    """Reads one atom at the cursor; what stands inside its brackets is read by the methods of a subclass."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._depth = 0
        self._bars = 0

    def listing(self) -> Node: ...
    def _relation(self) -> Node: ...
    def _sum(self) -> Node: ...
    def _factor(self) -> Node: ...
    def _beside(self, left: Node) -> Node: ...
    def _starts_factor(self) -> bool: ...

    def _deeper(self, read: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        node = read()
        self._depth -= 1
        return node

    def _script(self) -> Node:
        """What stands behind ^ or _: a group, or one digit or letter or command, as TeX takes it."""
        if self.accept("{"):
            node = self._sum()
            self.expect("}")
            return node
        if self.accept("-"):
            return Node("neg", (self._argument(),))
        if self.accept("("):  # 2^(10), as plain text has it
            node = self._sum()
            self.expect(")")
            return node
        token = self.peek()
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            return self._number(self.take().text)  # 2^10: TeX would raise the 1 alone, nobody means that
        if token.kind in ("number", "word") or token.text in ("\\frac", "\\sqrt", "\\pi", "\\infty"):
            return self._argument()
        raise Unreadable(f"{token.text!r} as an exponent")

    def _argument(self) -> Node:
        r"""One argument of a command: a group, or the next digit or letter (`\frac34`, `\sqrt3`)."""
        if self.accept("{"):
            node = self._deeper(self._sum)
            self.expect("}")
            return node
        token = self.take()
        if token.kind in ("number", "word") and token.text.isalnum():
            if len(token.text) > 1:
                self.put_back(token.kind, token.text[1:])
            return self._number(token.text[0]) if token.kind == "number" else _letter(token.text[0])
        if token.kind == "mark" and token.text == "\\pi":
            return Node("constant", ("pi",))
        if token.kind == "mark" and token.text in ("\\frac", "\\sqrt"):
            self.put_back(token.kind, token.text)
            return self._deeper(self._atom)
        raise Unreadable(f"{token.text!r} as an argument")

    def _number(self, digits: str) -> Node:
        return Node("number", (Fraction(digits),))

    def _atom(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return self._based(token.text) or self._number(token.text)
        if token.kind == "repeating":
            return Node("number", (_repeating(token.text),))
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
        if self.gap_before() or not self.accept("_"):
            return None
        if self.accept("{"):
            token = self.take()
            self.expect("}")
        else:
            token = self.take()
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
        if self.is_next("_"):
            letters = [_letter(char) for char in word[:-1]]
            letters.append(self._subscripted(word[-1]))
        elif self.is_next("^", "!") and len(word) > 1:  # ab^2: the exponent belongs to the b alone
            self.put_back("word", word[-1])
            letters = [_letter(char) for char in word[:-1]]
            letters.append(self._factor())
        else:
            letters = [_letter(char) for char in word]
        node = letters[0]
        for letter in letters[1:]:
            node = Node("mul", (node, letter))
        return node

    def _subscripted(self, name: str) -> Node:
        if not self.accept("_"):
            return Node("symbol", (name,))
        if self.accept("{"):
            token = self.take()
            self.expect("}")
        else:
            token = self.take()
        if token.kind not in ("number", "word"):
            raise Unreadable("a subscript that is no name")
        return Node("symbol", (f"{name}_{token.text}",))

    def _call(self, name: str) -> Node:
        base = None
        exponent = None
        if name in ("log", "lg") and self.accept("_"):
            base = self._script()
        if self.accept("^"):
            exponent = self._script()
            if exponent.op == "neg":
                raise Unreadable("an inverse function or a reciprocal")
        if self.is_next("(", "{"):
            argument = self._factor()
        else:
            argument = self._factor()
            while self._starts_factor() and not self.is_next("(") and self.peek().text.lstrip("\\") not in FUNCTIONS:
                argument = self._beside(argument)
        node = Node("call", (name, argument) if base is None else (name, argument, base))
        return node if exponent is None else Node("pow", (node, exponent))

    def _fraction(self, _: str) -> Node:
        return Node("divide", (self._argument(), self._argument()))

    def _binomial(self, _: str) -> Node:
        return Node("binomial", (self._argument(), self._argument()))

    def _root(self, _: str) -> Node:
        index = Node("number", (Fraction(2),))
        if self.accept("["):
            index = self._sum()
            self.expect("]")
        if self.accept("("):  # sqrt(3)
            node = self._sum()
            self.expect(")")
        else:
            node = self._argument_of_root()
        return Node("root", (node, index))

    def _argument_of_root(self) -> Node:
        token = self.peek()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            raise Unreadable(
                "a root whose end cannot be seen"
            )  # \sqrt12 is \sqrt{1}2 in TeX and 2 roots of 3 in intent
        return self._argument()

    def _bars_around(self, _: str) -> Node:
        self._bars += 1
        node = self._sum()
        self.expect("|")
        self._bars -= 1
        return Node("abs", (node,))

    def _group(self, _: str) -> Node:
        node = self.listing()
        self.expect("}")
        if node.op in ("list", "relation"):
            raise Unreadable("a list in braces that are no set")
        return node

    def _brackets(self, opening: str) -> Node:
        """(1, 2), [0, 1), or a plain pair of brackets around one expression."""
        bars, self._bars = self._bars, 0
        items = [self._relation()]
        while self.accept(",", ";"):
            items.append(self._relation())
        closing = self.expect(")", "]")
        self._bars = bars
        if len(items) > 1:
            return Node("tuple", (opening, *items, closing))
        if (opening, closing) == ("(", ")") and items[0].op != "relation":
            return items[0]
        raise Unreadable("brackets that do not match")

    def _set(self, _: str) -> Node:
        if self.accept("\\}"):
            return Node("set", ())
        items = [self._relation()]
        while self.accept(",", ";"):
            items.append(self._relation())
        self.expect("\\}")
        return Node("set", tuple(items))

    def _environment(self, _: str) -> Node:
        kind = self._name_in_braces()
        if kind not in MATRICES:
            raise Unreadable(kind)
        if kind == "array":
            self._name_in_braces()  # the columns' alignment
        rows: list[tuple[Node, ...]] = []
        row = [self._sum()]
        while not self.accept("\\end"):
            if self.expect("&", "\\\\") == "&":
                row.append(self._sum())
                continue
            rows.append(tuple(row))
            if self.is_next("\\end"):
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
        self.expect("{")
        name = self.take().text
        self.expect("}")
        return name


def _repeating(text: str) -> Fraction:
    r"""The value of 0.1\overline{36}."""
    start, _, period = text.replace(" ", "").removesuffix("}").partition("\\overline{")
    decimals = len(start) - start.index(".") - 1
    return Fraction(start + "0") + Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)


def _letter(char: str) -> Node:
    return Node("constant", (char,)) if char in "ei" else Node("symbol", (char,))


_ATOMS: dict[str, Callable[[Atoms, str], Node]] = {
    "\\frac": Atoms._fraction,
    "\\binom": Atoms._binomial,
    "\\sqrt": Atoms._root,
    "|": Atoms._bars_around,
    "{": Atoms._group,
    "(": Atoms._brackets,
    "[": Atoms._brackets,
    "\\{": Atoms._set,
    "\\begin": Atoms._environment,
    "\\pi": lambda *_: Node("constant", ("pi",)),
    "\\infty": lambda *_: Node("constant", ("oo",)),
    "\\emptyset": lambda *_: Node("set", ()),
    "\\varnothing": lambda *_: Node("set", ()),
}
