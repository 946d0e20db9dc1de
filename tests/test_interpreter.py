"""The interpreter of these tests: a row's bits do not depend on its tile, values are numpy's, again and again too."""

from __future__ import annotations

import os
from typing import Any

import interpreter
import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_interpreter = pytest.importorskip("triton.runtime.interpreter")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here")


def handle(data: interpreter.Array, dtype: Any) -> Any:
    return triton_interpreter.TensorHandle(data, dtype)


def dot(a: Any, b: Any, d: Any) -> interpreter.Array:
    return triton_interpreter.interpreter_builder.create_dot(a, b, d, tl.core.constexpr("ieee"), 0).data


@pytest.mark.parametrize(("m", "n", "k"), [(16, 64, 128), (64, 16, 32), (3, 5, 7), (128, 128, 16)])
def test_a_row_and_a_column_have_the_same_bits_alone_and_in_a_tile(m: int, n: int, k: int) -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((m, k), np.float32), random.standard_normal((k, n), np.float32)
    d = random.standard_normal((m, n), np.float32)

    def tile(rows: slice, columns: slice) -> interpreter.Array:
        parts = (a[rows], b[:, columns], d[rows, columns])
        return dot(*(handle(x, tl.float32) for x in parts))

    whole = tile(slice(None), slice(None))
    assert np.allclose(whole, a.astype(np.float64) @ b + d, rtol=1e-5, atol=1e-4)
    for row in range(m):
        assert np.array_equal(tile(slice(row, row + 1), slice(None)), whole[row : row + 1])
        assert np.array_equal(tile(slice(row, row + 1), slice(row % n, row % n + 1))[0, 0], whole[row, row % n])
    assert np.array_equal(tile(slice(m // 2, None), slice(n // 2, None)), whole[m // 2 :, n // 2 :])
    transposed = np.ascontiguousarray(b.T).T
    assert np.array_equal(dot(handle(a, tl.float32), handle(transposed, tl.float32), handle(d, tl.float32)), whole)


KINDS = {
    torch.float8_e4m3fn: (tl.float8e4nv, tl.float32, np.float32),
    torch.float8_e5m2: (tl.float8e5, tl.float32, np.float32),
    torch.float16: (tl.float16, tl.float32, np.float32),
    torch.float64: (tl.float64, tl.float64, np.float64),
    torch.int8: (tl.int8, tl.int32, np.int32),
}


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_operands_are_converted_as_the_interpreter_does(dtype: torch.dtype) -> None:
    kind, result, stored = KINDS[dtype]
    torch.manual_seed(0)
    a, b = (torch.randn(2, *shape).mul(4).to(dtype) for shape in ((8, 16), (16, 4)))
    fp8 = dtype.is_floating_point and dtype.itemsize == 1
    rows, columns = (handle((x.view(torch.uint8) if fp8 else x).numpy(), kind) for x in (a, b))
    got = dot(rows, columns, handle(np.ones((2, 8, 4), stored), result))
    assert got.dtype == stored and got.shape == (2, 8, 4)
    assert np.allclose(got, (a.double() @ b.double() + 1).numpy(), rtol=1e-12 if dtype == torch.float64 else 1e-5)


def test_a_result_in_float16_is_summed_in_float32() -> None:
    a = np.random.default_rng(0).random((1, 1000)).astype(np.float16)
    got = dot(handle(a, tl.float16), handle(a.T, tl.float16), handle(np.zeros((1, 1), np.float16), tl.float16))
    assert got.dtype == np.float16 and got.item() == np.float16((a.astype(np.float64) ** 2).sum())


@triton.jit
def _operands(x, out, N: tl.constexpr):  # pyright: ignore[reportInvalidTypeForm]
    at = tl.arange(0, N)
    row, first = tl.load(x + at), tl.load(x)
    tl.store(out + at, row + first)  # a scalar and a block
    tl.store(out + N + at, first - row)
    tl.store(out + 2 * N + at, at * 1000000007)  # wraps
    tl.store(out + 3 * N + at, at * 1000000007.0)
    tl.store(out + 4 * N + at, at + 1)
    tl.store(out + 5 * N + at, row.to(tl.float16) * 3 + 0.125)
    tl.store(out + 6 * N + at, at / 2 + at // 2 * 10)  # as floats, as integers
    tl.store(out + 7 * N + at, tl.sum(row[:, None] * row[None, :], 1))
    tl.store(out + 8 * N + at, tl.where(at[:, None] == at[None, :], first, 2).to(tl.float32).sum(0))


def test_operands_like_those_before_are_made_as_those_were() -> None:
    """What numbers and types become is remembered: of 7 and 7.0, of one block beside scalars and other blocks."""
    at, found = torch.arange(16), []
    for scale in (1.0, 1.0, 3.0):
        row = (at + 1) * scale
        out = torch.zeros(9, 16)
        _operands[(1,)](row, out, N=16)
        half = (row.half() * 3 + 0.125).float()
        wanted = [
            row + row[0],
            row[0] - row,
            at.int() * 1000000007,
            at * 1000000007.0,
            at + 1.0,
            half,
            at / 2 + at // 2 * 10,
        ]
        wanted += [row * row.sum(), row[0] + 30.0 + 0 * row]
        assert torch.allclose(out, torch.stack(wanted), rtol=1e-6)
        found.append(out)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_number_that_is_remembered_cannot_be_changed() -> None:
    semantic = triton_interpreter.interpreter_semantic
    one = tl.tensor(handle(np.ones(1, np.float32), tl.float32), tl.float32)
    with pytest.raises(ValueError, match="read-only"):
        semantic.binary_op_type_checking_impl(one, 0.625)[1].handle.data[:] = 1
