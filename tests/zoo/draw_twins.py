"""The twins of random draws: Python's integers and floats, one number at a time."""

from __future__ import annotations

import math

U64 = (1 << 64) - 1


def drawn(*places: int) -> int:
    """splitmix64 over the places, with Python's integers."""
    state = 0
    for place in places:
        x = ((state ^ place) + 0x9E3779B97F4A7C15) & U64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & U64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & U64
        state = x ^ x >> 31
    return state & (U64 >> 1)


def normal(*places: int) -> float:
    """A number of the standard normal distribution, by Box and Muller."""
    radius, angle = ((drawn(*places, half) + 0.5) / 2.0**63 for half in (0, 1))
    return math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)
