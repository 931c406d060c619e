"""Whether two normalised answers have the same value: exact numbers here, everything else in a killable process."""

from fractions import Fraction
from functools import lru_cache

from recipe.retool.symbolic.exact import NotRational, TooLarge, rational_value
from recipe.retool.symbolic.expressions import parse
from recipe.retool.symbolic.pool import KillablePool, LimitReached
from recipe.retool.symbolic.tree import Comparison, Node, Unreadable

POOL = KillablePool("recipe.retool.symbolic.compare:compare")
"""Shared by all threads of a process; it starts its processes when a first pair of answers needs them."""

MAX_OPERATIONS = 3
"""Sums, products, powers and so on that an answer may leave to the reader where the known one is a number. Of
DAPO-Math-17k's 17,252 questions 41 hold an expression of their answer's value, and could be answered by repeating it;
15 of these expressions have so few operations. Source: tests/bench/bench_grading.py."""

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
        value = rational_or_none(known)
        other = rational_or_none(given)
    except TooLarge:
        return "different"
    if value is not None and (other is not None or given.op in _SHAPES or _has_symbols(given)):
        if value == other and operations(given) > MAX_OPERATIONS:
            return "unevaluated"
        return "equal" if value == other else "different"
    if other is not None and (known.op in _SHAPES or _has_symbols(known)):
        return "different"
    try:
        sameness = POOL.call(answer, truth)
    except LimitReached as error:
        return "unreadable" if str(error) == "Unreadable" else "undecided"
    return "undecided" if sameness == "unproven" else sameness


def rational_or_none(node: Node) -> Fraction | None:
    """The exact value of a tree, None where it has none.

    Raises:
        TooLarge: see `rational_value`.
    """
    try:
        return rational_value(node)
    except NotRational:
        return None


def operations(node: Node) -> int:
    """Sums, products, powers and so on that a tree leaves to be done; signs do not count."""
    own = node.op not in ("number", "neg", "constant", "symbol")
    return own + sum(operations(part) for part in node.args if isinstance(part, Node))


def _has_symbols(node: Node) -> bool:
    return node.op == "symbol" or any(isinstance(part, Node) and _has_symbols(part) for part in node.args)
