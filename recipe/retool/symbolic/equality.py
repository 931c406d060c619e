"""Whether two normalised answers have the same value: exact numbers here, everything else in a killable process."""

from fractions import Fraction
from functools import lru_cache
from typing import Literal

from recipe.retool.symbolic.exact import NotRational, TooLarge, rational_value
from recipe.retool.symbolic.expressions import parse
from recipe.retool.symbolic.pool import KillablePool, LimitReached
from recipe.retool.symbolic.tree import Node, Unreadable

Comparison = Literal["equal", "different", "unreadable", "undecided"]
"""Unreadable: not maths that we read, or with two readings. Undecided: a limit was reached, or nothing was proven."""

POOL = KillablePool("recipe.retool.symbolic.compare:compare")
"""Shared by all threads of a process; it starts its processes when a first pair of answers needs them."""

_SHAPES = frozenset(("list", "set", "tuple", "union", "matrix", "relation", "word", "based"))


@lru_cache(maxsize=8_192)
def same_value(answer: str, truth: str) -> Comparison:
    """Compare two normalised answers by value. Thread-safe; each pair costs at most the pool's limits.

    Raises:
        GraderError: the processes cannot be started.
    """
    try:
        known, given = parse(truth), parse(answer)
    except Unreadable:
        return "unreadable"
    try:
        value = _rational(known)
        other = _rational(given)
    except TooLarge:
        return "different"
    if value is not None and (other is not None or given.op in _SHAPES or _has_symbols(given)):
        return "equal" if value == other else "different"
    if other is not None and (known.op in _SHAPES or _has_symbols(known)):
        return "different"
    try:
        sameness = POOL.call(answer, truth)
    except LimitReached as error:
        return "unreadable" if str(error) == "Unreadable" else "undecided"
    return "undecided" if sameness == "unproven" else sameness


def _rational(node: Node) -> Fraction | None:
    try:
        return rational_value(node)
    except NotRational:
        return None


def _has_symbols(node: Node) -> bool:
    return node.op == "symbol" or any(isinstance(part, Node) and _has_symbols(part) for part in node.args)
