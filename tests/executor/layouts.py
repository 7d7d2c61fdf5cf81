"""Where matrix products keep their numbers: which lane, and which of its numbers.

A product of D[M, N] += A[M, K] B[K, N] by a wave of 64 lanes. A lane's operand is `size` numbers along k; lanes are
dealt out to the M rows of A (the N columns of B) first, then to blocks of k. Of D, a lane holds numbers of one column:
`run` neighbouring rows, the next such run `step` rows further, and so on.

Sources: for the products of gfx942, the AMD matrix instruction calculator
(https://github.com/ROCm/amd_matrix_instruction_calculator, architecture CDNA3, ``--register-layout``) and "AMD Instinct
MI300 Instruction Set Architecture", chapter "Matrix Arithmetic Instructions"; for those that only gfx950 has, "AMD
Instinct CDNA4 Instruction Set Architecture", the same chapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

LANES = 64

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Product:
    """One matrix instruction; the defaults are what all of them have in common.

    Parameters
    ----------
    number : by which `device.h` calls it.
    builtin : its name, after ``__builtin_amdgcn_mfma_``.
    m, k : D is m x m, the product runs over k.
    dtype : of the operands.
    wide : only gfx950 has it.
    run : neighbouring rows of D that a lane holds.
    """

    number: int
    builtin: str
    m: int
    k: int
    dtype: Literal["fp32", "bf16", "fp16"]
    wide: bool = False
    run: int = 4

    @property
    def size(self) -> int:
        """Numbers of a lane's operand."""
        return self.m * self.k // LANES

    @property
    def accumulators(self) -> int:
        """Numbers of a lane's part of D."""
        return self.m * self.m // LANES

    def operand(self) -> tuple[Places, Places]:
        """Row of A (column of B) and k of a lane's numbers, both ``[64, size]``."""
        lane, i = np.mgrid[:LANES, : self.size]
        return lane % self.m, lane // self.m * self.size + i

    def accumulator(self) -> tuple[Places, Places]:
        """Row and column of D of a lane's numbers, both ``[64, accumulators]``."""
        lane, i = np.mgrid[:LANES, : self.accumulators]
        step = self.run * (LANES // self.m)
        return i // self.run * step + lane // self.m * self.run + i % self.run, lane % self.m


PRODUCTS = (
    Product(0, "f32_16x16x16bf16_1k", 16, 16, "bf16"),
    Product(1, "f32_16x16x16f16", 16, 16, "fp16"),
    Product(2, "f32_32x32x8bf16_1k", 32, 8, "bf16"),
    Product(3, "f32_32x32x8f16", 32, 8, "fp16"),
    Product(4, "f32_16x16x4f32", 16, 4, "fp32"),
    Product(5, "f32_16x16x32_bf16", 16, 32, "bf16", wide=True),
    Product(6, "f32_16x16x32_f16", 16, 32, "fp16", wide=True),
    Product(7, "f32_32x32x16_bf16", 32, 16, "bf16", wide=True),
    Product(8, "f32_32x32x16_f16", 32, 16, "fp16", wide=True),
)


@dataclass(frozen=True)
class Table:
    """A product's layout as the machine takes it: see `Layout` in ``machine.h``."""

    a_place: npt.NDArray[np.uint16]
    b_place: npt.NDArray[np.uint16]
    group: npt.NDArray[np.uint16]
    column: npt.NDArray[np.uint16]


def table(product: Product, a: tuple[Places, Places], b: tuple[Places, Places], d: tuple[Places, Places]) -> Table:
    """Compile a layout: rows and k of A, columns and k of B, rows and columns of D, by lane and number."""
    rows, columns = d
    assert (columns == columns[:, :1]).all(), "a lane holds numbers of one column"
    kinds, group = np.unique(rows, axis=0, return_inverse=True)
    assert sorted(kinds.flat) == list(range(product.m)), "lanes with different rows share none"
    # Row r is number `within` of those of lanes of group `which`.
    which, within = np.empty(product.m, np.int64), np.empty(product.m, np.int64)
    for number, mine in enumerate(kinds):
        which[mine], within[mine] = number, np.arange(len(mine))
    a_place = (which[a[0]] * product.k + a[1]) * product.accumulators + within[a[0]]
    b_place = b[0] * product.k + b[1]
    for place in (a_place, b_place):
        assert sorted(place.flat) == list(range(product.m * product.k)), "each number of an operand has one place"
    parts = (np.ascontiguousarray(x.reshape(-1), dtype=np.uint16) for x in (a_place, b_place, group, columns[:, 0]))
    return Table(*parts)
