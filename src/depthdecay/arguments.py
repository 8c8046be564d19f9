"""Numbers that callers may give, checked: whole numbers within bounds, decimals as they were typed."""

from __future__ import annotations

import decimal
import operator
import reprlib
from decimal import Decimal

from depthdecay.errors import DepthDecayError

# The smallest float, 5e-324, has 324 decimal places; longer numbers are not meant by anybody.
MAX_DECIMAL_PLACES = 400


Number = float | int | str | Decimal


def whole_number(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int within [low, high], or an error that names it."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise DepthDecayError(f"{name} is {reprlib.repr(value)}; expected {expected}") from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise DepthDecayError(f"{name} is {reprlib.repr(value)}; expected {expected}")
    return int(number)


def exact_decimal(name: str, value: object) -> Decimal:
    """The number that a person who wrote `value` meant: a float stands for its shortest decimal."""
    if isinstance(value, bool) or not isinstance(value, (float, int, str, Decimal)):
        raise DepthDecayError(f"{name} is {reprlib.repr(value)}; expected a number")
    try:
        number = Decimal(repr(float(value)) if isinstance(value, float) else value)
    except decimal.InvalidOperation:
        raise DepthDecayError(f"{name} is {reprlib.repr(value)}; expected a number") from None
    if not number.is_finite():
        raise DepthDecayError(f"{name} is {reprlib.repr(value)}; expected a finite number")
    _, digits, exponent = number.as_tuple()
    if len(digits) > MAX_DECIMAL_PLACES or not -MAX_DECIMAL_PLACES <= int(exponent) <= MAX_DECIMAL_PLACES:
        raise DepthDecayError(f"{name} has too many digits; expected at most {MAX_DECIMAL_PLACES} decimal places")
    return decimal.Context(prec=MAX_DECIMAL_PLACES).normalize(number)
