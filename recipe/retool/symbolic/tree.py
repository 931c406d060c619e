"""What an answer is once it is read: a tree of named operations."""

from typing import Any, Literal, NamedTuple

Comparison = Literal["equal", "different", "unreadable", "undecided", "unevaluated"]
"""Unreadable: not maths that we read, or with two readings. Undecided: a limit was reached, or nothing was proven.
Unevaluated: equal, but still to be worked out, which is no answer where the question is such an expression."""


class Unreadable(ValueError):
    """The text is no answer that this module reads, or has two readings."""


class Node(NamedTuple):
    """One operation and what it is applied to.

    op, args: number (Fraction); constant ("pi", "e", "i", "oo"); symbol (name); word (text); based (digits, base);
    add, mul, pow, neg, divide, factorial, binomial, root (radicand, index), abs, call (name, argument[, base]);
    plus_minus (left or None, right); list, set, union (items); tuple (open, items..., close); matrix (rows of nodes);
    relation (left, sign, right, sign, ...).
    """

    op: str
    args: tuple[Any, ...]
