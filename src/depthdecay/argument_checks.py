"""Argument validation: whole numbers within bounds, exact decimals, mutually exclusive options."""

from __future__ import annotations

import decimal
import ipaddress
import operator
import reprlib
from decimal import Decimal
from typing import Any

from depthdecay.errors import ArgumentError

# The smallest float, 5e-324, has 324 decimal places; nobody means a longer number.
MAX_DECIMAL_PLACES = 400


Number = float | int | str | Decimal


def whole_number(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value as an int within [low, high], or an error that names it."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{name} is {reprlib.repr(value)}; expected {expected}", name) from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise ArgumentError(f"{name} is {reprlib.repr(value)}; expected {expected}", name)
    return int(number)


def exact_decimal(name: str, value: object) -> Decimal:
    """`value` as an exact decimal. A float is read as its shortest decimal, which is what was typed."""
    if isinstance(value, bool) or not isinstance(value, (float, int, str, Decimal)):
        raise ArgumentError(f"{name} is {reprlib.repr(value)}; expected a number", name)
    try:
        number = Decimal(repr(float(value)) if isinstance(value, float) else value)
    except decimal.InvalidOperation:
        raise ArgumentError(f"{name} is {reprlib.repr(value)}; expected a number", name) from None
    if not number.is_finite():
        raise ArgumentError(f"{name} is {reprlib.repr(value)}; expected a finite number", name)
    _, digits, exponent = number.as_tuple()
    if len(digits) > MAX_DECIMAL_PLACES or not -MAX_DECIMAL_PLACES <= int(exponent) <= MAX_DECIMAL_PLACES:
        raise ArgumentError(f"{name} has too many digits; expected at most {MAX_DECIMAL_PLACES} decimal places", name)
    return decimal.Context(prec=MAX_DECIMAL_PLACES).normalize(number)


def at_most_one(**given: Any) -> None:
    """Reject arguments that each set the same thing."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ArgumentError(f"{' and '.join(names)} were given together; they set the same thing, so use one", *names)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
