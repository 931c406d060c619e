"""The exact rational value of a tree, by arithmetic whose cost is bounded before it is done."""

from fractions import Fraction
from math import comb, factorial, isqrt

from recipe.retool.symbolic.tree import Node

MAX_BITS = 20_000
"""Longest numerator or denominator; 6,000 digits, where DAPO's longest answer has 23."""
_MAX_FACTORIAL = 1_500
_MAX_BINOMIAL = 2_000


class NotRational(ValueError):
    """The tree has no rational value that this module finds; something else may compare it."""


class TooLarge(ValueError):
    """A value on the way is beyond `MAX_BITS`: equal to no answer that a data set holds."""


def rational_value(node: Node) -> Fraction:
    """The value of a tree of numbers, signs, powers, roots, factorials and binomials.

    Raises:
        NotRational: it holds a symbol, a constant, a function, an inexact root, or divides by zero.
        TooLarge: see there.
    """
    return _checked(_value(node))


def _value(node: Node) -> Fraction:
    match node.op:
        case "number":
            return node.args[0]
        case "neg":
            return -_value(node.args[0])
        case "abs":
            return abs(_value(node.args[0]))
        case "add":
            return _checked(_value(node.args[0]) + _value(node.args[1]))
        case "mul":
            return _checked(_value(node.args[0]) * _value(node.args[1]))
        case "divide":
            left, right = _value(node.args[0]), _value(node.args[1])
            if not right:
                raise NotRational("a division by zero")
            return _checked(left / right)
        case "pow":
            return _power(_value(node.args[0]), _value(node.args[1]))
        case "root":
            return _root(_value(node.args[0]), _value(node.args[1]))
        case "factorial":
            number = _natural(_value(node.args[0]))
            if number > _MAX_FACTORIAL:
                raise TooLarge(f"the factorial of {number}")
            return Fraction(factorial(number))
        case "binomial":
            above, below = (_natural(_value(part)) for part in node.args)
            if above > _MAX_BINOMIAL:
                raise TooLarge(f"a binomial of {above}")
            return Fraction(comb(above, below))
    raise NotRational(node.op)


def _checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("more than a data set holds")
    return value


def _natural(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise NotRational("of no natural number")
    return value.numerator


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise NotRational("a fractional power of a negative number")
        return _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    if base in (0, 1, -1) or not exponent:
        if not base and exponent <= 0:
            raise NotRational("zero to the power of zero or less")
        return base ** (exponent.numerator % 2 or 2) if exponent else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if max(bits, 1) * abs(exponent.numerator) > MAX_BITS:
        raise TooLarge("a power")
    return _checked(base**exponent.numerator)


def _root(radicand: Fraction, index: Fraction) -> Fraction:
    if index.denominator != 1 or not 2 <= index <= 64 or (radicand < 0 and index % 2 == 0):
        raise NotRational("a root that is no whole one")
    if radicand < 0:  # of the signs that TeX has, \\sqrt[3]{-8} means the real root
        return -_root(-radicand, index)
    return Fraction(*(_whole_root(part, index.numerator) for part in (radicand.numerator, radicand.denominator)))


def _whole_root(number: int, index: int) -> int:
    if index == 2:
        root = isqrt(number)
    else:  # Newton's steps from above, in whole numbers
        root = 1 << -(-number.bit_length() // index)
        while (smaller := ((index - 1) * root + number // root ** (index - 1)) // index) < root:
            root = smaller
    if root**index != number:
        raise NotRational("no whole root")
    return root
