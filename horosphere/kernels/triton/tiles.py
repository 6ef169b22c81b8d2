"""What every kernel does with a tile: where it lies, products of features, sums kept in memory, and how it is compiled.

A tile has rows of one side, "own", and columns of the other side. Features come transposed, (..., K, N), so that a
block of rows is read in one stretch. Addresses are 64-bit. Shapes of blocks are written as comments, R rows and C
columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Columns of the values or features that a program sums.
WIDEST = 128


class Tile(NamedTuple):
    """Which rows and columns, and how many there are of each."""

    rows: tl.tensor  # [R]
    columns: tl.tensor  # [C]
    length: tl.tensor
    others: tl.tensor


@triton.jit
def program(length, across, R: tl.constexpr):
    """(batch entry, first row, which of the blocks across) of a program; the last varies fastest."""
    pid = tl.program_id(0).to(tl.int64)
    down = (length + R - 1) // R
    return pid // (down * across), pid // across % down * R, pid % across


@triton.jit
def inside(tile):
    """Which pairs of a tile there are."""
    return (tile.rows < tile.length)[:, None] & (tile.columns < tile.others)[None, :]  # [R, C]


@triton.jit
def some(near):
    """Whether any pair of a tile is."""
    return tl.max(tl.max(near.to(tl.int32), 1), 0) > 0


@triton.jit
def both(own, other, tile):
    """The numbers of the rows and of the columns, to broadcast against the tile."""
    left = tl.load(own + tile.rows, mask=tile.rows < tile.length, other=0.0)
    right = tl.load(other + tile.columns, mask=tile.columns < tile.others, other=0.0)
    return left[:, None], right[None, :]  # [R, 1], [1, C]


@triton.jit
def inner(a, b, rows, columns, n, m, K, R: tl.constexpr, C: tl.constexpr):
    """<a_i, b_j> of rows [R] with the columns [R or 1, C] of each, feature by feature: tl.dot in full float32 spills
    hundreds of registers.
    """
    t = tl.zeros((R, C), a.dtype.element_ty)
    for _ in range(0, K):  # pointers move on: an index times n could leave 32 bits
        left = tl.load(a + rows, mask=rows < n, other=0.0)
        right = tl.load(b + columns, mask=columns < m, other=0.0)
        t += left[:, None] * right
        a += n
        b += m
    return t


@triton.jit
def product(a, b, tile, K, R: tl.constexpr, C: tl.constexpr):
    """<a_i, b_j> of a tile."""
    return inner(a, b, tile.rows, tile.columns[None, :], tile.length, tile.others, K, R, C)  # [R, C]


@triton.jit
def add(into, t, rows, n):
    """into (N,) += t [R]."""
    before = tl.load(into + rows, mask=rows < n, other=0.0)
    tl.store(into + rows, before + t.to(before.dtype), mask=rows < n)
    tl.debug_barrier()  # the next sum may be read by other threads


@triton.jit
def add_products(into, g, features, tile, size, SHAPE: tl.constexpr, F: tl.constexpr):
    """into (size, N) += features (size, M) times the transpose of g [R, C], F features at a time, in the precision of
    SHAPE.
    """
    for start in tl.range(0, size, F, num_stages=1):  # copies made ahead would spill hundreds of registers
        feature = start + tl.arange(0, F)[None, :]
        right = tl.load(  # [C, F]
            features + feature * tile.others + tile.columns[:, None],
            mask=(feature < size) & (tile.columns < tile.others)[:, None],
            other=0.0,
        )
        own = into + feature * tile.length + tile.rows[:, None]
        there = (feature < size) & (tile.rows < tile.length)[:, None]
        before = tl.load(own, mask=there, other=0.0)  # [R, F]
        tl.store(own, tl.dot(g, right, before, input_precision=SHAPE.precision, out_dtype=before.dtype), mask=there)
    tl.debug_barrier()


@triton.jit
def add_products_singly(into, g, features, tile, size):
    """The same for a few features, one by one."""
    for _ in range(0, size):
        right = tl.load(features + tile.columns, mask=tile.columns < tile.others, other=0.0)
        total = tl.sum(g * right[None, :], 1)
        before = tl.load(into + tile.rows, mask=tile.rows < tile.length, other=0.0)
        tl.store(into + tile.rows, before + total, mask=tile.rows < tile.length)
        into += tile.length
        features += tile.others
    tl.debug_barrier()


def backend() -> str:
    """Whose machine code runs: "cuda" or "hip"."""
    return "hip" if torch.version.hip else "cuda"


def precision_of(dtype: torch.dtype, on: str) -> str:
    """How the backend works products with sums: never in less than float32."""
    return "tf32x3" if on == "cuda" and dtype != torch.float64 else "ieee"


def terms_of(dtype: torch.dtype) -> int:
    """Terms of the series in :mod:`horosphere.kernels.triton.arcs`."""
    return 14 if dtype == torch.float64 else 6


def columns_of(width: int, dtype: torch.dtype) -> int:
    """How many columns a program sums: a power of 2 that the hardware's products take."""
    return max(16, min(triton.next_power_of_2(width), WIDEST // 2 if dtype == torch.float64 else WIDEST))


def options_for(tile: int, warps: int) -> dict[str, int | bool]:
    """Rows and columns of a tile, and that a multiplication and an addition may be one instruction."""
    return {"R": tile, "C": tile, "num_warps": warps, "enable_fp_fusion": True}
