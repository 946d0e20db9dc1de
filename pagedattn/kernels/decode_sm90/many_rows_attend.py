"""Gluon: attention of many rows of queries to tiles of codes: S = Q K^T and O = P V by `wgmma`, whose rows are those of
queries, so that a maximum is a warp's own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..gluon_device import LOG2E, tanh
from ..gluon_even_split import end_key, least_key, program_of, visible
from ..gluon_names import thread_barrier
from .axes import along, in_3d
from .key_loop import first_key, known_blocks
from .many_rows_convert import copy_tile, load_tile, store_keys, store_values, tables_of
from .many_rows_rooms import KEYS, KEYS_OF_WARP, WARPS, keys_of
from .outputs import write_item
from .queries import in_range, load_rows, rows_of


@gluon.constexpr_function
def _sum_layout(rows):
    """Layout of sums [rows, 4] of the keys that a thread has of each row."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [rows, 4])


@gluon.jit
def _sums(p):
    """Sums [R, 4] of the keys that a thread has of each row of weights: what is left is added up once per item."""
    R: gl.constexpr = p.shape[0]
    x = gl.sum(gl.sum(p.reshape([R, KEYS // 8, 4, 2]), 3), 1)
    return gl.convert_layout(x, _sum_layout(R), assert_trivial=True)


@gluon.jit
def _load_queries(query, sq_t, sq_h, item, kv_head, rooms, shape):
    """Rows into shared memory as float16, zeros where there are none; what their products are yet to be multiplied
    by."""
    x = load_rows(
        query, sq_t, sq_h, item.q_start, item.q_len, item.q_block, kv_head, shape.G, shape.BLOCK_Q, shape.D,
        shape.HEAD_DIM, shape.R, shape.MINE,
    )  # fmt: skip
    q, rest, up = in_range(x, shape.ROTATED, 14, shape.HEAD_DIM)
    rooms.q.store(q)
    if shape.ROTATED:
        rooms.q_rest.store(rest)
    fence_async_shared()
    thread_barrier()
    return gl.convert_layout(up, gl.SliceLayout(1, shape.LOGITS))


@gluon.jit
def _begin_products(q, rooms, shape):
    """Products of queries with a tile's keys, not waited for."""
    keys = rooms.keys().permute((1, 0))
    s = gl.zeros([shape.R, KEYS], gl.float32, shape.LOGITS)
    s = warpgroup_mma(q[0], keys, s, use_acc=False, is_async=True)
    if shape.ROTATED:
        s = warpgroup_mma(q[1], keys, s, is_async=True)
    return s


@gluon.jit
def _logits(s, start, row_scale, slope, q_pos, whole_from, whole_to, softcap, ALIBI: gl.constexpr, rooms, shape):
    """Logits of a tile from its products, -inf of keys that a row does not see, plus log2 of what values are yet to be
    multiplied by."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, shape.LOGITS)
    offs_n = gl.expand_dims(start + gl.arange(0, KEYS, COLUMNS), 0)
    factor = gl.expand_dims(row_scale, 1)
    if shape.K_SCALED:
        factor = factor * gl.expand_dims(rooms.scales.load(COLUMNS), 0)
    log = gl.expand_dims(rooms.logs.load(COLUMNS), 0)
    s = warpgroup_mma_wait(0, deps=[s])
    if shape.SOFTCAP:
        s = (softcap * LOG2E) * tanh(s * (factor / softcap))
    else:
        s *= factor * LOG2E
    if ALIBI:
        distance = offs_n - gl.expand_dims(q_pos, 1)
        bias = distance if shape.MASK[0] else -gl.abs(distance)
        s += gl.expand_dims(slope * LOG2E, 1) * bias.to(gl.float32)
    s += log
    if (start < whole_from) | (start + KEYS > whole_to):
        s = gl.where(visible(gl.expand_dims(q_pos, 1), offs_n, shape.MASK), s, -float("inf"))
    return s


@gluon.jit
def _attend_tiles(
    codes, table, num_blocks, kv_head, begin, past, item, q_pos, row_scale, slope, acc, m_i, l_i, softcap,
    ALIBI: gl.constexpr, rooms, shape,
):  # fmt: skip
    """The state after tiles of keys begin..past. While a tile is multiplied the next one's codes are on their way."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [WARPS, 1, 1], [2, 1, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(2, EACH)
    SUMS: gl.constexpr = l_i.type.layout
    warp = gl.arange(0, WARPS, along(0, EACH))
    row = gl.arange(0, KEYS_OF_WARP, along(1, EACH))
    low = item.low
    first_pos = item.seq_len - item.q_len + item.q_block * shape.BLOCK_Q
    last_pos = gl.minimum(first_pos + shape.BLOCK_Q, item.seq_len) - 1
    whole_from, whole_to = least_key(last_pos, shape.MASK), end_key(first_pos, item.seq_len, shape.MASK)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, shape.LOGITS, 2)
    q = (rooms.q, rooms.q_rest)
    if shape.QUERIES_IN_REGISTERS:
        q = (rooms.q.load(OPERAND), rooms.q_rest.load(OPERAND)) if shape.ROTATED else (rooms.q.load(OPERAND),)
    tables = (tables_of(begin, shape.K_WORDS, shape.K_CODES), tables_of(begin, shape.V_WORDS, shape.V_CODES))
    at = first_key(begin, low, past, warp, KEYS_OF_WARP)
    block, known = known_blocks(gl.load(table + at // shape.S), num_blocks)
    stage = 0
    copy_tile(codes, stage, at, block, known, kv_head, low, past, rooms, shape)
    next_at = first_key(begin + KEYS, low, past, warp, KEYS_OF_WARP)
    coming = gl.load(table + next_at // shape.S)
    for start in range(begin, past, KEYS):
        n = start + in_3d(warp, 0) * KEYS_OF_WARP + in_3d(row, 1)
        seen = in_3d(known, 0) & (n >= low) & (n < past)
        this_at, this_block = at, block
        at = next_at
        block, known = known_blocks(coming, num_blocks)
        async_copy.wait_group(0)
        if start + KEYS < past:
            copy_tile(codes, stage ^ 1, at, block, known, kv_head, low, past, rooms, shape)
        k, v, of_keys, of_values = load_tile(codes, stage, this_at, this_block, kv_head, OF_KEYS, rooms, shape)
        store_keys(k, of_keys, of_values, tables[0], seen, stage, rooms, shape)
        fence_async_shared()
        thread_barrier()
        s = _begin_products(q, rooms, shape)
        # Loaded here, while products run: the fence above would wait for these ids.
        next_at = first_key(start + 2 * KEYS, low, past, warp, KEYS_OF_WARP)
        coming = gl.load(table + next_at // shape.S)
        store_values(v, tables[1], rooms, shape)
        s = _logits(s, start, row_scale, slope, q_pos, whole_from, whole_to, softcap, ALIBI, rooms, shape)
        m_new = gl.maximum(m_i, gl.max(s, 1))
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(s - gl.expand_dims(shift, 1))
        alpha = gl.exp2(m_i - shift)
        m_i = m_new
        fence_async_shared()
        thread_barrier()
        weights = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, shape.OUTPUT, 2))
        acc *= gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, shape.OUTPUT)), 1)
        acc = warpgroup_mma(weights, rooms.values(), acc, is_async=True)
        if shape.V_STRIDES is not None:  # sums are of weights, not of what values are multiplied by
            p *= gl.expand_dims(rooms.inverses.index(stage).load(gl.SliceLayout(0, shape.LOGITS)), 0)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS), assert_trivial=True)
        l_i = l_i * gl.expand_dims(alpha, 1) + _sums(p)
        stage = stage ^ 1
        # Of a warp's own products; for those of others the barriers of the next turn wait, before values are stored.
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, m_i, l_i


