"""Gluon: the loop over keys, in which each warp has a running maximum, sum and output of its own.

Legend: R rows of queries, W warps, 16 keys of each; `s` and `l_i` [W, 16, R], `m_i` [W, R], `acc` [W, DV, R].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..gluon_device import LOG2E, tanh
from .axes import along, in_3d
from .operands import KEYS, codes_of_word, key_offset, key_operand, key_words, value_operand, value_words

SMALLEST_SCALE = gl.constexpr(2.0**-100)  # what is smaller is read as this: a sum of exp(logit) then is a float32


@gluon.jit
def _log2(x):
    """Of normal numbers; exact to 2**-22 of 1, where `gl.log2` is to the last digit by 20 instructions."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _first_key(start, low, end, warp):
    """The first of the 16 keys at start + 16 * warp, or of those nearest to them in low..end."""
    return gl.minimum(gl.maximum(start + warp * KEYS, low // KEYS * KEYS), (end - 1) // KEYS * KEYS)


@gluon.jit
def _load_rows(codes, at, block, row, word, low, end, s_block, s_slot, S: gl.constexpr):
    """Words of a warp's 16 keys from `at` on, which lie in one block, or of the nearest of them in low..end."""
    first = codes + in_3d(block * s_block + (at % S) * s_slot, 0)
    return gl.load(first + word + _near_row(row, at, low, end) * s_slot)


@gluon.jit
def _load_scales(scales, at, block, row, kv_head, low, end, STRIDES: gl.constexpr, S: gl.constexpr):
    """Those of the same rows, of a plane with these strides by block, slot and head: [W, 16, 1]."""
    first = scales + in_3d(block * STRIDES[0] + ((at % S) * STRIDES[1] + kv_head * STRIDES[2]), 0)
    return gl.load(first + _near_row(row, at, low, end) * STRIDES[1])


@gluon.jit
def _near_row(row, at, low, end):
    """Rows [W, 16, 1] of keys at + row in low..end, or nearest to it."""
    return gl.minimum(gl.maximum(in_3d(row, 1), in_3d(low - at, 0)), in_3d(end - 1 - at, 0))


@gluon.jit
def attend(
    q, row_scale, acc, m_i, l_i, key, value, k_scales, v_scales, kv_head, table, begin, end, low, q_pos, slope, softcap,
    num_blocks, sk_b, sk_s, sv_b, sv_s, K_CODES: gl.constexpr, V_CODES: gl.constexpr, K_STRIDES: gl.constexpr,
    V_STRIDES: gl.constexpr, S: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, ONE_TOKEN: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """The states [W, ..] after keys begin..end, of which low..end are seen. Where a warp's keys reach beyond those, it
    reads the nearest ones again and gives them no weight.

    Codes and scales of the next tile are loaded as soon as those of this one have been multiplied, into the same
    registers, and block ids a tile earlier.

    Where rows of V have scales, the running maximum is that of exp(logit) * scale: what codes are multiplied by is then
    at most 1, in the range of float16, however small the scales are.
    """
    KW: gl.constexpr = key_words(W, D // 4)
    VALUE_WORDS: gl.constexpr = DV // codes_of_word(V_CODES)
    VW: gl.constexpr = value_words(W, VALUE_WORDS)
    K_WARPS: gl.constexpr = along(0, KW)
    V_WARPS: gl.constexpr = along(0, VW)
    TILE: gl.constexpr = W * KEYS
    k_row = gl.arange(0, KEYS, along(1, KW))
    k_word = in_3d(gl.arange(0, D // 4, along(2, KW)), 2)
    v_row = 2 * gl.arange(0, KEYS // 2, along(1, VW))
    v_word = in_3d(gl.arange(0, VALUE_WORDS, along(2, VW)), 2)
    warp = gl.arange(0, W, along(0, MMA))
    row = gl.arange(0, KEYS, along(1, MMA))

    at = _first_key(begin, low, end, warp)
    block = gl.load(table + at // S)
    next_at = _first_key(begin + TILE, low, end, warp)
    next_block = gl.load(table + next_at // S)
    known = block.to(gl.uint32) < num_blocks.to(gl.uint32)  # negative ids are large ones
    block = gl.where(known, block, 0).to(gl.int64)
    k_at, k_block = gl.convert_layout(at, K_WARPS), gl.convert_layout(block, K_WARPS)
    k = _load_rows(key, k_at, k_block, k_row, k_word, low, end, sk_b, sk_s, S)
    v_at, v_block = gl.convert_layout(at, V_WARPS), gl.convert_layout(block, V_WARPS)
    even = _load_rows(value, v_at, v_block, v_row, v_word, low, end, sv_b, sv_s, S)
    odd = _load_rows(value, v_at, v_block, v_row + 1, v_word, low, end, sv_b, sv_s, S)
    if K_STRIDES is not None:
        key_scale = _load_scales(k_scales, at, block, row, kv_head, low, end, K_STRIDES, S)
    if V_STRIDES is not None:
        value_scale = _load_scales(v_scales, at, block, row, kv_head, low, end, V_STRIDES, S)
    nothing = gl.zeros([W, KEYS, R], gl.float32, MMA)
    if key_offset(K_CODES) != 0:
        q_sum = gl.convert_layout(gl.sum(q.to(gl.float32), 1), gl.SliceLayout(1, MMA))
        nothing -= gl.expand_dims(q_sum, 1) * key_offset(K_CODES)
    for start in range(begin, end, TILE):
        near = _near_row(row, at, low, end)
        n = start + in_3d(warp, 0) * KEYS + in_3d(row, 1)
        keep = in_3d(known, 0) & (in_3d(at, 0) + near == n)
        at = next_at
        known = next_block.to(gl.uint32) < num_blocks.to(gl.uint32)
        block = gl.where(known, next_block, 0).to(gl.int64)
        next_at = _first_key(start + 2 * TILE, low, end, warp)
        next_block = gl.load(table + next_at // S)

        s = mma_v2(key_operand(k, K_CODES, MMA), q, nothing)
        k_at, k_block = gl.convert_layout(at, K_WARPS), gl.convert_layout(block, K_WARPS)
        k = _load_rows(key, k_at, k_block, k_row, k_word, low, end, sk_b, sk_s, S)
        scale = gl.expand_dims(row_scale, 1)
        if K_STRIDES is not None:
            s *= key_scale
            key_scale = _load_scales(k_scales, at, block, row, kv_head, low, end, K_STRIDES, S)
        if SOFTCAP:
            s = (softcap * LOG2E) * tanh(s * (scale / softcap))
        else:
            s = s * (scale * LOG2E)
        if ALIBI or not ONE_TOKEN:
            distance = n - in_3d(q_pos, 2)
        if ALIBI:
            bias = distance if CAUSAL else -gl.abs(distance)
            s += in_3d(slope * LOG2E, 2) * bias.to(gl.float32)
        if not ONE_TOKEN:  # a sequence's only row sees all of low..end
            if CAUSAL:
                keep = keep & (distance <= 0)
            if WINDOW > 0:
                keep = keep & (distance > -WINDOW)
                if not CAUSAL:
                    keep = keep & (distance < WINDOW)
        s = gl.where(keep, s, -float("inf"))
        weight = s
        if V_STRIDES is not None:
            value_scale = gl.where(value_scale < SMALLEST_SCALE, SMALLEST_SCALE, value_scale)
            weight = gl.where(keep, s + _log2(value_scale), -float("inf"))
            value_scale = _load_scales(v_scales, at, block, row, kv_head, low, end, V_STRIDES, S)
        m_new = gl.maximum(m_i, gl.max(weight, 1))
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - gl.expand_dims(shift, 1))
        alpha = gl.expand_dims(gl.exp2(m_i - shift), 1)
        m_i = m_new
        l_i = l_i * alpha + p
        if V_STRIDES is not None:
            p = gl.exp2(weight - gl.expand_dims(shift, 1))
        v = value_operand(even, odd, V_CODES, MMA)
        acc = mma_v2(v, gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(1, MMA, 2)), acc * alpha)
        v_at, v_block = gl.convert_layout(at, V_WARPS), gl.convert_layout(block, V_WARPS)
        even = _load_rows(value, v_at, v_block, v_row, v_word, low, end, sv_b, sv_s, S)
        odd = _load_rows(value, v_at, v_block, v_row + 1, v_word, low, end, sv_b, sv_s, S)
    return acc, m_i, l_i
