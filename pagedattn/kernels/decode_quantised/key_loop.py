"""Gluon: the loop over keys, in which each warp has a running maximum, sum and output of its own.

Legend: R rows of queries, W warps, KEYS keys of each; `s` [W, KEYS, R], `l_i` [W, 16, R], `m_i` [W, R],
`acc` [W, DV, R].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..gluon_device import LOG2E, SMALLEST_SCALE, approximate, tanh
from ..gluon_even_split import visible
from .axes import along, in_3d
from .operands import codes_of_word, key_offset, key_operand, key_words, may_be_nan, value_operand, value_words
from .operands_4bit import channel_words, level_tables, products, step_products


@gluon.jit
def first_key(start, low, end, warp, KEYS: gl.constexpr):
    """The first of the keys of a warp at start + KEYS * warp, or of those nearest to them in low..end."""
    return gl.minimum(gl.maximum(start + warp * KEYS, low // KEYS * KEYS), (end - 1) // KEYS * KEYS)


@gluon.jit
def known_blocks(block, num_blocks):
    """Ids of blocks, 0 in place of those outside the cache, and which are inside: negative ids are large ones."""
    known = block.to(gl.uint32) < num_blocks.to(gl.uint32)
    return gl.where(known, block, 0).to(gl.int64), known


@gluon.jit
def load_rows(
    codes, at, block, row, word, low, end, s_block, S: gl.constexpr, SLOT: gl.constexpr, NEAREST: gl.constexpr
):
    """Words of a warp's keys from `at` on, which lie in one block, or of the nearest of them in low..end."""
    first = codes + in_3d(block * s_block + (at % S) * SLOT, 0)
    return gl.load(first + word + _near_row(row, at, low, end, NEAREST) * SLOT)


@gluon.jit
def load_scales(
    scales, at, block, row, kv_head, low, end, STRIDES: gl.constexpr, S: gl.constexpr, NEAREST: gl.constexpr
):
    """Those of the same rows, of a plane with these strides by block, slot and head: [W, KEYS, 1]."""
    first = scales + in_3d(block * STRIDES[0] + ((at % S) * STRIDES[1] + kv_head * STRIDES[2]), 0)
    return gl.load(first + _near_row(row, at, low, end, NEAREST) * STRIDES[1]).to(gl.float32)


@gluon.jit
def load_channels(scales, block, kv_head, channel, COUNT: gl.constexpr, STRIDES: gl.constexpr):
    """Steps and least elements of the channels of warps' blocks, COUNT words of each: [W, COUNT]."""
    at = scales + gl.expand_dims(block * STRIDES[0] + kv_head * STRIDES[2], 1) + gl.expand_dims(channel, 0)
    return gl.load(at), gl.load(at + COUNT)


@gluon.jit
def _near_row(row, at, low, end, NEAREST: gl.constexpr):
    """Rows [W, KEYS, 1] of keys at + row, or if NEAREST [1, KEYS, 1] of the nearest of them in low..end."""
    near = in_3d(row, 1)
    if NEAREST:
        near = gl.minimum(gl.maximum(near, in_3d(low - at, 0)), in_3d(end - 1 - at, 0))
    return near