@gluon.jit
def attend_items(
    query, out, prior, lse_out, sinks, alibi_slopes, k_scale, v_scale, workspace, qk_scale, out_scale, softcap, sq_t,
    sq_h, so_t, so_h, sl_t, s_kscale, s_vscale, codes, table, s_table, num_blocks, rooms, step, shape,
):  # fmt: skip
    """The program's items. codes: as `copy_tile` takes them."""
    SUMS: gl.constexpr = _sum_layout(shape.R)
    ROWS: gl.constexpr = gl.SliceLayout(1, shape.LOGITS)
    OF_MINE: gl.constexpr = gl.SliceLayout(1, shape.MINE)
    kv_head, program = gl.program_id(0) % shape.KV_HEADS, gl.program_id(0) // shape.KV_HEADS
    programs = gl.num_programs(0) // shape.KV_HEADS
    if k_scale is not None:  # stored keys times their scale: the same as their logits times it
        qk_scale *= gl.load(k_scale + kv_head * s_kscale)
    if v_scale is not None:
        out_scale *= gl.load(v_scale + kv_head * s_vscale)
    total, work = step.count(shape, WARPS)
    at, end, seq, base = step.range_of(program, programs, total, work, shape, WARPS)
    while at < end:
        item = step.item_of(at, seq, base, shape)
        seq, base = item.seq, item.base
        stop = gl.minimum(item.close, end)
        if end > item.origin:  # else nothing is left but an item's overhead
            at = gl.maximum(at, item.origin)
            up = _load_queries(query, sq_t, sq_h, item, kv_head, rooms, shape)
            q_row, head, exists = rows_of(
                gl.arange(0, shape.R, ROWS), item.q_len, item.q_block, kv_head, shape.G, shape.BLOCK_Q
            )
            slope = 0.0
            if alibi_slopes is not None:
                slope = gl.load(alibi_slopes + head, mask=exists, other=0.0).to(gl.float32)
            m_i = gl.full([shape.R], -float("inf"), gl.float32, ROWS)
            l_i = gl.zeros([shape.R, 4], gl.float32, SUMS)
            if sinks is not None:
                if at == item.origin:
                    sink = gl.load(sinks + head, mask=exists, other=-float("inf")).to(gl.float32) * LOG2E
                    m_i = sink - shape.SINK
                    counted = gl.convert_layout(
                        gl.where(sink == -float("inf"), 0.0, 2.0**shape.SINK), gl.SliceLayout(1, SUMS)
                    )
                    first = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, SUMS)), 0) == 0
                    l_i = gl.where(first, gl.expand_dims(counted, 1), 0.0)
            begin, past = keys_of(item, at, stop, shape)
            acc = gl.zeros([shape.R, shape.D], gl.float32, shape.OUTPUT)
            mine = gl.zeros([shape.R, shape.D], gl.float32, shape.MINE)
            if begin < past:
                acc, m_i, l_i = _attend_tiles(
                    codes, table + seq.to(gl.int64) * s_table, num_blocks, kv_head, begin, past, item,
                    item.seq_len - item.q_len + q_row, up * qk_scale, slope, acc, m_i, l_i, softcap,
                    alibi_slopes is not None, rooms, shape,
                )  # fmt: skip
                exchange = rooms.exchange(shape)
                thread_barrier()  # other warps' products may still read the tile
                exchange.store(acc)
                thread_barrier()
                mine = exchange.load(shape.MINE)
                thread_barrier()  # the next item's keys are not stored before
            m_i, l_i = gl.convert_layout(m_i, OF_MINE), gl.convert_layout(gl.sum(l_i, 1), OF_MINE)
            write_item(
                mine, m_i, l_i, out, prior, lse_out, workspace, kv_head, program, item.q_start, item.q_len,
                item.q_block, item.origin == at, stop == item.close, program_of(item.origin, programs, total),
                program_of(item.close - 1, programs, total), out_scale, so_t, so_h, sl_t, shape.HEAD_DIM,
                shape.KV_HEADS, shape.G, shape.BLOCK_Q, shape.V_CODES, shape.ACCUMULATE,
            )  # fmt: skip
        at = stop
