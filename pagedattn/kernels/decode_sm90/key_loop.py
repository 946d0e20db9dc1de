"""Gluon: the loop over keys, in which each warp has a running maximum, sum and output of its own.

Legend: R rows of queries, W warps, KEYS keys of each; `s` [W, KEYS, R]; of the state of each warp `l_i` [W, 16, R] and
`acc` [W, DV, R] are multiples of 2**`m_i` [W, R], the rows' maximum, or up to RESCALE_THRESHOLD less.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..gluon_device import LOG2E, RESCALE_THRESHOLD, SMALLEST_SCALE, approximate, tanh
from ..gluon_even_split import visible
from .axes import along, in_3d
from .operands import is_turboquant, key_offset, key_operand, key_words, value_operand, value_words
from .operands_4bit import keys_of_steps, level_tables, products, step_products


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
def _of_16_keys(p):
    """Weights [W, KEYS, R] as sums [W, 16, R] of those that a thread has."""
    LAYOUT: gl.constexpr = p.type.layout
    if p.shape[1] > 16:
        p = gl.sum(p.reshape([p.shape[0], p.shape[1] // 16, 16, p.shape[2]]), 1)
        p = gl.convert_layout(p, LAYOUT, assert_trivial=True)
    return p


@gluon.jit
def _finite(m):
    """What logits are taken off from of rows with the maximum m: of rows that have seen no key it is -inf."""
    return gl.where(m == -float("inf"), 0.0, m)


@gluon.jit
def _rescale(acc, m_i, l_i, top):
    """The states as multiples of 2**top."""
    alpha = gl.expand_dims(gl.exp2(m_i - _finite(top)), 1)
    return acc * alpha, top, l_i * alpha


@gluon.jit
def begin_tiles(staging, table, begin, end, low, num_blocks, MMA: gl.constexpr):
    """Begin to copy the first tile of keys begin..end, for `attend`."""
    at = first_key(begin, low, end, gl.arange(0, staging.W, along(0, MMA)), staging.KEYS)
    block, known = known_blocks(gl.load(table + at // staging.S), num_blocks)
    staging.copy(0, at, block, known, low, end)


@gluon.jit
def first_tiles(table, begin, end, low, num_blocks, staging, MMA: gl.constexpr):
    """Of the first tile of keys begin..end where each warp's are, their blocks, and which of those are in the cache; of
    the second one where they are, and the ids of their blocks. All [W], as `next_tile` takes them."""
    W: gl.constexpr = staging.W
    KEYS: gl.constexpr = staging.KEYS
    warp = gl.arange(0, W, along(0, MMA))
    at = first_key(begin, low, end, warp, KEYS)
    block, known = known_blocks(gl.load(table + at // staging.S), num_blocks)
    next_at = first_key(begin + W * KEYS, low, end, warp, KEYS)
    return at, block, known, next_at, gl.load(table + next_at // staging.S)


@gluon.jit
def next_tile(
    start, end, low, at, block, known, next_at, next_block, stage, staging, table, num_blocks, MMA: gl.constexpr
):
    """Wait for the tile of keys from `start` on, begin to copy the next one, and load the ids of the blocks after that:
    the tile's keys [W, KEYS, 1], which of them are seen, where each warp's are, and their blocks; then what
    `first_tiles` returns, a tile later."""
    W: gl.constexpr = staging.W
    KEYS: gl.constexpr = staging.KEYS
    TILE: gl.constexpr = W * KEYS
    warp = gl.arange(0, W, along(0, MMA))
    n = start + in_3d(warp, 0) * KEYS + in_3d(gl.arange(0, KEYS, along(1, MMA)), 1)
    seen = in_3d(known, 0) & (n >= low) & (n < end)
    this_at, this_block = at, block
    at = next_at
    block, known = known_blocks(next_block, num_blocks)
    async_copy.wait_group(0)
    # The barrier that follows, which Triton puts where a copy that was waited for is read, is also the one behind which
    # the other stage, and what `warpgroup_loop.py` has in shared memory of the tile before, may be written.
    if start + TILE < end:
        staging.copy(stage ^ 1, at, block, known, low, end)
    next_at = first_key(start + 2 * TILE, low, end, warp, KEYS)
    return n, seen, this_at, this_block, at, block, known, next_at, gl.load(table + next_at // staging.S)


@gluon.jit
def logits_of(
    s, row_scale, n, seen, staging, stage, at, block, q_pos, slope, softcap, K_CODES: gl.constexpr, MASK: gl.constexpr,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, ONE_TOKEN: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Logits of a tile's keys `n`, as exponents of two, from products with them, -inf of keys that are not `seen` by a
    row; and the scales of values with their log2, 1 and 0 where they have none."""
    K_SCALED: gl.constexpr = staging.K_STRIDES is not None and K_CODES != "int4_per_channel"
    exists = seen
    scale = gl.expand_dims(row_scale, 1)
    if K_SCALED:
        s *= staging.load_key_scales(stage, at, block, MMA)
    if SOFTCAP:
        s = (softcap * LOG2E) * tanh(s * (scale / softcap))
    else:
        s = s * (scale * LOG2E)
    value_scale = 1.0
    log = 0.0
    if staging.V_STRIDES is not None:  # what is stored for keys outside may be any number
        value_scale = staging.load_value_scales(stage, at, block, MMA)
        value_scale = gl.where(value_scale < SMALLEST_SCALE, SMALLEST_SCALE, value_scale)
        value_scale = gl.where(exists, value_scale, 1.0)
        # A value that is not finite makes NaN of the rows that see it alone: 0 times its scale would be one, too.
        if not ONE_TOKEN:
            not_finite = value_scale - value_scale  # NaN, of others 0
            s += not_finite
            value_scale = gl.where(not_finite == 0.0, value_scale, 1.0)
        log = approximate("lg2", value_scale)
    if ALIBI:
        distance = n - in_3d(q_pos, 2)
        bias = distance if MASK[0] else -gl.abs(distance)
        s += in_3d(slope * LOG2E, 2) * bias.to(gl.float32)
    if not ONE_TOKEN:  # a sequence's only row sees all of low..end
        seen = seen & visible(in_3d(q_pos, 2), n, MASK)
    s = gl.where(seen, s, -float("inf"))
    return s, log, value_scale


