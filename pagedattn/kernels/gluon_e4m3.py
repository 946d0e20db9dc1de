"""Gluon: codes of e4m3 as float16, four to a word of int32, and numbers as sums of two of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_EIGHT = gl.constexpr((gl.float16,) * 8)


@gluon.jit
def elements(words):
    """The four codes of each word as float16."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 a, b; .reg .b32 x, y;
        mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
        mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }""",
        "=h,=h,=h,=h,r",
        [words],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        1,
    )


@gluon.jit
def pairs(even, odd):
    """Codes of a word each of two keys, as float16: both keys' first ones, then both keys' second ones, and so on."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 p, q, x; .reg .b16 a, b;
        prmt.b32 p, $8, $9, 0x5140; prmt.b32 q, $8, $9, 0x7362;
        mov.b32 {a, b}, p; cvt.rn.f16x2.e4m3x2 x, a; mov.b32 {$0, $1}, x;
        cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {$2, $3}, x;
        mov.b32 {a, b}, q; cvt.rn.f16x2.e4m3x2 x, a; mov.b32 {$4, $5}, x;
        cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {$6, $7}, x; }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [even, odd],
        _EIGHT,
        True,
        1,
    )


@gluon.jit
def two_e4m3(x, down):
    """Two e4m3 whose sum is x * down, the smaller first: eight significant bits. x, down: float32, four elements of a
    thread beside each other; products are below 256."""
    # Two at a time: x * 129 - (x * 129 - x) are the upper four bits of a float16. They are not had by a conversion to
    # e4m3 and back, for which ptxas 12.8 takes wrong registers.
    high, low = gl.inline_asm_elementwise(
        """{ .reg .b32 x, c, d, k, both; .reg .b16 a, b; .reg .f32 s, t;
        mov.b32 k, 0x58085808;
        mul.rn.f32 s, $2, $6; mul.rn.f32 t, $3, $6; cvt.rn.f16x2.f32 x, t, s;
        mul.rn.f16x2 c, x, k; sub.rn.f16x2 d, c, x; sub.rn.f16x2 c, c, d; sub.rn.f16x2 d, x, c;
        cvt.rn.satfinite.e4m3x2.f16x2 a, c; cvt.rn.satfinite.e4m3x2.f16x2 b, d; mov.b32 both, {a, b};
        mul.rn.f32 s, $4, $6; mul.rn.f32 t, $5, $6; cvt.rn.f16x2.f32 x, t, s;
        mul.rn.f16x2 c, x, k; sub.rn.f16x2 d, c, x; sub.rn.f16x2 c, c, d; sub.rn.f16x2 d, x, c;
        cvt.rn.satfinite.e4m3x2.f16x2 a, c; cvt.rn.satfinite.e4m3x2.f16x2 b, d; mov.b32 x, {a, b};
        prmt.b32 $0, both, x, 0x5410; prmt.b32 $1, both, x, 0x7632; }""",
        "=&r,=r,r,r,r,r,r,r,r,r",
        [x, down],
        (gl.float8e4nv, gl.float8e4nv),
        True,
        4,
    )
    return low, high