@gluon.jit
def _of_16_keys(p):
    """Weights [W, KEYS, R] as sums [W, 16, R] of those that a thread has."""
    LAYOUT: gl.constexpr = p.type.layout
    if p.shape[1] > 16:
        p = gl.sum(p.reshape([p.shape[0], p.shape[1] // 16, 16, p.shape[2]]), 1)
        p = gl.convert_layout(p, LAYOUT, assert_trivial=True)
    return p


@gluon.jit
def attend(
    q, q_rest, row_scale, acc, m_i, l_i, key, value, k_scales, v_scales, kv_head, table, begin, end, low, q_pos, slope,
    softcap, num_blocks, sk_b, sv_b, K_SLOT: gl.constexpr, V_SLOT: gl.constexpr, K_CODES: gl.constexpr,
    V_CODES: gl.constexpr, K_STRIDES: gl.constexpr, V_STRIDES: gl.constexpr, S: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, R: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, ONE_TOKEN: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The states [W, ..] after keys begin..end, of which low..end are seen. A warp's keys outside have no weight; in
    place of codes that may be no numbers the nearest ones are read again.

    Codes and scales of the next tile are loaded as soon as those of this one have been multiplied, into the same
    registers, and block ids a tile earlier.

    Where rows of V have scales, the running maximum is that of exp(logit) * scale: what codes are multiplied by is then
    at most 1, in the range of float16, however small the scales are.
    """
    KEY_WORDS: gl.constexpr = D // codes_of_word(K_CODES)
    KW: gl.constexpr = key_words(W, KEYS, KEY_WORDS)
    VALUE_WORDS: gl.constexpr = DV // codes_of_word(V_CODES)
    VW: gl.constexpr = value_words(W, KEYS, VALUE_WORDS)
    PER_CHANNEL: gl.constexpr = K_CODES == "int4_per_channel"
    ROTATED: gl.constexpr = K_CODES == "turboquant4"
    CHANNELS: gl.constexpr = channel_words(W, D // 2)
    K_WARPS: gl.constexpr = along(0, KW)
    V_WARPS: gl.constexpr = along(0, VW)
    TILE: gl.constexpr = W * KEYS
    NEAREST: gl.constexpr = may_be_nan(K_CODES) or may_be_nan(V_CODES)
    k_row = gl.arange(0, KEYS, along(1, KW))
    k_word = in_3d(gl.arange(0, KEY_WORDS, along(2, KW)), 2)
    v_row = 2 * gl.arange(0, KEYS // 2, along(1, VW))
    v_word = in_3d(gl.arange(0, VALUE_WORDS, along(2, VW)), 2)
    warp = gl.arange(0, W, along(0, MMA))
    row = gl.arange(0, KEYS, along(1, MMA))

    at = first_key(begin, low, end, warp, KEYS)
    block = gl.load(table + at // S)
    next_at = first_key(begin + TILE, low, end, warp, KEYS)
    next_block = gl.load(table + next_at // S)
    block, known = known_blocks(block, num_blocks)
    k_at, k_block = gl.convert_layout(at, K_WARPS), gl.convert_layout(block, K_WARPS)
    k = load_rows(key, k_at, k_block, k_row, k_word, low, end, sk_b, S, K_SLOT, NEAREST)
    v_at, v_block = gl.convert_layout(at, V_WARPS), gl.convert_layout(block, V_WARPS)
    even = load_rows(value, v_at, v_block, v_row, v_word, low, end, sv_b, S, V_SLOT, NEAREST)
    odd = load_rows(value, v_at, v_block, v_row + 1, v_word, low, end, sv_b, S, V_SLOT, NEAREST)
    if PER_CHANNEL:
        channel = gl.arange(0, D // 2, gl.SliceLayout(0, CHANNELS))
        c_block = gl.convert_layout(block, gl.SliceLayout(1, CHANNELS))
        steps, least = load_channels(k_scales, c_block, kv_head, channel, D // 2, K_STRIDES)
    elif K_STRIDES is not None:
        key_scale = load_scales(k_scales, at, block, row, kv_head, low, end, K_STRIDES, S, NEAREST)
    if V_STRIDES is not None:
        value_scale = load_scales(v_scales, at, block, row, kv_head, low, end, V_STRIDES, S, NEAREST)
    nothing = gl.zeros([W, KEYS, R], gl.float32, MMA)
    k_tables, v_tables = level_tables(k, in_3d(k_block, 0)), level_tables(even, in_3d(v_block, 0))
    if key_offset(K_CODES) != 0:
        q_sum = gl.sum(q.to(gl.float32), 1)
        if ROTATED:
            q_sum += gl.sum(q_rest.to(gl.float32), 1)
        q_sum = gl.convert_layout(q_sum, gl.SliceLayout(1, MMA))
        nothing -= gl.expand_dims(q_sum, 1) * key_offset(K_CODES)
    for start in range(begin, end, TILE):
        n = start + in_3d(warp, 0) * KEYS + in_3d(row, 1)
        keep = in_3d(known, 0) & (n >= low) & (n < end)
        at = next_at
        block, known = known_blocks(next_block, num_blocks)
        next_at = first_key(start + 2 * TILE, low, end, warp, KEYS)
        next_block = gl.load(table + next_at // S)

        codes = key_operand(k, k_tables, K_CODES, MMA)
        if PER_CHANNEL:
            scaled, rest, s = step_products(q, steps, least, KEYS, MMA)
            s = products(codes, scaled, rest, s, MMA)
        elif ROTATED:
            s = products(codes, q, q_rest, nothing, MMA)
        else:
            s = mma_v2(codes, q, nothing)
        k_at, k_block = gl.convert_layout(at, K_WARPS), gl.convert_layout(block, K_WARPS)
        k = load_rows(key, k_at, k_block, k_row, k_word, low, end, sk_b, S, K_SLOT, NEAREST)
        scale = gl.expand_dims(row_scale, 1)
        if PER_CHANNEL:
            c_block = gl.convert_layout(block, gl.SliceLayout(1, CHANNELS))
            steps, least = load_channels(k_scales, c_block, kv_head, channel, D // 2, K_STRIDES)
        elif K_STRIDES is not None:
            s *= key_scale
            key_scale = load_scales(k_scales, at, block, row, kv_head, low, end, K_STRIDES, S, NEAREST)
        if SOFTCAP:
            s = (softcap * LOG2E) * tanh(s * (scale / softcap))
        else:
            s = s * (scale * LOG2E)
        if ALIBI:
            distance = n - in_3d(q_pos, 2)
            bias = distance if MASK[0] else -gl.abs(distance)
            s += in_3d(slope * LOG2E, 2) * bias.to(gl.float32)
        if not ONE_TOKEN:  # a sequence's only row sees all of low..end
            keep = keep & visible(in_3d(q_pos, 2), n, MASK)
        s = gl.where(keep, s, -float("inf"))
        weight = s
        if V_STRIDES is not None:
            value_scale = gl.where(value_scale < SMALLEST_SCALE, SMALLEST_SCALE, value_scale)
            weight = gl.where(keep, s + approximate("lg2", value_scale), -float("inf"))
            value_scale = load_scales(v_scales, at, block, row, kv_head, low, end, V_STRIDES, S, NEAREST)
        m_new = gl.maximum(m_i, gl.max(weight, 1))
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - gl.expand_dims(shift, 1))
        alpha = gl.expand_dims(gl.exp2(m_i - shift), 1)
        m_i = m_new
        l_i = l_i * alpha + _of_16_keys(p)
        if V_STRIDES is not None:
            p = gl.exp2(weight - gl.expand_dims(shift, 1))
        v = value_operand(even, odd, v_tables, V_CODES, MMA)
        acc = mma_v2(v, gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(1, MMA, 2)), acc * alpha)
        v_at, v_block = gl.convert_layout(at, V_WARPS), gl.convert_layout(block, V_WARPS)
        even = load_rows(value, v_at, v_block, v_row, v_word, low, end, sv_b, S, V_SLOT, NEAREST)
        odd = load_rows(value, v_at, v_block, v_row + 1, v_word, low, end, sv_b, S, V_SLOT, NEAREST)
    return acc, m_i, l_i
