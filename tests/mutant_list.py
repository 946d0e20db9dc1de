"""The faults that `mutants.py` plants: each a change of text, and the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: its name, the file, texts that occur once and what they become, and words that select tests by id."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: str


TORCH = "pagedattn/ops/attention_torch.py"
TRITON = "pagedattn/ops/kernels/attention.py"
FEW = "pagedattn/ops/kernels/decode.py"
PREFIX = "pagedattn/ops/shared_prefix.py"
STATES = "pagedattn/ops/kernels/partial_states.py"
POOL, CONTENTS = "pagedattn/block_pool.py", "pagedattn/block_contents.py"
PREFIXES, STEP, PLANNER = "engine/prefix_cache.py", "engine/step.py", "engine/step_planner.py"
SIMULATION, MACHINE = "tests/engine/test_scheduler_simulation.py", "tests/engine/test_kv_cache_stateful.py random"
CASES = "tests/backends/test_conformance.py"
BY_TORCH, BY_TRITON = f"{CASES} test_torch[ -torch.float32", f"{CASES} test_triton["
EVENLY = "tests/ops/test_decode.py"
ONCE = "tests/backends/test_shared_prefix.py"
DECODE = "seq_lens=1x16x37x129"


def fault(name: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(name, file, ((old, new),), tests)


_ATTENTION = (
    fault("window + 1, TORCH", TORCH, "visible & (distance > -window)", "visible & (distance >= -window)",
          f"{BY_TORCH} [sliding_window=17"),
    fault("window - 1, TORCH", TORCH, "visible & (distance > -window)", "visible & (distance > 1 - window)",
          f"{BY_TORCH} [sliding_window=17"),
    fault("window + 1, TRITON", TRITON, "visible & (distance > -WINDOW)", "visible & (distance >= -WINDOW)",
          f"{BY_TRITON} [sliding_window=15"),
    fault("window's first key too late, TRITON", TRITON, "first_pos - WINDOW + 1)", "first_pos - WINDOW + 2)",
          f"{BY_TRITON} [sliding_window=16-"),
    fault("bidirectional window + 1, TRITON", TRITON, "visible & (distance < WINDOW)",
          "visible & (distance <= WINDOW)", f"{BY_TRITON} 64x7x85-causal=False-sliding_window=16"),
    fault("causal + 1, TRITON", TRITON, "visible & (distance <= 0)", "visible & (distance <= 1)",
          f"{BY_TRITON} [long chunk"),
    fault("top-left instead of bottom-right, TORCH", TORCH, "position = (lens - starts[1:] + starts[:-1])[piece, None]",
          "position = (lens - lens)[piece, None]", f"{BY_TORCH} [mixed"),
    fault("V mask missing, TORCH", TORCH, "v = torch.where(visible.any(1)[..., None, None], v, 0)", "pass",
          f"{BY_TORCH} [mixed"),
    fault("V mask missing, TRITON", TRITON, "tl.load(v_ptrs, mask=(seen & known)[:, None]",
          "tl.load(v_ptrs, mask=known[:, None]", "tests/test_layer_checks.py nobody_holds TRITON"),
    fault("int32 block id, TRITON", TRITON, "row = tl.where(known, block, 0).to(tl.int64)",
          "row = tl.where(known, block, 0)", "tests/test_kv_cache.py beyond_2_to_the_31 triton"),
    fault("sink missing from the LSE, TORCH", TORCH, "(shift + total.log())", "(shift + weights.sum(-1).log())",
          f"{BY_TORCH} {DECODE}-sinks"),
    fault("wrong GQA group, TORCH", TORCH, ".unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)",
          ".unflatten(2, (-1, kv_heads)).permute(0, 3, 2, 1, 4)", f"{BY_TORCH} [heads=10x2"),
    fault("wrong GQA group, TRITON", TRITON, "head = (kv_head * GROUP + in_group + offs_m % G)",
          "head = (offs_m % G * tl.num_programs(1) + kv_head)", f"{BY_TRITON} [heads=10x2"),
    fault("soft cap after the mask, TORCH", TORCH, "logits = logits.masked_fill(~keep, -torch.inf)",
          "logits = logits.masked_fill(~keep, -torch.inf)\n    logits = softcap * torch.tanh(logits / softcap) "
          "if softcap else logits", f"{BY_TORCH} [softcap"),
    fault("ALiBi's sign, TORCH", TORCH, "bias = distance if inputs.causal else",
          "bias = -distance if inputs.causal else",
          f"{BY_TORCH} [alibi"),
    fault("ALiBi's sign, TRITON", TRITON, "else -tl.abs(distance)", "else tl.abs(distance)",
          f"{BY_TRITON} [causal=False-alibi"),
    fault("scale twice, TORCH", TORCH, ".mul_(inputs.scale)", ".mul_(inputs.scale * inputs.scale)",
          f"{BY_TORCH} [mixed"),
    fault("scale twice, TRITON", TRITON, "s = s * (qk_scale * PRE)", "s = s * (qk_scale * qk_scale * PRE)",
          f"{BY_TRITON} [mixed"),
    fault("sums not rescaled between tiles, TRITON", TRITON, "l_i = l_i * alpha + tl.sum(p, 1)",
          "l_i = l_i + tl.sum(p, 1)", f"{BY_TRITON} [long chunk"),
    fault("LSE of base 2, TRITON", TRITON, "tl.log2(l_i) * LN2", "tl.log2(l_i)", f"{BY_TRITON} [one past full"),
    fault("rows past the sequence attended to, TORCH", TORCH, "seen = (index < lens[piece, None]) & known",
          "seen = (index >= 0) & known", f"{BY_TORCH} [mixed"),
    fault("dense keys start at the queries, TRITON", TRITON, "key_start = tl.load(key_start_loc + seq)",
          "key_start = tl.load(query_start_loc + seq)", f"{BY_TRITON} [dense with context"),
    fault("dense keys start one sequence late, TORCH", TORCH, "starts = lens.cumsum(0) - lens",
          "starts = lens.cumsum(0)", f"{BY_TORCH} [dense with context"),
    fault("what lies behind a sequence on the CPU", "pagedattn/ops/attention_cpu.py", ".masked_fill_(behind, 0)", "",
          "tests/ops/test_attention_cpu.py kit_passes[gathered-torch.float32"),
    fault("a row that sees the future on the CPU", "pagedattn/ops/attention_cpu.py", "distance <= 0", "distance <= 1",
          "tests/ops/test_attention_cpu.py kit_passes[gathered-torch.float32"),
)  # fmt: skip

_SHARED_OUT = (
    fault("sink in every part", FEW, "if at == origin:\n                    m_i",
          "if at >= origin:\n                    m_i", f"{BY_TRITON} {DECODE}-sinks"),
    fault("a prior in every part", FEW, "if at == origin:\n                    dim_v",
          "if at >= origin:\n                    dim_v", f"{ONCE} [one token, 4/2]"),
    fault("a prefix that is masked", PREFIX, "causal=False,", "causal=True,", f"{ONCE} [one token, 4/2]"),
    fault("values scaled twice", PREFIX, "v_scale=None,", "", f"{ONCE} [fp8, heads]"),
    fault("the prefix's blocks again", PREFIX, "+ length // block_size", "+ 0 * length",
          f"{ONCE} [padding]"),
    fault("a captured prefix as long as it was", "pagedattn/backends/triton_metadata.py",
          "built.prefix.length = _shareable(built.launches, self.spec, common)", "pass",
          "tests/backends/test_shared_prefix_captured.py reads"),
    fault("a prefix beyond a token", PREFIX, "max(length - max(max_query_len - 1, 0), 0)", "max(length, 0)",
          f"{ONCE} [more tokens at the edge]"),
    fault("a decode's window begins too late", FEW, "seq_len - q_len - WINDOW + 1, 0)",
          "seq_len - q_len - WINDOW + 2, 0)", f"{BY_TRITON} {DECODE}-sliding_window=17"),
    fault("a few tokens' window + 1", TRITON, "visible & (distance > -WINDOW)", "visible & (distance >= -WINDOW)",
          f"{EVENLY} test_features[more-window]"),
    fault("a few tokens see the next", TRITON, "visible & (distance <= 0)", "visible & (distance <= 1)",
          f"{EVENLY} test_several_tokens[(4, 2)-5]"),
    fault("the last key many times", FEW, "(known & (near.to(tl.int32) == offs_n))", "known",
          f"{EVENLY} test_ragged_lengths[torch.float32-3]"),
    fault("int32 block id in a decode", FEW, "row = tl.where(known, block, 0).to(tl.int64)",
          "row = tl.where(known, block, 0)", "tests/test_kv_cache.py beyond_2_to_the_31 triton"),
    fault("block ids of the tile before", FEW, "_within(offs_n + BLOCK_N, low", "_within(offs_n, low",
          f"{EVENLY} test_ragged_lengths[torch.float32-1]"),
    fault("wrong GQA group in a decode", FEW, "(kv_head * GROUP + of_group)", "(of_group * 2 + kv_head)",
          f"{EVENLY} test_several_tokens[(4, 2)-5]"),
    fault("the rest of the tiles for nobody", FEW, "tl.cdiv(total, programs)", "total // programs",
          f"{EVENLY} test_ragged_lengths[torch.float32-7]"),
    fault("the second chunk of lengths is the first", FEW, "first += CHUNK", "first += 0",
          f"{EVENLY} test_more_sequences"),
    fault("no tile for rows without keys", FEW, "tl.cdiv(tl.minimum(seq_len, max_keys), BLOCK_N) - first, 1)",
          "tl.cdiv(tl.minimum(seq_len, max_keys), BLOCK_N) - first, 0)", f"{BY_TRITON} [no keys at all"),
    fault("the first to arrive combines", STATES, "== arrivals - 1", "== 0",
          f"{EVENLY} test_many_programs_to_an_item[13-3]"),
    fault("a counter that stays", STATES, "tl.store(counter, 0)", "tl.store(counter, arrivals)",
          f"{EVENLY} test_one_workspace"),
    fault("states added without weights", STATES, "* weight[:, :, None]", "",
          f"{EVENLY} test_many_programs_to_an_item[44-16]"),
    fault("only the first group's states", STATES, "part, first, True, groups, FAN_IN,",
          "part, first, True, groups, 1,",
          f"{EVENLY} test_many_programs_to_an_item[44-7]"),
    fault("the first state where the others are", STATES, "tl.where(begins & (done + nth == 0), SIZE, 0)", "0",
          f"{EVENLY} test_many_programs_to_an_item[44-44]"),
    fault("keys in front of an item's own", FEW, "at = tl.maximum(at, origin)", "pass",
          f"{EVENLY} test_items_that_count_for_more[1-7]"),
    fault("a workspace that never grows", "pagedattn/backends/triton_metadata.py",
          "if room is None or room.numel() < needed:", "if room is None:",
          "tests/backends/test_triton_metadata.py that_grows"),
    fault("counters that only a graph's replay zeroes", "pagedattn/backends/triton_metadata.py",
          "if _is_being_captured(device):", "if False:", "tests/backends/test_triton_metadata.py inside_a_capture"),
    fault("decodes among the items", "pagedattn/backends/triton_metadata.py",
          "common.query_start_loc[prefill.first :], common.seq_lens[prefill.first :]",
          "common.query_start_loc, common.seq_lens", "tests/backends/test_triton_metadata.py listed_once"),
    fault("decodes after all prompts", "pagedattn/ops/kernels/work_list.py",
          "tl.where(light, tl.minimum(rank + 1, count - count_light), tl.minimum(rank, count_light))",
          "tl.where(light, count - count_light, 0)", "tests/ops/test_work_list.py in_order"),
    fault("decodes join however long", "pagedattn/ops/hopper.py", "and bounds.max_seq_len <= room", "",
          "tests/ops/test_hopper_calls.py that_join"),
    fault("short sequences first", "pagedattn/ops/kernels/work_list.py", "theirs[None, :] > keys[:, None]",
          "theirs[None, :] < keys[:, None]", "tests/ops/test_work_list.py in_order"),
    fault("parts that overlap", "pagedattn/ops/kernels/part_list.py", "(first + part + 1) * step",
          "(first + part + 2) * step", "tests/ops/test_part_list.py every_tile_once[1]"),
    fault("states of two blocks in one place", "pagedattn/ops/kernels/part_list.py",
          "tl.where(parts > 1, parts, 0)\n    origin", "tl.where(parts > 1, 1, 0)\n    origin",
          "tests/ops/test_part_list.py every_tile_once"),
    fault("few rows on long contexts left to few SMs", "pagedattn/ops/launch.py", "blocks <= num_sms and",
          "False and", "tests/test_launch.py decode_kernel_shares"),
    fault("parts of tables of unknown size", "pagedattn/ops/hopper_list.py", "not listing.max_keys or",
          "False or", "tests/ops/test_hopper_calls.py shared_out"),
    fault("scales that Hopper's kernel does not read", "pagedattn/ops/hopper.py", " or inputs.out_scale != 1.0", "",
          "tests/ops/test_hopper_calls.py refused"),
    fault("strides that no matrix has", "pagedattn/ops/hopper.py", " or per_block % per_slot", "",
          "tests/ops/test_hopper_calls.py test_strides"),
    fault("a path without a write unseen", "tests/uniform_registers.py", "leaves & written[after]", "leaves",
          "tests/test_uniform_registers.py skips"),
)  # fmt: skip

_STORED = (
    fault("keys' scale upside down, TORCH", TORCH, "logits * _per_head(inputs.k_scale,",
          "logits / _per_head(inputs.k_scale,", f"{BY_TORCH} [kv_cache_dtype=fp8_e4m3-kv_scale=head"),
    fault("values' scale in place of keys', TRITON", TRITON, "qk_scale *= tl.load(k_scale + kv_head * s_kscale)",
          "qk_scale *= tl.load(v_scale + kv_head * s_vscale)", f"{BY_TRITON} [kv_cache_dtype=fp8_e4m3-kv_scale=head"),
    fault("one head's scale for all heads, TRITON", TRITON, "tl.load(v_scale + kv_head * s_vscale)",
          "tl.load(v_scale)", f"{BY_TRITON} [kv_cache_dtype=fp8_e4m3-kv_scale=head"),
    fault("deterministic splits decodes", "pagedattn/ops/launch.py", "if deterministic or not paged or",
          "if not paged or", "tests/test_deterministic.py test_the_same_bits plain"),
)  # fmt: skip

_ADAPTERS = (
    fault("FlashAttention's window + 1", "pagedattn/backends/flash_attn_metadata.py",
          "left = spec.sliding_window - 1", "left = spec.sliding_window",
          "tests/backends/test_flash_attn.py test_conforms[3"),
    fault("FlashAttention's +inf kept", "pagedattn/backends/flash_attn_calls.py",
          "lse.masked_fill(lse == torch.inf, -torch.inf)", "lse", "tests/backends/test_flash_attn.py test_conforms[3"),
    fault("a stale schedule replayed", "pagedattn/backends/flash_attn_metadata.py",
          "if into.schedule is not None:", "if False:", "tests/backends/test_flash_attn.py rewritten_in_place"),
    fault("FA4 chosen unasked", "pagedattn/backends/flash_attn_versions.py", "_AUTOMATIC = (FA3, FA2)",
          "_AUTOMATIC = (FA3, FA2, FA4)", "tests/backends/test_flash_attn.py never_chosen_unasked"),
    fault("a padded step keeps old lengths", "pagedattn/backends/base.py", "captured.seq_lens[count:].zero_()",
          "pass", "tests/test_metadata.py padded"),
)  # fmt: skip

_OPS = (
    fault("slot -1 as an index", "pagedattn/ops/reshape_and_cache.py", "live = (slots >= 0) & (slots <",
          "live = (slots >= -1) & (slots <", "tests/ops/test_reshape_and_cache.py test_only_skipped [torch]"),
    fault("tail of the slots not filled, torch", "pagedattn/ops/slot_mapping.py", "live = (token < starts[-1]) &",
          "live = (token >= 0) &", "tests/ops/test_slot_mapping.py test_groups torch"),
    fault("tail of the slots not filled, triton", "pagedattn/ops/kernels/slot_mapping.py", "slot, mask=token < end)",
          "slot, mask=(token < end) & (not tail))", "tests/ops/test_slot_mapping.py test_groups triton"),
    fault("table entry past the end followed", "pagedattn/ops/kernels/slot_mapping.py", "& (column < max_blocks) &",
          "&", "tests/ops/test_slot_mapping.py past_the_table triton"),
    fault("int32 block id in gather_kv", "pagedattn/ops/kernels/gather_kv.py", "other=-1).to(tl.int64)", "other=-1)",
          "tests/test_kv_cache.py beyond_2_to_the_31 triton"),
    fault("merge without weights, torch", "pagedattn/ops/merge_states.py",
          "weight = (lses - peak.masked_fill(peak == -torch.inf, 0.0)).exp()",
          "weight = (lses > -torch.inf).to(lses.dtype)", "tests/ops/test_merge_states.py test_merge[torch"),
    fault("merge without weights, triton", "pagedattn/ops/kernels/merge_states.py", "weight * value, 0.0)",
          "value, 0.0)", "tests/ops/test_merge_states.py test_merge[triton"),
    fault("copies in order of the pairs, torch", "pagedattn/ops/copy_blocks.py",
          "cache[targets] = moved",
          "for source, target in pairs.tolist():\n                cache[target] = cache[source]",
          "tests/ops/test_block_copies.py test_copy_blocks[torch overlapping"),
    fault("copies in order of the pairs, triton", "pagedattn/ops/copy_blocks.py",
          "overlap = marked(pairs[:, 1], len(caches[0]))[pairs[:, 0]]",
          "overlap = torch.zeros(len(pairs), dtype=torch.bool)",
          "tests/ops/test_block_copies.py test_copy_blocks[triton overlapping"),
    fault("fp8 not saturated, torch", "pagedattn/ops/reshape_and_cache.py", ".clamp(-most, most)", "",
          "tests/ops/test_reshape_and_cache_fp8.py test_the_nearest [torch"),
    fault("fp8 ties rounded up, triton", "pagedattn/ops/kernels/reshape_and_cache.py",
          "half_less_one + ((magnitude >> DROPPED) & 1))", "half_less_one + 1)",
          "tests/ops/test_reshape_and_cache_fp8.py test_the_nearest [triton"),
    fault("one head's scale for all, triton", "pagedattn/ops/kernels/reshape_and_cache.py", "head * (SCALES > 1)",
          "head * 0", "tests/ops/test_reshape_and_cache_fp8.py test_every_kind_of_scale[triton head"),
)  # fmt: skip

_LIBRARY = (
    fault("V is a view of K", "pagedattn/kv_cache.py", "view(elements, size * heads * spec.head_dim, spec.value_dim)",
          "view(elements, 0, spec.value_dim)", "tests/test_kv_cache.py share_out"),
    fault("blocks of unequal bytes overlaid", "pagedattn/cache_spec.py", "block_size=spec.block_size * factor",
          "block_size=spec.block_size", "tests/test_cache_spec.py scaled"),
    fault("a table's last column not committed", "pagedattn/block_table.py",
          "used = max(1, int(self.lengths[:rows].max(initial=0)))",
          "used = max(1, int(self.lengths[:rows].max(initial=0)) - 1)", "tests/test_block_table.py random"),
    fault("a plan without the KV group", "pagedattn/layer.py", "key = (self._kv_group, self.selection.spec",
          "key = (0, self.selection.spec", "tests/test_metadata.py built_once"),
    fault("the rest of a batch starts at the decodes", "pagedattn/composite.py", "starts - first if first else starts",
          "starts", "tests/test_layer.py two_backends_give lens0"),
    fault("the environment before use_backend", "pagedattn/selector.py", '(_requested.get(), "use_backend"),\n        '
          '(env.backend(), "PAGEDATTN_BACKEND"),', '(env.backend(), "PAGEDATTN_BACKEND"),\n        '
          '(_requested.get(), "use_backend"),', "tests/test_selector.py argument_before"),
    fault("a soft cap never refused", "pagedattn/capabilities.py", '("softcap", spec.softcap is not None,',
          '("softcap", False,', "tests/test_spec.py refused_once [softcap]"),
)  # fmt: skip

_BLOCKS = (
    fault("a key without its parent", CONTENTS, "node.parent is parent and node.tokens == tokens",
          "node.tokens == tokens", "tests/test_block_pool_content.py from_under_another_prefix"),
    fault("a key without its group", POOL, "peers = node.blocks.get(group)", "peers = node.blocks.get(0)",
          "tests/test_block_pool_content.py groups_share"),
    fault("a key without its salt", CONTENTS, " and node.extra == extra", "",
          "tests/test_block_pool_content.py salts_never_share[constant]"),
    fault("a free list in order of the table", POOL, "for block in reversed(held):", "for block in held:",
          "tests/test_block_pool.py tail_first"),
    fault("an open block shared by a fork", POOL, "copies = self.allocate(1) if has_open_block else []", "copies = []",
          "tests/test_block_pool.py fork_shares"),
    fault("a hit of the last token", PREFIXES, "self.aligned(len(request.token_ids) - 1)",
          "self.aligned(len(request.token_ids))", "tests/engine/test_scheduler_traps.py full_hit"),
    fault("a window's block released too early", STEP, "num_computed_tokens - window + 1)",
          "num_computed_tokens - window + 2)", "tests/engine/test_scheduler.py window_blocks"),
    fault("a failed swap that is trusted", "engine/scheduler.py",
          "        self._lose_swapped()\n        self._admitted", "        self._admitted", f"{SIMULATION} [swap]"),
    fault("content that was swapped in and not keyed", "engine/kv_cache_manager.py",
          "keyed = min([len(contents), *entries])", "keyed = len(contents)", "tests/engine/test_swap.py hit_again"),
    fault("a shared block that is swapped out", "engine/swap.py", "if pool.ref_count(block) == 1 or", "if",
          "tests/engine/test_swap.py others_hold"),
    fault("a fork of what is still being swapped in", PLANNER, "or parent.swapped is not None", "",
          f"{SIMULATION} swap"),
    fault("a twin of another salt", "engine/coming_blocks.py", "return request.cache_salt, first",
          "return None, first", "tests/engine/test_twins.py salts"),
    fault("a twin of another beginning", "engine/coming_blocks.py", "if tokens[:first] == prompt.token_ids[:first]:",
          "if True:", "tests/engine/test_twins.py another_beginning"),
    fault("the last chain with another salt", PREFIXES, " or last.salt != request.cache_salt", "", MACHINE),
    fault("the last chain with contents that died", PREFIXES, "if not node.alive or", "if", MACHINE),
    fault("the last chain with contents not to be trusted", PREFIXES, " or node.uid in poisoned), len(nodes))",
          "), len(nodes))", MACHINE),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (*(*_ATTENTION, *_SHARED_OUT, *_STORED, *_ADAPTERS, *_OPS, *_LIBRARY, *_BLOCKS),)
