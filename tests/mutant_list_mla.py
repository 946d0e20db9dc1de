"""Faults of latent attention: its kernel, its rows, the layer and the division of a step into both forms."""

from __future__ import annotations

from mutant_anchor import Fault

TRITON = "test_conformance.py test_triton latent"
OP = "test_mla_decode.py"
LAYER = "test_mla_layer.py"
FORM = f"{LAYER} every_form"
PARITY = "test_mla_parity.py every_form"

FAULTS = (
    Fault("a block outside the cache by its neighbour's NaN", "_attend_latent",
          "load_part(rows, at, known, 0, L, BLOCK_L)", "load_part(rows, at, offs >= 0, 0, L, BLOCK_L)",
          f"{OP} outside_the_cache triton"),
    Fault("blocks outside the cache seen", "_attend_latent", "keep = (known & (near", "keep = ((near",
          f"{OP} outside_the_cache triton"),
    Fault("rotated parts left out", "_attend_latent", "if R > 0:", "if R > 64:", TRITON),
    Fault("the rotated part read from the latent one", "_attend_latent", "load_part(rows, at, known, L, R, BLOCK_R)",
          "load_part(rows, at, known, 0, R, BLOCK_R)", TRITON),
    Fault("new tokens see later ones, latent", "_attend_latent", "& visible(q_pos[:, None], offs_n[None, :], MASK)", "",
          TRITON),
    Fault("sums not rescaled, latent", "_attend_latent", "acc * alpha[:, None]", "acc", TRITON),
    Fault("heads of a part from the first", "_query_rows", "head = part * G + offs_m % G", "head = offs_m % G",
          f"{TRITON} heads=128x1"),
    Fault("the rest of the latent tiles left out", "_mla_decode_kernel", "tl.cdiv(total, tl.num_programs(0) // PARTS)",
          "total // (tl.num_programs(0) // PARTS)", TRITON),
    Fault("both states of a program in one place", "_mla_decode_kernel",
          "2 * tl.program_id(0) + tl.where(begins, 1, 0)", "2 * tl.program_id(0)", TRITON),
    Fault("states of the program that begins an item not found", "_merge_kernel",
          "tl.where(program == first, 1, 0)", "0", TRITON),
    Fault("the last state of a split left out", "_merge_kernel", "live = program <= last", "live = program < last",
          TRITON),
    Fault("states of another row", "_merge_kernel", "row = tl.load(field + 2) + head % G",
          "row = head % G", TRITON),
    Fault("splits beyond the plan's tokens", "_mla_decode_kernel", "& (token < max_tokens)", "",
          f"{OP} fewer_tokens"),
    Fault("a plan for another shape, latent", "MLADecodePlan.serves",
          "self.shape.covers(shape) and self.num_seqs == num_seqs", "True", f"{OP} call_after_call"),
    Fault("the rotated part over the latent one", "_concat_and_cache_kernel",
          "write_part(k_pe + token * sp_t, row, L, R)", "write_part(k_pe + token * sp_t, row, 0, R)",
          "test_concat_and_cache_mla.py their_slots triton"),
    Fault("a latent slot past the end", "_concat_and_cache_kernel", "(slot >= 0) & (slot < num_slots)", "slot >= 0",
          "test_concat_and_cache_mla.py any_strides triton"),
    Fault("two halves of kv_b", "MLAAttention.split_kv_b",
          "weight.unflatten(0, (heads, nope + value)).split((nope, value), 1)",
          "(weight[: heads * nope].unflatten(0, (heads, nope)), weight[heads * nope :].unflatten(0, (heads, value)))",
          PARITY),
    Fault("the scale of a row", "AttentionSpec._default_latent", "if self.scale is None:", "if False:",
          "test_spec.py latent_spec_that_cannot_be"),
    Fault("expanded keys without their rotated part", "MLAAttention._expand", "key[..., nope:] = k_pe",
          "key[..., nope:] = 0", FORM),
    Fault("expanded rows from the first one", "MLAAttention.forward",
          "query = torch.cat((q_nope[first:last], q_pe[first:last]), -1)",
          "query = torch.cat((q_nope[: last - first], q_pe[: last - first]), -1)", FORM),
    Fault("chunks of context seen causally", "plan_chunks", "[(False, _without_nothing(every))]",
          "[(True, _without_nothing(every))]", f"{LAYER} chunks_cover"),
    Fault("later rows do not see a chunk of new tokens", "plan_chunks",
          "if any(rows and keys for rows, keys in later):", "if False:", f"{LAYER} chunks_cover"),
    Fault("more keys than the workspace holds", "_cut", "taken = min(count, room)", "taken = count",
          f"{LAYER} chunks_cover"),
    Fault("a captured step expanded", "MLAMetadataBuilder.build", "if capture or common", "if common",
          f"{LAYER} captured_step"),
    Fault("a window expanded", "MLAAttention.__init__",
          "usual if max_absorbed_len is None or sliding_window else max_absorbed_len",
          "usual if max_absorbed_len is None else max_absorbed_len", f"{LAYER} cap_and_window"),
    Fault("latent rows of several heads", "MLASpec.__post_init__", "if self.num_kv_heads != 1:", "if False:",
          "test_cache_spec.py refused_by_name"),
)  # fmt: skip
