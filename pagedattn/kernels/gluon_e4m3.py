"""Gluon: codes of e4m3 as float16, four to a word of int32."""

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
