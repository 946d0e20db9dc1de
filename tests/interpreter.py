"""Makes Triton's interpreted `tl.dot` order-stable: an element's bits depend on its row and its column alone.

Triton interprets `tl.dot` as numpy's matrix product, which is OpenBLAS: the order in which it sums follows the CPU that
it finds and the shape of the tile, so that a row alone can have other bits than the same row in a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def product(a: Array, b: Array, dtype: np.dtype[Any]) -> Array:
    """a [..., M, K] times b [..., K, N] in `dtype`, a tree of elementwise sums over K; float16 is summed in float32."""
    if not np.issubdtype(dtype, np.floating):
        return np.matmul(a, b, dtype=dtype)  # integers have no rounding
    exact = np.promote_types(dtype, np.float32)
    rows = np.ascontiguousarray(np.moveaxis(a, -1, 0), exact)  # [K, ..., M]
    columns = np.ascontiguousarray(np.moveaxis(b, -2, 0), exact)  # [K, ..., N]
    # Nothing is contracted here: each element is one product, rounded once. np.multiply takes twice the time.
    terms = np.einsum("...m,...n->...mn", rows, columns)
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half] += terms[count - half : count]
        count -= half
    return terms[0].astype(dtype)


def make_order_stable() -> None:
    """For all kernels of this process."""
    from triton import language as tl
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        rows, columns = a.data, b.data
        if any(one.dtype.is_floating() and one.dtype.primitive_bitwidth == 8 for one in (a, b)):
            rows = interpreter._convert_float(rows, a.dtype, tl.float16, None).view(np.float16)
            columns = interpreter._convert_float(columns, b.dtype, tl.float16, None).view(np.float16)
        return interpreter.TensorHandle(product(rows, columns, d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
