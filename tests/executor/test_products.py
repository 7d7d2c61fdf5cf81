"""Matrix products, transposing reads and exchanges of the machine, against what the vendor's documents say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from executor import layouts, machine
from executor.layouts import LANES, PRODUCTS, Places, Product
from executor.small import Array, launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Read off the matrix instruction calculator (CDNA3) and the CDNA4 ISA's tables: lane and number of single entries
# A[row][k], B[k][column] and D[row][column], as ((row, column), (lane, number)).
DOCUMENTED: dict[tuple[int, int], dict[str, list[tuple[tuple[int, int], tuple[int, int]]]]] = {
    (16, 4): {
        "A": [((0, 1), (16, 0)), ((7, 3), (55, 0))],
        "B": [((2, 13), (45, 0)), ((3, 1), (49, 0))],
        "D": [((3, 15), (15, 3)), ((4, 0), (16, 0)), ((7, 2), (18, 3))],
    },
    (16, 16): {
        "A": [((0, 3), (0, 3)), ((7, 4), (23, 0)), ((2, 13), (50, 1))],
        "B": [((1, 11), (11, 1)), ((4, 14), (30, 0)), ((15, 15), (63, 3))],
        "D": [((3, 9), (9, 3)), ((4, 14), (30, 0)), ((13, 5), (53, 1))],
    },
    (32, 8): {
        "A": [((0, 3), (0, 3)), ((7, 4), (39, 0)), ((31, 7), (63, 3))],
        "B": [((1, 11), (11, 1)), ((4, 11), (43, 0)), ((7, 31), (63, 3))],
        "D": [((3, 23), (23, 3)), ((4, 21), (53, 0)), ((8, 1), (1, 4)), ((31, 31), (63, 15))],
    },
    (16, 32): {
        "A": [((5, 7), (5, 7)), ((5, 8), (21, 0)), ((15, 31), (63, 7))],
        "B": [((7, 5), (5, 7)), ((8, 5), (21, 0)), ((30, 2), (50, 6))],
        "D": [((3, 9), (9, 3)), ((4, 14), (30, 0)), ((13, 5), (53, 1))],
    },
    (32, 16): {
        "A": [((5, 7), (5, 7)), ((5, 8), (37, 0)), ((31, 15), (63, 7))],
        "B": [((7, 5), (5, 7)), ((8, 5), (37, 0)), ((14, 2), (34, 6))],
        "D": [((3, 23), (23, 3)), ((4, 21), (53, 0)), ((8, 1), (1, 4)), ((31, 31), (63, 15))],
    },
}


def ids(product: Product) -> str:
    return product.builtin


@pytest.mark.parametrize("product", PRODUCTS, ids=ids)
def test_layouts_are_those_documented(product: Product) -> None:
    places = DOCUMENTED[product.m, product.k]
    rows, k = product.operand()
    for (row, column), at in places["A"]:
        assert (rows[at], k[at]) == (row, column)
    for (row, column), at in places["B"]:
        assert (k[at], rows[at]) == (row, column)
    rows, columns = product.accumulator()
    for (row, column), at in places["D"]:
        assert (rows[at], columns[at]) == (row, column)


def operands(product: Product) -> tuple[Array, Array, Array]:
    numbers = np.random.default_rng(product.number)
    shapes = ((product.m, product.k), (product.k, product.m), (product.m, product.m))
    a, b, d = (torch.from_numpy(numbers.standard_normal(shape)).to(torch.float32) for shape in shapes)
    dtype = DTYPES[product.dtype]
    return a.to(dtype).float().numpy(), b.to(dtype).float().numpy(), d.numpy()


def multiply(product: Product, a: Array, b: Array, d: Array) -> Array:
    """D + A B by the machine's builtin; what lanes give and get is where the documents say."""

    def packed(x: Array) -> Array:
        tensor = torch.from_numpy(np.ascontiguousarray(x)).to(DTYPES[product.dtype])
        return tensor.numpy() if product.dtype == "fp32" else tensor.view(torch.int16).numpy()

    rows, k = product.operand()
    to_rows, to_columns = product.accumulator()
    given = {"a": packed(a[rows, k]), "b": packed(b[k, rows]), "c": d[to_rows, to_columns].astype(np.float32)}
    found = np.zeros((LANES, product.accumulators), np.float32)
    vector = {"fp32": "float", "bf16": "bfloat8_", "fp16": "half8_"}[product.dtype]
    if not product.wide and product.dtype != "fp32":
        vector = {"bf16": "short4_", "fp16": "half4_"}[product.dtype]
    accumulator = f"f{product.accumulators}_"
    body = f"""
  const int l = thread_id();
  const auto d = __builtin_amdgcn_mfma_{product.builtin}(((const {vector}*)args.a)[l], ((const {vector}*)args.b)[l],
                                                         ((const {accumulator}*)args.c)[l], 0, 0, 0);
  for (int i = 0; i < {product.accumulators}; i++) ((float*)args.d)[l * {product.accumulators} + i] = d[i];"""
    target = "gfx950" if product.wide else "gfx942"
    aligned = {name: aligned_copy(x) for name, x in given.items()}
    device = launch(body, target=target, inputs=aligned, outputs={"d": found})
    assert device.products == 1
    result = np.empty((product.m, product.m), np.float32)
    result[to_rows, to_columns] = found
    return result


