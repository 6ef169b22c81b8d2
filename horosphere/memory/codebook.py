"""The quantiser of a normal variable with the least mean squared error, at each number of bits."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.optimize import root
from scipy.special import ndtr, ndtri

from horosphere import _numerics

__all__ = ["check_bits", "normal_codebook"]


def check_bits(name: str, bits: object, most: int) -> None:
    """ValueError where a number of bits is not a whole number from 1 to ``most``."""
    if not isinstance(bits, int) or not 1 <= bits <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most}; got {bits!r}")


@lru_cache
def normal_codebook(bits: int) -> np.ndarray:
    r"""The 2^bits levels of the Lloyd-Max quantiser of N(0, 1), ascending, float64.

    Level i is the mean of N(0, 1) over its cell, and the borders of the cells lie midway between levels:

    .. math:: x_i = \frac{\varphi(t_i) - \varphi(t_{i+1})}{\Phi(t_{i+1}) - \Phi(t_i)}, \quad t_i = (x_{i-1} + x_i)/2

    The codebook is symmetric, so the positive half is solved for, from the levels that are best for many bits: equal
    steps in the distribution of N(0, 3).

    Args:
        bits: 1 to 8.

    Raises:
        ValueError: any other number of bits.

    Source: Max (1960), Quantizing for minimum distortion; Lloyd (1982); Panter and Dite (1951) for the start.
    """
    check_bits("bits", bits, 8)
    count = 2 ** (bits - 1)
    start = math.sqrt(3) * ndtri((np.arange(count) + count + 0.5) / (2 * count))
    found = root(_distance_to_cell_means, start, tol=_numerics.CODEBOOK_STEP)
    half = found.x
    if not np.abs(_distance_to_cell_means(half)).max() < _numerics.CODEBOOK_ERROR:
        raise ArithmeticError(f"the codebook of {bits} bits did not converge: {found.message}")
    levels = np.concatenate([-half[::-1], half])
    levels.setflags(write=False)
    return levels


def _distance_to_cell_means(half: np.ndarray) -> np.ndarray:
    borders = np.concatenate([[0.0], (half[:-1] + half[1:]) / 2, [np.inf]])
    density = np.exp(-(borders**2) / 2) / math.sqrt(2 * math.pi)
    # ndtr of the negated border: the tail keeps its digits where 1 - Phi would not
    return half - (density[:-1] - density[1:]) / (ndtr(-borders[:-1]) - ndtr(-borders[1:]))
