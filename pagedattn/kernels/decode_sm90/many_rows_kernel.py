"""Gluon: attention with more rows of queries (tokens x heads of a group) than `kernel.py` serves, over a paged cache of
codes.

Query blocks have 64 rows. A tile's codes become float16 in shared memory, once for all rows (`many_rows_convert.py`),
which are multiplied by `wgmma` (`many_rows_attend.py`). How the work is split is as in `kernel.py`, but that ranges of
tiles differ by one at most (`../even_split.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon_items import Step
from .many_rows_attend import attend_items
from .many_rows_rooms import Shape, make_rooms
from .staging import head_offset


@gluon.jit(
    do_not_specialize=["num_seqs", "num_blocks", "max_keys", "s_table"],
    do_not_specialize_on_alignment=["table", "query_start_loc", "seq_lens"],
)
def many_rows_kernel(
    query, key, value, out, lse_out, table, query_start_loc, seq_lens, sinks, alibi_slopes, k_scale, v_scale, workspace,
    prior, num_seqs, num_blocks, max_keys, qk_scale, out_scale, softcap, sq_t, sq_h, sk_b, sk_h, sv_b, sv_h, so_t,
    so_h, sl_t, s_table, s_kscale, s_vscale, k_scale_cache, v_scale_cache,
    S: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, R: gl.constexpr, W: gl.constexpr, OVERHEAD: gl.constexpr,
    CHUNK: gl.constexpr, MANY_SEQS: gl.constexpr, ONE_TOKEN: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr,
    K_CODES: gl.constexpr, V_CODES: gl.constexpr, K_STRIDES: gl.constexpr, V_STRIDES: gl.constexpr, KEYS: gl.constexpr,
    K_SLOT: gl.constexpr, V_SLOT: gl.constexpr, ALIGNED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    gl.static_assert(HEAD_DIM == HEAD_DIM_V, "keys and values have one place each in a tile")
    CODES: gl.constexpr = (K_CODES, V_CODES)
    STRIDES: gl.constexpr = (K_STRIDES, V_STRIDES)
    SLOTS: gl.constexpr = (K_SLOT, V_SLOT)
    shape = Shape(R, GROUP, KV_HEADS, S, D, HEAD_DIM, OVERHEAD, CHUNK, MASK, SOFTCAP, CODES, STRIDES, SLOTS, ACCUMULATE)
    step = Step(query_start_loc, seq_lens, num_seqs, max_keys)
    kv_head = gl.program_id(0) % KV_HEADS
    key += head_offset(kv_head, sk_h, ALIGNED)
    value += head_offset(kv_head, sv_h, ALIGNED)
    codes = key, value, k_scale_cache, v_scale_cache, sk_b, sv_b
    attend_items(
        query, out, prior, lse_out, sinks, alibi_slopes, k_scale, v_scale, workspace, qk_scale, out_scale, softcap,
        sq_t, sq_h, so_t, so_h, sl_t, s_kscale, s_vscale, codes, table, s_table, num_blocks, make_rooms(shape), step,
        shape,
    )  # fmt: skip
