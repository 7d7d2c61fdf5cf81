"""The CDNA vocabulary: lane layouts against matmul, resources of compiled kernels, matrix instructions of the loop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle

import numpy as np
import numpy.typing as npt
import pytest
import torch

from qla.codegen import resources
from qla.codegen.ops import OPS
from qla.codegen.render import render
from qla.codegen.spec import Dtype, KernelSpec
from qla.runtime.compilers.zig import ZigHip
from qla.targets import TARGETS

Matrix = npt.NDArray[np.float64]
CDNA = ("gfx942", "gfx950")
LANES = 64


# ---- lane layouts, as the instruction set defines them: [lane, number] of the registers of one wave


def mfma(a: Matrix, b: Matrix, d: Matrix) -> Matrix:
    """d + a b for a square product of 32 or 16 rows and columns; operands are `[lane, 4 or 8]`."""
    size = 32 if d.shape[1] == 16 else 16
    lane, width = np.arange(LANES), a.shape[1]
    depth = LANES // size * width
    left, right = np.zeros((size, depth)), np.zeros((depth, size))
    for e in range(width):
        k = width * (lane // size) + e
        left[lane % size, k] = a[:, e]
        right[k, lane % size] = b[:, e]
    product, out = left @ right, d.copy()
    for i in range(d.shape[1]):
        row = 8 * (i // 4) + 4 * (lane // 32) + i % 4 if size == 32 else 4 * (lane // 16) + i
        out[:, i] += product[row, lane % size]
    return out


def transposing_read(rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], tile: Matrix) -> Matrix:
    """`ds_read_b64_tr_b16`: in each 16 lanes, lane i is given number i of the four rows that they read in fours."""
    read = np.stack([tile[rows, columns + e] for e in range(4)], axis=1)
    given = np.empty((LANES, 4))
    for lane in range(LANES):
        for e in range(4):
            given[lane, e] = read[lane // 16 * 16 + 4 * e + lane % 16 // 4, lane % 4]
    return given


# ---- the vocabulary's index maps (templates/tile/cdna.j2)


def row_of(i: int) -> npt.NDArray[np.int64]:
    return 8 * (i // 4) + 4 * (np.arange(LANES) // 32) + i % 4


def plain(tile: Matrix, block: int, step: int) -> Matrix:
    lane = np.arange(LANES)
    return np.stack([tile[32 * block + lane % 32, 8 * step + 4 * (lane // 32) + e] for e in range(4)], axis=1)


def gathered(tile: Matrix, block: int, step: int) -> Matrix:
    lane = np.arange(LANES)
    return np.stack([tile[8 * step + 4 * (lane // 32) + e, 32 * block + lane % 32] for e in range(4)], axis=1)


def read_transposed(tile: Matrix, block: int, step: int) -> Matrix:
    lane = np.arange(LANES)
    row = 8 * step + 4 * (lane // 32) + lane % 16 // 4
    return transposing_read(row, 32 * block + (lane % 32 & 16) + lane % 4 * 4, tile)


def neighbour() -> npt.NDArray[np.int64]:
    low = np.arange(LANES) % 32
    return (low & 19) + (low & 4) * 2 + (low & 8) // 2


def landed(rows: Matrix, block: int, step: int) -> Matrix:
    """Step `step` of rows [C, 32] as they come from memory, eight numbers of a lane's row at once."""
    lane = np.arange(LANES)
    first = 16 * (step // 2) + 8 * (lane // 32) + step % 2 * 4
    return np.stack([rows[32 * block + lane % 32, first + e] for e in range(4)], axis=1)


VIEWS = {"plain": plain, "gathered": gathered, "read_transposed": read_transposed}


def held(matrix: Matrix) -> Matrix:
    """A column block [rows, 32] as `[lane, rows / 2]`; numbers 4 s … 4 s + 3 are also the operand of k-step s."""
    return np.stack([matrix[row_of(i), np.arange(LANES) % 32] for i in range(len(matrix) // 2)], axis=1)


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("view", VIEWS)
def test_products_of_held_blocks(view: str, k: int) -> None:
    numbers = np.random.default_rng(0)
    rows, depth = 64, 128
    tile, x = numbers.standard_normal((rows, depth)), numbers.standard_normal((depth, 32))
    stored = tile if view == "plain" else np.ascontiguousarray(tile.T)
    operand, steps = held(x), k // 8
    blocks = []
    for block in range(rows // 32):
        d = np.zeros((LANES, 16))
        for s in range(0, depth // 8, steps):
            # Two steps side by side: not the instruction's order of k, but the same one for both operands.
            a = np.concatenate([VIEWS[view](stored, block, s + i) for i in range(steps)], axis=1)
            d = mfma(a, operand[:, 4 * s : 4 * (s + steps)], d)
        blocks.append(d)
    np.testing.assert_allclose(np.concatenate(blocks, axis=1), held(tile @ x), atol=1e-12)


@pytest.mark.parametrize("k", [8, 16])
def test_rows_from_memory_become_a_block(k: int) -> None:
    """V times the identity: what lands by rows is held by columns."""
    rows, lane, steps = np.random.default_rng(5).standard_normal((64, 32)), np.arange(LANES), k // 8
    identity = np.stack([row_of(i) == lane % 32 for i in range(16)], axis=1).astype(float)
    for block in range(2):
        d = np.zeros((LANES, 16))
        for s in range(0, 4, steps):
            a = np.concatenate([landed(rows, block, s + i) for i in range(steps)], axis=1)
            d = mfma(a, identity[:, 4 * s : 4 * (s + steps)], d)
        for i in range(16):
            np.testing.assert_array_equal(d[:, i], rows[32 * block + row_of(i), neighbour()])


@pytest.mark.parametrize("k", [8, 16])
def test_a_product_on_its_side_has_neighbours_of_a_row(k: int) -> None:
    """O: operands in the other order, and eight neighbouring value columns of one token in a lane."""
    numbers, steps = np.random.default_rng(6), k // 8
    tile, x = numbers.standard_normal((64, 128)), numbers.standard_normal((128, 32))
    operand, expected = held(x[:, neighbour()[:32]]), tile @ x
    lane = np.arange(LANES)
    for block in range(2):
        d = np.zeros((LANES, 16))
        for s in range(0, 16, steps):
            b = np.concatenate([plain(tile, block, s + i) for i in range(steps)], axis=1)
            d = mfma(operand[:, 4 * s : 4 * (s + steps)], b, d)
        for i in range(16):
            column = 16 * (i // 8) + 8 * (lane // 32) + i % 8
            np.testing.assert_allclose(d[:, i], expected[32 * block + lane % 32, column], atol=1e-12)


def test_gram_square() -> None:
    """Keys dealt out like value columns; both operands take eight channels of a lane for two steps."""
    numbers, lane = np.random.default_rng(1), np.arange(LANES)
    a, b = numbers.standard_normal((64, 64)), numbers.standard_normal((64, 64))
    found = np.empty((64, 64))
    for wave in (0, 2, 3):
        d = np.zeros((LANES, 16))
        for s in range(8):
            channel = 16 * (s // 2) + 8 * (lane // 32) + 4 * (s % 2)
            keys, queries = wave % 2 * 32 + neighbour(), wave // 2 * 32 + lane % 32
            x, y = (np.stack([m[r, channel + e] for e in range(4)], axis=1) for m, r in ((b, keys), (a, queries)))
            d = mfma(x, y, d)
        for i in range(16):
            found[wave // 2 * 32 + lane % 32, wave % 2 * 32 + 16 * (i // 8) + 8 * (lane // 32) + i % 8] = d[:, i]
    found[:32, 32:] = (a @ b.T)[:32, 32:]  # above the diagonal: nobody's
    np.testing.assert_allclose(found, a @ b.T, atol=1e-12)


def test_blocks_are_inverted_and_merged() -> None:
    """Three squares of 16 in one order of products, with the middle one's result as it stands in the accumulator."""
    lane, x = np.arange(LANES), np.tril(np.random.default_rng(8).standard_normal((32, 32)), -1) / 8
    inverses = [np.linalg.inv(np.eye(16) + x[n : n + 16, n : n + 16]) for n in (0, 16)]

    def product(a: Matrix, b: Matrix | None, held_b: Matrix | None = None) -> Matrix:
        d = np.zeros((LANES, 4))
        for i in range(4):
            left = a[lane % 16, 4 * i + lane // 16] if held_b is None else a[lane % 16, lane // 16 * 4 + i]
            right = held_b[:, i] if b is None and held_b is not None else b[4 * i + lane // 16, lane % 16]  # type: ignore[index]
            d = mfma(left[:, None], right[:, None], d)
        return d

    merged = -product(inverses[1], None, product(x[16:, :16], inverses[0]))
    found = np.empty((16, 16))
    for i in range(4):
        found[lane // 16 * 4 + i, lane % 16] = merged[:, i]
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(32) + x)[16:, :16], atol=1e-12)


def test_square_of_decayed_gram() -> None:
    numbers, lane = np.random.default_rng(2), np.arange(LANES)
    a, b = numbers.standard_normal((16, 64)), numbers.standard_normal((16, 64))
    d = np.zeros((LANES, 4))
    for first in range(0, 64, 16):
        x, y = (np.stack([m[lane % 16, first + lane // 16 * 4 + e] for e in range(4)], axis=1) for m in (a, b))
        d = mfma(x, y, d)
    found = np.empty((16, 16))
    for i in range(4):
        found[lane // 16 * 4 + i, lane % 16] = d[:, i]
    np.testing.assert_allclose(found, a @ b.T, atol=1e-12)


def test_reduce_scatter_and_its_triangles() -> None:
    x = np.random.default_rng(3).standard_normal((LANES, LANES))
    sums, lane = x.copy(), np.arange(LANES)
    for offset in (32, 16, 8, 4, 2, 1):
        high = (lane & offset).astype(bool)
        for i in range(offset):
            sent = np.where(high, sums[:, i], sums[:, i + offset])
            sums[:, i] = np.where(high, sums[:, i + offset], sums[:, i]) + sent[lane ^ offset]
    np.testing.assert_allclose(sums[:, 0], x.sum(axis=0), atol=1e-12)

    places: list[list[tuple[int, int]]] = [[], []]
    for index in range(LANES):
        strict = int(index >= 36)
        n = index - 36 * strict
        r = strict + sum(n >= j * (j + 1) // 2 for j in range(1, 8))
        places[strict].append((r, n - r * (r + 1 - 2 * strict) // 2))
    for strict in (0, 1):
        assert places[strict] == [(r, c) for r in range(8) for c in range(r + 1 - strict)]


def test_two_numbers_rounded_to_bf16_by_one_addition() -> None:
    """As gfx942 does it: nearest, ties away from zero; the words' sums do not meet."""
    bits = np.random.default_rng(7).integers(0, 1 << 32, (1 << 16, 2), dtype=np.uint32)
    x = bits.view(np.float32)
    bits = bits[np.isfinite(x).all(axis=1)]
    both = bits[:, 0].astype(np.uint64) | bits[:, 1].astype(np.uint64) << np.uint64(32)
    sums = both + np.uint64(0x0000800000008000)
    for word in range(2):
        found = sums >> np.uint64(32 * word) & np.uint64(0xFFFF0000)
        assert (found == (bits[:, word].astype(np.uint64) + 0x8000 & 0xFFFF0000)).all()
        value, exact = (y.astype(np.uint32).view(np.float32).astype(np.float64) for y in (found, bits[:, word]))
        nearest = torch.from_numpy(bits[:, word].view(np.float32).copy()).bfloat16().double().numpy()
        tie = bits[:, word] & 0xFFFF == 0x8000
        assert np.array_equal(value[~tie], nearest[~tie])
        assert (np.abs(value[tie]) > np.abs(exact[tie])).all() or not tie.any()


# ---- compiled kernels


def choices() -> Iterator[KernelSpec]:
    """Each op and stage on each target; dtypes, head dims and loads go round, out of step with each other."""
    dims = cycle([(128, 128), (64, 128), (128, 64), (64, 64), (128, 128)])
    others = cycle([("bf16", "tile"), ("fp16", "strided"), ("fp16", "tile"), ("bf16", "strided")])
    dtype: Dtype
    for target in CDNA:
        for op in OPS:
            for stage in ("prepare", "scan"):
                for saves in (False, True) if op in ("delta_rule", "gla") else (False,):
                    (dk, dv), (dtype, loads) = next(dims), next(others)  # type: ignore[assignment]
                    yield KernelSpec(op, stage, dtype, dk, dv, target, loads, saves)  # type: ignore[arg-type]


# Most threads for a lane's registers and the most pieces on their way: two waves land what four do elsewhere.
TIGHTEST = [KernelSpec("delta_rule", "scan", "fp16", 128, 64, target, "strided", True) for target in CDNA]
# Two waves share a SIMD's registers where chunks are short and V comes in whole pieces, and only there.
TIGHTEST += [KernelSpec("gla", "scan", "bf16", 128, 128, "gfx942", "strided", True)]
TIGHTEST += [KernelSpec(op, "scan", "bf16", 128, 128, "gfx942", saves=op == "gla") for op in ("kda", "gla")]


@pytest.mark.parametrize("spec", [*choices(), *TIGHTEST], ids=lambda spec: f"{spec.target}-{spec.name}")
def test_no_scratch_and_lds_within_limits(spec: KernelSpec) -> None:
    source, target = render(spec), TARGETS[spec.target]
    binary = ZigHip(target).compile(source)
    found = resources.report(binary.data, binary.log, target)
    assert binary.log == ""
    assert (found.scratch_bytes, found.spill_bytes) == (0, 0)
    assert 0 < found.shared_bytes <= source.limits.shared_bytes <= target.shared_limit
    assert found.registers <= 512


def matrix_instructions(assembly: str) -> Counter[str]:
    """How many there are per loop, by its header's label; those outside of loops under the empty string."""
    found: Counter[str] = Counter()
    loop, label, heading = "", "", False
    for line in assembly.splitlines():
        if start := re.match(r"\.L(BB\w+):|; %bb\.", line):
            loop, label, heading = "", start[1] or "", True
        elif not line.lstrip().startswith(";"):
            heading = False
        if heading:  # a block's label and the comments after it, which name its loop
            header = re.search(r"in Loop: Header=(\w+)", line)
            loop = header[1] if header else label if "Loop Header" in line else loop
        found[loop] += line.lstrip().startswith("v_mfma")
    return +found


@pytest.mark.parametrize("target", CDNA)
@pytest.mark.parametrize(
    ("op", "dtype", "dk"),
    [("gated_delta_rule", "bf16", 128), ("delta_rule", "fp16", 64), ("kda", "fp16", 128), ("gla", "bf16", 64)],
)
def test_matrix_instructions_of_the_chain(target: str, op: str, dtype: Dtype, dk: int) -> None:
    facts = TARGETS[target]
    source = render(KernelSpec(op, "scan", dtype, dk, 128, target))
    C, depth = facts.chunk[OPS[op].gate], facts.facts["mfma_k"]
    blocks = C // 32
    lower = sum(32 * (block + 1) // depth for block in range(blocks))  # of A or P: nothing above the diagonal
    keys = blocks * dk // depth  # U or Q S
    update = dk // 32 * C // depth
    turned = blocks * 32 // depth  # V, by the identity
    expected = (keys + lower) * (1 + OPS[op].delta) + update + turned
    found = matrix_instructions(ZigHip(facts).assembly(source))
    assert list(found.values()) == [expected]
    assert "" not in found


def test_states_are_saved_every_64_tokens() -> None:
    ends = {
        "gfx942": ("if (chunk % 2 == 0) save(b, chunk / 2);", "save(S, (chunks + 1) / 2);"),
        "gfx950": ("save_state(S, chunks);",),
    }
    for target, lines in ends.items():
        text = render(KernelSpec("gla", "scan", "bf16", 64, 64, target, saves=True)).text
        assert all(line in text for line in lines)


def test_bf16_is_rounded_by_the_hardware_that_can() -> None:
    for target, instruction in zip(CDNA, ("v_perm_b32", "v_cvt_pk_bf16_f32"), strict=True):
        source = render(KernelSpec("gla", "scan", "bf16", 64, 64, target))
        assert resources.count_instructions(ZigHip(TARGETS[target]).assembly(source))[instruction] > 0


@pytest.mark.parametrize(("target", "reads"), [("gfx942", 0), ("gfx950", 16)])
def test_transposing_reads(target: str, reads: int) -> None:
    source = render(KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, target))
    counts = resources.count_instructions(ZigHip(TARGETS[target]).assembly(source))
    assert counts["ds_read_b64_tr_b16"] == reads
