"""Gluon: the loop over keys, in which each warp has a running maximum, sum and output of its own.

Legend: R rows of queries, W warps, 16 keys of each; `s` and `l_i` [W, 16, R], `m_i` [W, R], `acc` [W, DV, R].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..gluon_device import LOG2E, tanh
from .axes import along, in_3d
from .operands import KEYS, key_operand, key_words, value_operand, value_words


@gluon.jit
def _first_key(start, low, end, warp):
    """The first of the 16 keys at start + 16 * warp, or of those nearest to them in low..end."""
    return gl.minimum(gl.maximum(start + warp * KEYS, low // KEYS * KEYS), (end - 1) // KEYS * KEYS)


@gluon.jit
def _load_rows(codes, at, block, row, word, low, end, s_block, s_slot, S: gl.constexpr):
    """Words of the keys at + row of blocks, or of the nearest ones in low..end."""
    near = gl.minimum(gl.maximum(in_3d(at, 0) + in_3d(row, 1), low), end - 1)
    return gl.load(codes + in_3d(block * s_block, 0) + ((near % S) * s_slot + word))


@gluon.jit
def attend(
    q, row_scale, acc, m_i, l_i, key, value, k_scales, v_scales, kv_head, table, begin, end, low, q_pos, slope, softcap,
    num_blocks, sk_b, sk_s, sv_b, sv_s, K_CODES: gl.constexpr, V_CODES: gl.constexpr, K_STRIDES: gl.constexpr,
    V_STRIDES: gl.constexpr, S: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, ONE_TOKEN: gl.constexpr,
    SPLIT_P: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The states [W, ..] after keys begin..end, of which low..end are seen. Where a warp's keys reach beyond those, it
    reads the nearest ones again and gives them no weight.

    Codes of the next tile are loaded as soon as those of this one have been multiplied, into the same registers, and
    block ids a tile earlier. SPLIT_P: probabilities are multiplied as two numbers, the second what rounding took off.
    """
    KW: gl.constexpr = key_words(W, D // 4)
    VW: gl.constexpr = value_words(W, DV // 4)
    K_WARPS: gl.constexpr = along(0, KW)
    V_WARPS: gl.constexpr = along(0, VW)
    TILE: gl.constexpr = W * KEYS
    k_row = gl.arange(0, KEYS, along(1, KW))
    k_word = in_3d(gl.arange(0, D // 4, along(2, KW)), 2)
    v_row = 2 * gl.arange(0, KEYS // 2, along(1, VW))
    v_word = in_3d(gl.arange(0, DV // 4, along(2, VW)), 2)
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
    for start in range(begin, end, TILE):
        near = gl.minimum(gl.maximum(in_3d(at, 0) + in_3d(row, 1), low), end - 1)  # [W, 16, 1]
        n = start + in_3d(warp, 0) * KEYS + in_3d(row, 1)
        keep = in_3d(known, 0) & (near == n)
        if K_STRIDES is not None:
            of_key = in_3d(block * K_STRIDES[0], 0) + ((near % S) * K_STRIDES[1] + kv_head * K_STRIDES[2])
            key_scale = gl.load(k_scales + of_key)
        if V_STRIDES is not None:
            of_value = in_3d(block * V_STRIDES[0], 0) + ((near % S) * V_STRIDES[1] + kv_head * V_STRIDES[2])
            value_scale = gl.load(v_scales + of_value)
        at = next_at
        known = next_block.to(gl.uint32) < num_blocks.to(gl.uint32)
        block = gl.where(known, next_block, 0).to(gl.int64)
        next_at = _first_key(start + 2 * TILE, low, end, warp)
        next_block = gl.load(table + next_at // S)

        s = mma_v2(key_operand(k, K_CODES, MMA), q, gl.zeros([W, KEYS, R], gl.float32, MMA))
        k_at, k_block = gl.convert_layout(at, K_WARPS), gl.convert_layout(block, K_WARPS)
        k = _load_rows(key, k_at, k_block, k_row, k_word, low, end, sk_b, sk_s, S)
        scale = gl.expand_dims(row_scale, 1)
        if K_STRIDES is not None:
            s *= key_scale
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
        m_new = gl.maximum(m_i, gl.max(s, 1))
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - gl.expand_dims(shift, 1))
        alpha = gl.expand_dims(gl.exp2(m_i - shift), 1)
        m_i = m_new
        l_i = l_i * alpha + p
        if V_STRIDES is not None:
            p *= value_scale
        v = value_operand(even, odd, V_CODES, MMA)
        rounded = p.to(v.dtype)
        acc = mma_v2(v, gl.convert_layout(rounded, gl.DotOperandLayout(1, MMA, 2)), acc * alpha)
        if SPLIT_P:
            rest = (p - rounded.to(gl.float32)).to(v.dtype)
            acc = mma_v2(v, gl.convert_layout(rest, gl.DotOperandLayout(1, MMA, 2)), acc)
        v_at, v_block = gl.convert_layout(at, V_WARPS), gl.convert_layout(block, V_WARPS)
        even = _load_rows(value, v_at, v_block, v_row, v_word, low, end, sv_b, sv_s, S)
        odd = _load_rows(value, v_at, v_block, v_row + 1, v_word, low, end, sv_b, sv_s, S)
    return acc, m_i, l_i
