"""Random draws that follow from a seed and a place: the same in every process, on every device and in every batch.

Parts draw their random patterns, tables and directions by them, and save none of it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

MASK = (1 << 63) - 1
# Of splitmix64 (Steele et al., 2014, doi 10.1145/2660193.2660195), as signed numbers.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def drawn(*places: int | Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
    """Returns numbers from 0 to 2^63 - 1, as if at random, for the broadcast integers `places`."""
    state = torch.zeros((), dtype=torch.int64, device=next((p.device for p in places if isinstance(p, Tensor)), "cpu"))
    for place in places:
        state = _mixed((state ^ place) + STEP)
    return state & MASK


def normals(*places: int | Int[Tensor, " ..."]) -> Float[Tensor, " ..."]:
    """Returns float64 numbers of the standard normal distribution, as if at random, for `places` (Box and Muller)."""
    radius, angle = ((drawn(*places, half).double() + 0.5) / 2.0**63 for half in (0, 1))
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifts right as unsigned numbers do. torch's shift copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
