"""What Triton's interpreter gets wrong, mended; imported only where kernels are interpreted.

It keeps a comparison under the type of what was compared, so that a scalar one becomes numbers where it meets a block:
up to Triton 3.8 that passed as a mask, from 3.9 on it is refused. And it rounds the product of a fused multiply-add,
which then differs from a GPU's in the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _create_splat(builder: InterpreterBuilder, block_type: Any, scalar: TensorHandle) -> TensorHandle:
    handle = _original(builder, block_type, scalar)
    if scalar.data.dtype != np.bool_:
        return handle
    return TensorHandle(handle.data.astype(np.bool_), tl.int1)


def _create_fma(builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    # float64 holds a product of two float32; the sum's own rounding decides between two float32 once in 2**29 times.
    found = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(found.astype(z.data.dtype), z.dtype.scalar)


_original = InterpreterBuilder.create_splat
InterpreterBuilder.create_splat = _create_splat
InterpreterBuilder.create_fma = _create_fma
