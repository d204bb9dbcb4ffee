"""Products and quotients of numbers as they are written in decimals, which binary arithmetic misses.

8e-7 / 8e-5 is 0.01 here, and 0.010000000000000002 for the processor: a reader of a rendered file would take the
rest for a decision.
"""

from __future__ import annotations

from decimal import Decimal


def quotient(dividend: float, divisor: float) -> float:
    """The number nearest to the quotient of both as written."""
    return float(Decimal(repr(dividend)) / Decimal(repr(divisor)))


def product(one: float, other: float) -> float:
    """The number nearest to the product of both as written."""
    return float(Decimal(repr(one)) * Decimal(repr(other)))
