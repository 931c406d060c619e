"""Whether two trees have the same value, by sympy. Slow and unbounded: only ever called in a process with limits.

"equal" is said only where it is proven, "different" only where the values or the shapes differ; what sympy
can neither prove nor refute is "unproven".
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import sympy
from sympy.core.sorting import default_sort_key

from recipe.retool.symbolic.expressions import parse
from recipe.retool.symbolic.tree import Node, Unreadable

Sameness = Literal["equal", "different", "unproven"]


def compare(answer: str, truth: str) -> Sameness:
    """Whether two normalised answers have the same value.

    Raises:
        Unreadable: one of them is no answer, see `expressions`.
    """
    return _same(_shaped(parse(answer)), _shaped(parse(truth)))


# First both trees are brought to one of few shapes: "list", "set", "tuple", "union", "matrix", "equation", "based",
# "word", or anything else, which is a scalar.


def _shaped(node: Node) -> Node:
    """The tree with plus-minus as a list of two, inequalities as intervals, and list items shaped too."""
    if node.op in ("list", "set", "union"):
        items: list[Node] = []
        for item in map(_shaped, node.args):
            items += item.args if item.op == "list" else [item]
        if node.op == "list" and _give_one_name_a_value(items):
            items = [item.args[1] for item in items]  # x = 1 or x = 2
        if node.op == "list" and all(item.op in ("tuple", "union") and _is_interval(item) for item in items):
            return Node("union", tuple(items))
        return Node(node.op, tuple(items))
    if node.op == "plus_minus":
        left, right = node.args
        minus = Node("neg", (right,))
        return Node(
            "list", (right, minus) if left is None else (Node("add", (left, right)), Node("add", (left, minus)))
        )
    if node.op == "relation":
        return _relation(node.args)
    return node


def _give_one_name_a_value(items: list[Node]) -> bool:
    return all(
        item.op == "equation" and item.args[0].op == "symbol" and item.args[0] == items[0].args[0] for item in items
    )


_INFINITY = Node("constant", ("oo",))


def _relation(parts: Sequence[Any]) -> Node:
    if len(parts) == 3 and parts[1] == "\\in" and parts[0].op == "symbol":
        return _shaped(parts[2])
    if len(parts) == 3 and parts[1] == "=":
        return Node("equation", (parts[0], parts[2]))
    signs = parts[1::2]
    if all(sign in (">", "\\ge") for sign in signs):
        parts = [{">": "<", "\\ge": "\\le"}.get(part, part) if isinstance(part, str) else part for part in parts[::-1]]
        signs = parts[1::2]
    if not all(sign in ("<", "\\le") for sign in signs):
        raise Unreadable("a relation of several kinds")
    if len(parts) == 3 and parts[0].op == "symbol":
        return Node("tuple", ("(", Node("neg", (_INFINITY,)), parts[2], ")" if parts[1] == "<" else "]"))
    if len(parts) == 3 and parts[2].op == "symbol":
        return Node("tuple", ("(" if parts[1] == "<" else "[", parts[0], _INFINITY, ")"))
    if len(parts) == 5 and parts[2].op == "symbol":
        opening, closing = "(" if parts[1] == "<" else "[", ")" if parts[3] == "<" else "]"
        return Node("tuple", (opening, parts[0], parts[4], closing))
    raise Unreadable("an inequality that is no interval")


def _is_interval(node: Node) -> bool:
    return node.op == "union" or len(node.args) == 4


def _same(left: Node, right: Node) -> Sameness:
    shapes = {left.op, right.op}
    if shapes == {"set", "list"}:
        # The roots 1, 2 are the set {1, 2}; a list that repeats one is not.
        listed = left if left.op == "list" else right
        return _matched(left.args, right.args) if len(listed.args) == len(_distinct(listed.args)) else "different"
    if shapes <= _SCALARS:
        return _same_scalars(left, right)
    if len(shapes) > 1 or left.op not in _BY_SHAPE:
        return "different"
    return _BY_SHAPE[left.op](left, right)


def _same_lists(left: Node, right: Node) -> Sameness:
    return _matched(left.args, right.args)


def _same_sets(left: Node, right: Node) -> Sameness:
    return _matched(_distinct(left.args), _distinct(right.args))


def _same_tuples(left: Node, right: Node) -> Sameness:
    if (left.args[0], left.args[-1]) != (right.args[0], right.args[-1]) or len(left.args) != len(right.args):
        return "different"
    return _all(_same(*pair) for pair in zip(left.args[1:-1], right.args[1:-1], strict=True))


def _same_matrices(left: Node, right: Node) -> Sameness:
    if len(left.args) != len(right.args) or len(left.args[0]) != len(right.args[0]):
        return "different"
    rows = zip(left.args, right.args, strict=True)
    return _all(_same(*pair) for row in rows for pair in zip(*row, strict=True))


def _same_words(left: Node, right: Node) -> Sameness:
    return "equal" if left.args == right.args else "different"


def _same_equations(left: Node, right: Node) -> Sameness:
    """Equations with the same solutions, as far as one is a multiple of the other by a number."""
    one, other = (_expression(Node("add", (side[0], Node("neg", (side[1],))))) for side in (left.args, right.args))
    ratio = sympy.simplify(one / other)
    return "equal" if ratio.is_number and ratio.is_nonzero and ratio.is_finite else "different"


_BY_SHAPE: dict[str, Callable[[Node, Node], Sameness]] = {
    "list": _same_lists, "union": _same_lists, "set": _same_sets, "tuple": _same_tuples, "matrix": _same_matrices,
    "word": _same_words, "based": _same_words, "equation": _same_equations,
}  # fmt: skip


def _all(parts: Iterable[Sameness]) -> Sameness:
    found: Sameness = "equal"
    for part in parts:
        if part == "different":
            return part
        found = part if part == "unproven" else found
    return found


def _matched(left: Sequence[Node], right: Sequence[Node]) -> Sameness:
    """Whether each item has one of its own on the other side, in any order."""
    if len(left) != len(right):
        return "different"
    waiting = list(right)
    for item in left:
        found = [_same(item, other) for other in waiting]
        if "equal" not in found:
            return "unproven" if "unproven" in found else "different"
        del waiting[found.index("equal")]
    return "equal"


def _distinct(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if all(_same(item, other) != "equal" for other in kept):
            kept.append(item)
    return kept


# Scalars.


def _same_scalars(left: Node, right: Node) -> Sameness:
    one, other = _expression(left), _expression(right)
    if one == other:
        return "equal"
    if one.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) or other.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return "different"
    difference = one - other
    if _is_clearly_not_zero(difference):
        return "different"
    for simpler in (sympy.expand, sympy.simplify, sympy.radsimp, sympy.sqrtdenest):
        difference = simpler(difference)
        if difference == 0:
            return "equal"
    zero = difference.equals(0)
    return "unproven" if zero is None else "equal" if zero else "different"


def _is_clearly_not_zero(difference: sympy.Expr) -> bool:
    """Whether the value at one point, to 40 digits, is far from zero.

    The point is fixed and of no special form, so that the same answers always get the same verdict.
    """
    symbols = sorted(difference.free_symbols, key=default_sort_key)
    point = [(symbol, sympy.Rational(1_234_577 + 7_919 * number, 999_983)) for number, symbol in enumerate(symbols)]
    value = difference.subs(point).evalf(40, chop=False)
    return bool(value.is_number and value.is_finite and abs(value) > sympy.Float("1e-20"))


_LOG_UNIT = sympy.Symbol("log_unit", positive=True)
r"""What \log x is in units of \ln x: 1 or 1/\ln 10, which no answer says. So \log is never \ln, but keeps its laws."""
_CALLS = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "sinh": sympy.sinh, "cosh": sympy.cosh,
    "tanh": sympy.tanh, "ln": sympy.log, "exp": sympy.exp,
}  # fmt: skip
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}


def _expression(node: Node) -> Any:
    match node.op:
        case "number":
            return sympy.Rational(node.args[0].numerator, node.args[0].denominator)
        case "constant":
            return _CONSTANTS[node.args[0]]
        case "symbol":
            return sympy.Symbol(node.args[0])
        case "call":
            return _called(*node.args)
    if node.op not in _SCALARS:
        raise Unreadable(f"a {node.op} inside an expression")
    parts = [_expression(part) for part in node.args]
    return _OPERATIONS[node.op](*parts)


def _called(name: str, argument: Node, base: Node | None = None) -> Any:
    value = _expression(argument)
    if name in ("log", "lg"):
        if base is not None:
            return sympy.log(value) / sympy.log(_expression(base))
        return sympy.log(value, 10) if name == "lg" else sympy.log(value) * _LOG_UNIT
    return _CALLS[name](value)


def _root(radicand: Any, index: Any) -> Any:
    if index.is_odd and radicand.is_negative:
        return -sympy.root(-radicand, index)
    return sympy.root(radicand, index)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "neg": lambda value: -value,
    "add": lambda left, right: left + right,
    "mul": lambda left, right: left * right,
    "divide": lambda left, right: left / right,
    "pow": lambda base, exponent: base**exponent,
    "root": _root,
    "abs": sympy.Abs,
    "factorial": sympy.factorial,
    "binomial": sympy.binomial,
}
_SCALARS = {"number", "constant", "symbol", "call", *_OPERATIONS}
