"""The rotation as device code; `rotation.py` says what it is."""

from __future__ import annotations

import triton
import triton.language as tl

from . import rotation

block_of = triton.constexpr_function(rotation.block_of)


@triton.constexpr_function
def rounds_of(dim):
    return (dim & -dim).bit_length() - 1


@triton.jit
def signs(dim):
    """1.0 or -1.0 of elements at places `dim`."""
    x = (dim + 1).to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return 1.0 - 2.0 * ((x >> 16) & 1).to(tl.float32)


@triton.jit
def hadamard(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """H times each row of a tile [M, BLOCK_D], not divided by sqrt(block); zero beyond D, as it came."""
    M: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = block_of(D)
    if SIZE > 1:
        for _ in tl.static_range(rounds_of(D)):
            a, b = tl.split(tl.reshape(x, (M, BLOCK_D // SIZE, SIZE // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (M, BLOCK_D))
    return x


@triton.jit
def rotate_back(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, BLOCK_D] as it was before the rotation."""
    ROOT: tl.constexpr = block_of(D) ** -0.5
    back = hadamard(x.to(tl.float32), D, BLOCK_D) * (signs(tl.arange(0, BLOCK_D)) * ROOT)[None, :]
    return back.to(x.dtype)
