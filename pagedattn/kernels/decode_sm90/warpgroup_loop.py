"""Gluon: the loop over keys for blocks of more rows of queries than a warp has registers for.

Products are transposed as in `key_loop.py`, S^T = K Q^T and O^T = V^T P^T, but made by `wgmma`: codes are its first
operand, in registers, queries and weights its second one, in shared memory. A warp has the logits of its 16 keys of a
tile and the outputs of its 32 channels, so that there is one state for all warps. Weights are multiples of one power of
two for each row, which is raised only where a logit is RESCALE_THRESHOLD above it (conditional rescaling): rows' maxima
are not looked for in every tile.

Legend: as in `key_loop.py`. `acc` [CHANNELS, R] in `output_layout`, `m_i` [W, R], of all warps the same.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ..gluon_device import LEAST, THRESHOLD_BITS, tile_layout
from ..gluon_names import thread_barrier
from .key_loop import first_tiles, logits_of, next_tile
from .operands import in_order_of_bytes, is_4_bit, is_turboquant, key_offset, key_operand, key_words
from .operands_4bit import in_key_order, keys_of_steps, level_tables
from .plan import WARP_ROWS
from .queries import in_range, load_rows
from .spread_codes import in_spread_order
from .warpgroup_values import WARPS, in_order, value_operand, value_words

KEYS = gl.constexpr(16)  # of a warp


@gluon.constexpr_function
def serves(rows):
    """Whether query blocks of so many rows are served here."""
    return rows > WARP_ROWS


@gluon.constexpr_function
def output_layout(rows):
    """Layout of products [CHANNELS, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@aggregate
class Rooms:
    """Shared memory: queries [R, D], of rotated ones what float16 rounds off them; a tile's weights [keys, R]; and
    [W] the bits of how much each warp's largest logit is above `m_i`."""

    q: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    excess: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q_rest, weights, excess):
        self.q, self.q_rest, self.weights, self.excess = q, q_rest, weights, excess


@gluon.jit
def make_rooms(R: gl.constexpr, D: gl.constexpr, K_CODES: gl.constexpr):
    REST: gl.constexpr = R if is_turboquant(K_CODES) else 8  # of other queries there is nothing to be kept
    TILE: gl.constexpr = WARPS * KEYS
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Rooms(
        gl.allocate_shared_memory(gl.float16, [R, D], tile_layout([R, D])),
        gl.allocate_shared_memory(gl.float16, [REST, D], tile_layout([REST, D])),
        gl.allocate_shared_memory(gl.float16, [TILE, R], tile_layout([TILE, R])),
        gl.allocate_shared_memory(gl.int32, [WARPS], FLAT),
    )


@gluon.jit
def load_queries(
    query, sq_t, sq_h, q_start, q_len, q_block, kv_head, rooms, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr,
    D: gl.constexpr, HEAD_DIM: gl.constexpr, R: gl.constexpr, K_CODES: gl.constexpr,
):  # fmt: skip
    """An item's rows into shared memory, in the order of the keys' codes, zeros where there are none. What their
    products are yet to be multiplied by, and their sums, both [R]."""
    MINE: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [WARPS, 1], [1, 0])
    x = load_rows(query, sq_t, sq_h, q_start, q_len, q_block, kv_head, GROUP, BLOCK_Q, D, HEAD_DIM, R, MINE)
    q, rest, up = in_range(x, is_turboquant(K_CODES), 14, HEAD_DIM)
    total = gl.sum(q.to(gl.float32), 1)
    if is_turboquant(K_CODES):
        total += gl.sum(rest.to(gl.float32), 1)
        rooms.q_rest.store(in_key_order(in_spread_order(rest, K_CODES)))
    if is_4_bit(K_CODES):
        rooms.q.store(in_key_order(in_spread_order(q, K_CODES)))
    else:
        rooms.q.store(in_order_of_bytes(q))
    fence_async_shared()
    thread_barrier()
    return up, total


@gluon.jit
def _rescale(acc, m_i, l_i, weight):
    """States as multiples of a larger power of two: that of the rows' maximum after `weight`."""
    top = gl.maximum(gl.max(m_i, 0), gl.max(gl.max(weight, 1), 0))
    every = gl.expand_dims(top, 0) + gl.zeros_like(m_i)
    alpha = gl.exp2(m_i - every)
    of_rows = gl.convert_layout(gl.max(alpha, 0), gl.SliceLayout(0, acc.type.layout))
    return acc * gl.expand_dims(of_rows, 0), every, l_i * gl.expand_dims(alpha, 1)