@gluon.jit
def attend(
    q, q_rest, row_scale, acc, m_i, l_i, staging, table, begin, end, low, q_pos, slope, softcap, num_blocks,
    K_CODES: gl.constexpr, V_CODES: gl.constexpr, R: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, ONE_TOKEN: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The states [W, ..] after keys begin..end, of which low..end are seen. A warp's keys outside have no weight; in
    place of codes that may be no numbers the nearest ones are read again.

    `begin_tiles` has begun to copy the first tile; each next one is copied while the one before is attended to, and
    block ids are loaded a tile before that.

    Where rows of V have scales, the running maximum is that of exp(logit) * scale: what codes are multiplied by is then
    at most 2**RESCALE_THRESHOLD, in the range of float16, however small the scales are.
    """
    W: gl.constexpr = staging.W
    KEYS: gl.constexpr = staging.KEYS
    PER_CHANNEL: gl.constexpr = K_CODES == "int4_per_channel"
    ROTATED: gl.constexpr = is_turboquant(K_CODES)
    V_WORDS: gl.constexpr = value_words(W, KEYS, staging.V_WORDS)
    TILE: gl.constexpr = W * KEYS
    at, block, known, next_at, next_block = first_tiles(table, begin, end, low, num_blocks, staging, MMA)
    stage = 0
    k_tables = level_tables(begin, key_words(W, KEYS, staging.K_WORDS), K_CODES)
    v_tables = level_tables(begin, V_WORDS, V_CODES)
    nothing = gl.zeros([W, KEYS, R], gl.float32, MMA)
    if key_offset(K_CODES) != 0:
        q_sum = gl.sum(q.to(gl.float32), 1)
        if ROTATED:
            q_sum += gl.sum(q_rest.to(gl.float32), 1)
        q_sum = gl.convert_layout(q_sum, gl.SliceLayout(1, MMA))
        nothing -= gl.expand_dims(q_sum, 1) * key_offset(K_CODES)
    for start in range(begin, end, TILE):
        n, seen, this_at, this_block, at, block, known, next_at, next_block = next_tile(
            start, end, low, at, block, known, next_at, next_block, stage, staging, table, num_blocks, MMA
        )
        codes = key_operand(staging.load_keys(stage), k_tables, q.dtype, K_CODES, MMA)
        if PER_CHANNEL:
            steps, least = staging.load_channels(stage)
            if R > 8:  # of whose products there are too many to make each of two
                s = mma_v2(keys_of_steps(codes, steps, least), q, nothing)
            else:
                scaled, rest, s = step_products(q, steps, least, KEYS, MMA)
                s = products(codes, scaled, rest, s, MMA)
        elif ROTATED:
            s = products(codes, q, q_rest, nothing, MMA)
        else:
            s = mma_v2(codes, q, nothing)
        s, log, value_scale = logits_of(
            s, row_scale, n, seen, staging, stage, this_at, this_block, q_pos, slope, softcap, K_CODES, MASK, SOFTCAP,
            ALIBI, ONE_TOKEN, MMA,
        )  # fmt: skip
        top = gl.maximum(m_i, gl.max(s + log, 1))
        if W > 1:  # a look at all warps' rows would take longer than it saves
            acc, m_i, l_i = _rescale(acc, m_i, l_i, top)
        elif gl.max(gl.max((top > m_i + RESCALE_THRESHOLD).to(gl.int32), 1), 0) > 0:
            acc, m_i, l_i = _rescale(acc, m_i, l_i, top)
        shift = gl.expand_dims(_finite(m_i), 1)
        p = gl.exp2(s - shift)
        l_i += _of_16_keys(p)
        p *= value_scale
        even, odd = staging.load_values(stage, V_WORDS)
        v = value_operand(even, odd, v_tables, q.dtype, V_CODES, MMA)
        acc = mma_v2(v, gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(1, MMA, 2)), acc)
        stage = stage ^ 1
    return acc, m_i, l_i
