"""Faults of prompts that are attended to over a copy of a quantised cache."""

from __future__ import annotations

from mutant_anchor import Fault

FAULTS = (
    Fault(
        "a block outside the cache in a copy's table",
        "_dequantise_kernel",
        "tl.where(known, own, -1)",
        "own",
        "test_dequantise.py stand_for",
    ),
    Fault(
        "a copy without the scales of values",
        "_dequantise_kernel",
        "v *= V_FORMAT.row_scale(v_scale_cache, v_scale_row, seen)[:, None]",
        "pass",
        "test_dequantise.py stand_for",
    ),
    Fault(
        "a copy of what is not encoded yet",
        "_dequantise_kernel",
        "(token >= first_encoded(MASK)) &",
        "",
        "test_dequantise.py only_what_queries_see",
    ),
    Fault(
        "a copy of open blocks",
        "_dequantise_kernel",
        "& (token < end_key(seq_len - 1, seq_len, MASK))",
        "",
        "test_dequantise.py only_what_queries_see",
    ),
    Fault(
        "keys of int4 rounded to the queries' dtype",
        "dequantise:launch",
        "torch.float16 if of_key.codes in FLOAT16_KEYS else query.dtype",
        "query.dtype",
        "test_dequantise.py only_what_queries_see",
    ),
    Fault(
        "a pass over keys of twice the size",
        "keys_per_pass",
        "MOST_BYTES // _key",
        "2 * MOST_BYTES // _key",
        "test_key_passes.py has_room",
    ),
    Fault(
        "a pass over keys at positions of the first",
        "KeyPass.update",
        "self.first * (",
        "0 * (",
        "test_key_passes.py one_call",
    ),
    Fault(
        "a sink in every pass over keys",
        "KeyPass.part",
        "None if self.first else inputs.sinks",
        "inputs.sinks",
        "test_key_passes.py one_call",
    ),
    Fault(
        "first blocks of every pass over keys",
        "plan_passes",
        "max(mask.from_block - block, 0) or None",
        "mask.from_block",
        "test_key_passes.py one_call",
    ),
    Fault(
        "a pass over keys for rows that it has none of",
        "_launch_passes",
        "lses[1].fill_(-torch.inf)",
        "pass",
        "test_key_passes.py one_call",
    ),
    Fault(
        "a copy of twice the size",
        "dequantise:copy_turns",
        "<= MOST_BYTES",
        "<= 2 * MOST_BYTES",
        "test_dequantise.py 64_mib",
    ),
    Fault(
        "a turn of query heads of other KV heads",
        "AttentionInputs.heads",
        "end * (self.query.shape[1] // self.key.shape[2]) for end",
        "end for end",
        "test_dequantise.py cut_by_kv_heads",
    ),
    Fault(
        "a turn with the scales of other heads",
        "AttentionInputs.heads",
        "given[first:last]",
        "given",
        "test_dequantise.py cut_by_kv_heads",
    ),
    Fault(
        "keys of a tile scaled by what is not a number",
        "_dequantise_kernel",
        'tl.where(of_key < float("inf"), of_key, 0.0)',
        "of_key",
        "test_dequantise.py not_finite",
    ),
    Fault(
        "rotated keys without the factor of their rotation",
        "_dequantise_kernel",
        " * block_of(D) ** -0.5",
        "",
        "test_dequantise.py sums_of_levels",
    ),
    Fault(
        "factors of rotated keys at the tile's place",
        "_dequantise_kernel",
        "tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)",
        "tl.arange(0, TOKENS)",
        "test_dequantise.py sums_of_levels",
    ),
    Fault(
        "room for fewer factors than tiles of attention read",
        "dequantise:launch",
        "(tiles * tile, rotated_tokens(dim))",
        "(columns * size, rotated_tokens(dim))",
        "test_dequantise.py sums_of_levels",
    ),
    Fault(
        "a few rows over rotated keys read as stored",
        "dequantise:pays",
        "shape.codes[0] not in ROTATED_KEYS and ",
        "",
        "test_dequantise.py many_queries_see_most",
    ),
)