@gluon.jit
def _store_weights(p, rooms, LOGITS: gl.constexpr):
    x = p.to(gl.float16).reshape([p.shape[0] * p.shape[1], p.shape[2]])
    rooms.weights.store(gl.convert_layout(x, LOGITS, assert_trivial=True))
    fence_async_shared()


@gluon.jit
def attend(
    total, row_scale, acc, m_i, l_i, staging, rooms, table, begin, end, low, q_pos, slope, softcap, num_blocks,
    K_CODES: gl.constexpr, V_CODES: gl.constexpr, R: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The state after keys begin..end, of which low..end are seen, as `key_loop.attend`: `acc` [CHANNELS, R] in
    `output_layout`, `m_i` [W, R], of all warps the same, `l_i` [W, 16, R]. total: sums of the queries."""
    W: gl.constexpr = staging.W
    TILE: gl.constexpr = W * KEYS
    LOGITS: gl.constexpr = output_layout(R)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LOGITS, 2)
    EVERY: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0], [0]], [], [4])
    V_WORDS: gl.constexpr = value_words(staging.V_WORDS)
    PER_CHANNEL: gl.constexpr = K_CODES == "int4_per_channel"
    at, block, known, next_at, next_block = first_tiles(table, begin, end, low, num_blocks, staging, MMA)
    stage = 0
    k_tables = level_tables(begin, key_words(W, KEYS, staging.K_WORDS), K_CODES)
    v_tables = level_tables(begin, V_WORDS, V_CODES)
    nothing = gl.zeros([TILE, R], gl.float32, LOGITS)
    if key_offset(K_CODES) != 0:
        offset = gl.convert_layout(total, gl.SliceLayout(0, LOGITS)) * key_offset(K_CODES)
        nothing -= gl.expand_dims(offset, 0)
    q = rooms.q.permute((1, 0))
    q_rest = rooms.q_rest.permute((1, 0))
    for start in range(begin, end, TILE):
        n, seen, this_at, this_block, at, block, known, next_at, next_block = next_tile(
            start, end, low, at, block, known, next_at, next_block, stage, staging, table, num_blocks, MMA
        )
        codes = key_operand(staging.load_keys(stage), k_tables, gl.float16, K_CODES, MMA)
        if PER_CHANNEL:
            steps, least = staging.load_channels(stage)
            codes = keys_of_steps(codes, steps, least)
        codes = gl.convert_layout(codes.reshape([TILE, codes.shape[2]]), OPERAND, assert_trivial=True)
        s = warpgroup_mma(codes, q, nothing, is_async=True)
        if is_turboquant(K_CODES):
            s = warpgroup_mma(codes, q_rest, s, is_async=True)
        even, odd = staging.load_values(stage, V_WORDS)
        values = value_operand(even, odd, v_tables, V_CODES, LOGITS)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.convert_layout(s.reshape([W, KEYS, R]), MMA, assert_trivial=True)
        s, log, value_scale = logits_of(
            s, row_scale, n, seen, staging, stage, this_at, this_block, q_pos, slope, softcap, K_CODES, MASK, SOFTCAP,
            ALIBI, False, MMA,
        )  # fmt: skip
        above = s - gl.expand_dims(m_i, 1)
        p = gl.exp2(above)
        _store_weights(p * value_scale, rooms, LOGITS)
        most = (above + log).to(gl.int32, bitcast=True)  # where they are not negative in the same order as the numbers
        rooms.excess.store(gl.max(most.reshape([W, KEYS * R]), 1))
        thread_barrier()
        if gl.max(rooms.excess.load(EVERY), 0) > THRESHOLD_BITS:
            acc, m_i, l_i = _rescale(acc, m_i, l_i, s + log)
            p = gl.exp2(s - gl.expand_dims(m_i, 1))
            _store_weights(p * value_scale, rooms, LOGITS)
            thread_barrier()
        l_i += p
        acc = warpgroup_mma(values, rooms.weights, acc, is_async=True)
        stage = stage ^ 1
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, m_i, l_i


@gluon.jit
def state_of(acc, m_i, l_i, exchange, V_CODES: gl.constexpr, MINE: gl.constexpr):
    """A state of `attend` as [R, CHANNELS], [R] and [R] in layout MINE."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MINE)
    exchange.store(in_order(acc, V_CODES))
    thread_barrier()
    acc = exchange.load(MINE)
    thread_barrier()  # the next item's are not stored before
    m_i, l_i = gl.max(m_i, 0), gl.sum(gl.sum(l_i, 1), 0)
    m_i = gl.where(m_i == LEAST, -float("inf"), m_i)
    return acc, gl.convert_layout(m_i, OF_ROWS), gl.convert_layout(l_i, OF_ROWS)