def aligned_copy(x: Array) -> Array:
    """The same numbers at an address that vectors may have."""
    room = np.empty(x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[:] = x
    return copy


@pytest.mark.parametrize("product", PRODUCTS, ids=ids)
def test_products(product: Product) -> None:
    a, b, d = operands(product)
    np.testing.assert_allclose(multiply(product, a, b, d), d + a.astype(np.float64) @ b, atol=2e-5)


def changed(
    product: Product,
) -> Iterator[tuple[str, tuple[Places, Places], tuple[Places, Places], tuple[Places, Places]]]:
    """Layouts that are wrong in one way each, and still put every number in one place."""
    operand, accumulator = product.operand(), product.accumulator()
    rows, k = operand
    yield "lanes of A in reverse", (rows[::-1], k[::-1]), operand, accumulator
    yield "neighbours along k of A exchanged", (rows, k ^ 1), operand, accumulator
    yield "blocks of k of B exchanged", operand, (rows, (k + product.size) % product.k), accumulator
    yield "columns of B exchanged", operand, (rows ^ 1, k), accumulator
    to_rows, columns = accumulator
    yield "rows of D exchanged", operand, operand, (to_rows ^ 1, columns)
    yield "runs of rows of D exchanged", operand, operand, (to_rows ^ 4, columns)
    yield "columns of D exchanged", operand, operand, (to_rows, columns ^ 1)
    flat = np.arange(LANES)[:, None] // product.m * product.accumulators + np.arange(product.accumulators)
    yield "rows of D one after another", operand, operand, (flat, columns)


@pytest.mark.parametrize("product", PRODUCTS, ids=ids)
def test_a_wrong_layout_is_caught(product: Product) -> None:
    a, b, d = operands(product)
    expected, right = d + a @ b, product.accumulator()[0]
    caught = 0
    try:
        for what, *parts in changed(product):
            if np.array_equal(parts[2][0], right) and what == "rows of D one after another":
                continue  # where a lane has but one run of rows
            machine.set_layout(product, layouts.table(product, *parts))
            assert np.abs(multiply(product, a, b, d) - expected).max() > 0.1, what
            caught += 1
    finally:
        machine.set_layouts()
    assert caught >= 7


def test_transposing_read() -> None:
    """Sixteen lanes read 4 rows of 16 numbers; lane l gets column l."""
    found = np.zeros((LANES, 4), np.int16)
    body = """
  __shared__ short x[64 * 4];
  typedef short Four __attribute__((vector_size(8)));
  typedef __attribute__((address_space(3))) Four SharedFour;
  for (int i = 0; i < 4; i++) x[4 * thread_id() + i] = (short)(4 * thread_id() + i);
  sync();
  const Four y = __builtin_amdgcn_ds_read_tr16_b64_v4i16((SharedFour*)&x[4 * thread_id()]);
  for (int i = 0; i < 4; i++) ((short*)args.out)[4 * thread_id() + i] = y[i];"""
    launch(body, outputs={"out": found})
    blocks = np.arange(256, dtype=np.int16).reshape(4, 4, 16)
    np.testing.assert_array_equal(found.reshape(4, 16, 4), blocks.transpose(0, 2, 1))


def test_exchanges() -> None:
    found = np.zeros((3, LANES), np.int32)
    body = """
  const int l = thread_id();
  int* out = (int*)args.out;
  out[l] = __builtin_amdgcn_readfirstlane(l + 7);
  out[64 + l] = __builtin_amdgcn_ds_bpermute((l ^ 5) * 4, 100 + l);
  out[128 + l] = __builtin_amdgcn_perm(0x77665544, 0x33221100, 0x07060302);"""
    launch(body, outputs={"out": found})
    np.testing.assert_array_equal(found[0], 7)
    np.testing.assert_array_equal(found[1], 100 + (np.arange(LANES) ^ 5))
    np.testing.assert_array_equal(found[2], 0x77663322)
