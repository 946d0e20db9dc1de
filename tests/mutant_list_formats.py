"""Faults of cache formats, of the planes they keep, and of what kernels ask of them."""

from __future__ import annotations

from mutant_anchor import Fault

GROWN = "test_growth.py both_are_served"

FAULTS = (
    Fault("a rotated output left rotated, decode", "_finish", "if ROTATE is not None:", "if ROTATE is None:", GROWN),
    Fault("a shared prefix's state rotated back too early", "decode:launch",
          "None if is_state else inputs.format.value.kernels.rotate", "inputs.format.value.kernels.rotate", GROWN),
    Fault("a rotated output left rotated, prefill", "_paged_attention_kernel",
          "acc = V_FORMAT.rotate(acc, DV, BLOCK_DV)",
          "pass", GROWN),
    Fault("a query not rotated, decode", "_decode_kernel", "q = K_FORMAT.rotate(q, D, BLOCK_D)", "pass", GROWN),
    Fault("a query not rotated, prefill", "_paged_attention_kernel", "q = K_FORMAT.rotate(q, D, BLOCK_D)", "pass",
          GROWN),
    Fault("scales of the first slot for all", "scale_rows", "slot * STRIDES[1]", "0",
          "test_conformance.py triton int8"),
    Fault("scales of the first head for all", "scale_rows", "kv_head.to(tl.int64) * STRIDES[2]", "0",
          "test_conformance.py triton int8"),
    Fault("a block's scales taken for its slots'", "plane_strides", "plane.stride(1) if plane.shape[1] > 1 else 0",
          "plane.stride(1)", GROWN),
    Fault("scales of values added up with the probabilities", "decode:_attend",
          "p *= V_FORMAT.row_scale(v_scales, v_scale_row, None)[None, :]", "pass", "test_conformance.py triton int8"),
    Fault("keys without their rows' scales, prefill", "prefill:_attend",
          "s *= K_FORMAT.row_scale(k_scales, k_scale_row, k_seen)[None, :]", "pass", "test_conformance.py triton int8"),
    Fault("a row of zeros with a scale of zero, torch", "Int8Rows.encode", "torch.where(largest == 0, 1.0, largest)",
          "largest", "test_formats.py nearest_code"),
    Fault("a row of zeros with a scale of zero, triton", "encode_rows",
          "of_row = tl.where(of_row == 0, 1.0, of_row)", "pass", "test_formats.py written_with_their_scales triton"),
    Fault("int8 rounded towards zero", "Int8Rows.encode", ".round()", "", "test_formats.py nearest_code"),
    Fault("kernels of an edited format found as they were", "RowKernels.cache_key", "else one.cache_key", 'else "one"',
          "test_formats.py apart_by_their_source"),
    Fault("planes of scales left out of a layout", "LayerCache.layout",
          "every = (self.key, self.value, self.key_scale, self.value_scale)", "every = (self.key, self.value)",
          "test_formats.py other_planes"),
    Fault("planes that are not aligned", "KVCacheSpec.offsets", "_ALIGNMENT if", "1 if",
          "test_formats.py aligned_planes"),
    Fault("blocks of unequal bytes overlaid for their sizes", "_equal_blocks",
          "out[spec].bytes_per_block != largest", "False", "test_formats.py aligned_planes"),
    Fault("sealed in place of what a block had", "PagedKVCache.seal_blocks", "plane[index] = sealed", "pass", GROWN),
    Fault("a format of another layer's cache taken", "_planes", "is not form", "is None",
          "test_formats.py part_of_an_int8_cache"),
)  # fmt: skip
