"""The interpreter's `tl.dot` in these tests: a row's bits do not depend on its tile, its values are numpy's."""

from __future__ import annotations

import os
from typing import Any

import interpreter
import numpy as np
import pytest
import torch

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
