"""Checks of a layer call and of a step's contents, as far as PAGEDATTN_CHECK asks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..call import AttentionCall
from ..errors import InvalidInputError
from ..formats.base import LayerCache, check_scales
from ..formats.fp8.format import POSITIVE_SCALE, is_scale
from ..formats.registry import stored_as
from ..spec import AttentionSpec, AttentionType
from ..spec.scales import check_elements
from ..step.bounds import (
    check_lengths_fit_recent_table,
    check_lengths_fit_table,
    check_lengths_within_bounds,
    check_shared_length,
)
from ..step.metadata import CommonAttentionMetadata
from .mla_forms import LatentDims

_ONE_FORMAT = "build layer and cache with one kv_cache_dtype"


def check_call(spec: AttentionSpec, call: AttentionCall, common: CommonAttentionMetadata) -> None:
    """Level 1: ranks, shapes, dtypes, devices and strides; nothing that waits for the device. The bounds of `common`
    are checked when metadata are built."""
    query, key, value, kv_cache = call.query, call.key, call.value, call.kv_cache
    device = common.query_start_loc.device
    check_cache(kv_cache)
    _tensor("query", query, spec.num_heads, spec.head_dim, spec.dtype, device)
    if len(query) < common.num_tokens:
        raise InvalidInputError("query", f"at least {common.num_tokens} rows, as the metadata says", len(query))
    if key is not None:
        _tensor("key", key, spec.kv_heads, spec.head_dim, spec.dtype, device)
    if value is not None:
        _tensor("value", value, spec.kv_heads, spec.value_dim, spec.dtype, device)
    if kv_cache is None:
        _packed(key, value, None if torch.compiler.is_compiling() else common.seq_lens_cpu)
        return
    if not spec.uses_cache:
        raise InvalidInputError("kv_cache", f"None for attention of type {spec.attn_type.value}", "a cache")
    _pair(key, value, kv_cache)
    _planes(spec, kv_cache)
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if isinstance(scale, int | float) and not is_scale(scale):
            raise InvalidInputError(name, "a positive finite number", scale, POSITIVE_SCALE)
    _check_blocks(spec, kv_cache, common, key is not None)
    if spec.has_recent:
        _check_recent(spec, kv_cache, common)


def _check_recent(spec: AttentionSpec, kv_cache: LayerCache, common: CommonAttentionMetadata) -> None:
    """The second cache, of open blocks, and its table."""
    if common.recent_table is None:
        expected, remedy = f"given for a cache of kv_cache_dtype={spec.kv_cache_dtype!r}", "pass it to from_lengths"
        raise InvalidInputError("recent_table", expected, "None", remedy)
    if common.recent_table.dtype != torch.int32 or len(common.recent_table) != len(common.block_table):
        got = f"{common.recent_table.dtype} {list(common.recent_table.shape)}"
        raise InvalidInputError("recent_table", f"int32 [{len(common.block_table)}, max_blocks]", got)
    if common.seq_lens_cpu is not None and not torch.compiler.is_compiling():
        check_lengths_fit_recent_table(common, common.seq_lens_cpu, kv_cache.block_size)
    recent, remedy = kv_cache.recent, "build the cache by PagedKVCache(..., recent_blocks=), and pass cache.layer(i)"
    if recent is None:
        raise InvalidInputError("kv_cache", f"with `recent`, as kv_cache_dtype={spec.kv_cache_dtype!r}", "None", remedy)
    got = recent.block_size, recent.key.shape[2], recent.key.shape[3], recent.value.shape[3], recent.key.dtype
    want = kv_cache.block_size, spec.kv_heads, spec.head_dim, spec.value_dim, spec.dtype
    if got != want or recent.key.device != kv_cache.key.device:
        expected = "blocks of {} tokens with {} KV heads of {} and {}, {}".format(*want)
        raise InvalidInputError("kv_cache.recent", expected, f"{got} on {recent.key.device}", remedy)


def _check_blocks(spec: AttentionSpec, kv_cache: LayerCache, common: CommonAttentionMetadata, writes: bool) -> None:
    """A cache's device and block size against the layer's and the step's."""
    device = common.query_start_loc.device
    if kv_cache.key.device != device:
        raise InvalidInputError("kv_cache", f"on {device} as the metadata", kv_cache.key.device)
    if spec.block_size is not None and spec.block_size != kv_cache.block_size:
        remedy = "build the layer with the cache's block_size, or None"
        raise InvalidInputError("kv_cache", f"blocks of {spec.block_size} tokens", kv_cache.block_size, remedy)
    if writes and common.block_size not in (None, kv_cache.block_size):
        expected, remedy = f"of blocks of {kv_cache.block_size} tokens as the kv_cache", "build it with block_size="
        raise InvalidInputError("metadata", expected, common.block_size, f"{remedy}{kv_cache.block_size}")
    if common.seq_lens_cpu is not None and common.num_seqs and not torch.compiler.is_compiling():
        check_lengths_fit_table(common, common.seq_lens_cpu, kv_cache.block_size)


def check_latent_call(
    spec: AttentionSpec,
    dims: LatentDims,
    parts: Mapping[str, torch.Tensor | None],
    kv_cache: LayerCache | None,
    common: CommonAttentionMetadata,
) -> None:
    """Level 1 of a call of `MLAAttention`, by the names of its arguments."""
    heads, latent, rope, nope, value = dims
    device, tokens = common.query_start_loc.device, common.num_tokens
    shapes: dict[str, tuple[int | None, ...]] = {
        **{"q_nope": (None, heads, nope), "q_pe": (None, heads, rope), "latent": (None, latent), "k_pe": (None, rope)},
        **{"w_uk": (heads, nope, latent), "w_uv": (heads, value, latent), "out": (None, heads, value)},
    }
    if (parts["latent"] is None) != (parts["k_pe"] is None):
        raise InvalidInputError("k_pe", "given exactly where latent is", "one of them only")
    for name, shape in shapes.items():
        part = parts[name]
        if part is None:
            continue
        fits = part.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, part.shape, strict=True))
        if not fits or part.dtype != spec.dtype or part.device != device:
            text = ", ".join("T" if n is None else str(n) for n in shape)
            got = f"{part.dtype} {list(part.shape)} on {part.device}"
            raise InvalidInputError(name, f"{spec.dtype} [{text}] on {device}", got)
        if part.stride(-1) != 1 and part.numel():
            raise InvalidInputError(name, "contiguous in its last dimension", f"strides {part.stride()}")
        if name in ("q_nope", "q_pe", "out") and len(part) < tokens:
            raise InvalidInputError(name, f"at least {tokens} rows, as the metadata says", len(part))
    if kv_cache is not None:
        _check_latent_cache(spec, kv_cache, common, parts["latent"] is not None)


def _check_latent_cache(
    spec: AttentionSpec, kv_cache: LayerCache, common: CommonAttentionMetadata, writes: bool
) -> None:
    if not isinstance(kv_cache, LayerCache):
        expected, remedy = "a LayerCache of latent rows", "pass cache.layer(i) of a cache from MLASpec"
        raise InvalidInputError("kv_cache", expected, type(kv_cache).__name__, remedy)
    _planes(spec, kv_cache)
    apart = not torch.compiler.is_compiling() and kv_cache.key.data_ptr() != kv_cache.value.data_ptr()
    if apart and kv_cache.key.numel():
        raise InvalidInputError("kv_cache", "of latent rows", "values of their own", "build the cache from MLASpec")
    _check_blocks(spec, kv_cache, common, writes)


def _planes(spec: AttentionSpec, kv_cache: LayerCache) -> None:
    form = spec.format
    stored = stored_as(kv_cache.format, kv_cache.key.dtype)
    if stored is not form:
        got = f"{stored.name!r}{', as its dtype says' if kv_cache.format is None else ''}"
        raise InvalidInputError("kv_cache", f"of kv_cache_dtype={form.name!r}", got, _ONE_FORMAT)
    keys, values = form.key.planes(spec.head_dim, spec.dtype), form.value.planes(spec.value_dim, spec.dtype)
    got = tuple(kv_cache.key.shape[2:]), tuple(kv_cache.value.shape[2:])
    want = (spec.kv_heads, keys[0].width), (spec.kv_heads, values[0].width)
    if got != want:
        raise InvalidInputError("kv_cache", f"key and value [P, S, *] with {want}", got)
    if (kv_cache.key.dtype, kv_cache.value.dtype) != (keys[0].dtype, values[0].dtype):
        expected = f"of {keys[0].dtype}, as kv_cache_dtype={spec.kv_cache_dtype!r} says"
        raise InvalidInputError("kv_cache", expected, kv_cache.key.dtype, _ONE_FORMAT)
    check_scales("kv_cache.key_scale", keys, kv_cache.key_scale, kv_cache.key)
    check_scales("kv_cache.value_scale", values, kv_cache.value_scale, kv_cache.value)


def check_cache(kv_cache: object) -> None:
    """Raise InvalidInputError for what is neither one layer's cache nor None."""
    if kv_cache is not None and not isinstance(kv_cache, LayerCache):
        raise InvalidInputError("kv_cache", "a LayerCache or None", type(kv_cache).__name__, "pass cache.layer(i)")


def check_kinds(kv_cache: object, common: object) -> None:
    """Raise InvalidInputError for what is no cache of a layer, or no metadata of a step."""
    check_cache(kv_cache)
    if not isinstance(common, CommonAttentionMetadata):
        remedy = "make one by CommonAttentionMetadata.from_lengths"
        raise InvalidInputError("common", "a CommonAttentionMetadata", type(common).__name__, remedy)


def check_contents(spec: AttentionSpec, call: AttentionCall, common: CommonAttentionMetadata) -> None:
    """Level 2: every live table entry, slot, length and scale; waits for the device."""
    kv_cache = call.kv_cache
    lens, starts = common.seq_lens.cpu().long(), common.query_start_loc.cpu().long()
    query_lens = starts.diff()
    if bool((query_lens < 0).any()) or int(starts[0] if len(starts) else 0) != 0:
        raise InvalidInputError("query_start_loc", "0 at first and never decreasing", starts.tolist())
    check_lengths_within_bounds(common, starts.numpy(), lens.numpy())
    if kv_cache is None:
        _packed(call.key, call.value, lens)
        return
    _contents_of_scales(call)
    if (spec.causal or spec.attn_type is AttentionType.DECODER) and bool((query_lens > lens).any()):
        raise InvalidInputError("seq_lens", "at least the new tokens of each sequence", lens.tolist())
    size, blocks, table = kv_cache.block_size, kv_cache.num_blocks, common.block_table.cpu()
    if int(lens.max() if len(lens) else 0) > table.shape[1] * size:
        raise InvalidInputError("seq_lens", f"at most {table.shape[1] * size}", int(lens.max()))
    live = torch.arange(table.shape[1], device="cpu") * size < lens[:, None]
    bad = (live & ((table < 0) | (table >= blocks))).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        got = f"{int(table[row, column])} at row {row}, column {column}"
        raise InvalidInputError("block_table", f"blocks in [0, {blocks})", got)
    if common.shared_prefix_len:
        check_shared_length(common, lens)
        shared = table[:, : -(-common.shared_prefix_len // size)]
        bad = (lens > 0) & (shared != shared[:1]).any(1)
        if bool(bad.any()):
            expected = f"tokens in blocks that all sequences share ({common.shared_prefix_len} are not)"
            raise InvalidInputError("shared_prefix_len", expected, f"others at row {int(bad.nonzero()[0])}", "pass 0")
    if kv_cache.recent is not None:
        check_lengths_fit_recent_table(common, lens, size)
        _check_recent_table(common, kv_cache, lens, query_lens)
        blocks = kv_cache.recent.num_blocks
    slots = common.slot_mapping.cpu()
    written = slots[(slots >= 0) & (slots < blocks * size)]  # others mean to write nothing
    if len(written.unique()) != len(written):
        raise InvalidInputError("slot_mapping", "each slot at most once", "a slot that occurs twice")


def _check_recent_table(
    common: CommonAttentionMetadata, kv_cache: LayerCache, lens: torch.Tensor, query_lens: torch.Tensor
) -> None:
    """Blocks of the second cache, from the first that each sequence's new tokens read there on."""
    if common.recent_table is None or kv_cache.recent is None:
        return
    recent, size, table = kv_cache.recent, kv_cache.block_size, common.recent_table.cpu()
    form = stored_as(kv_cache.format, kv_cache.key.dtype)
    before, kept = form.recent_blocks(size), form.first_blocks(size)
    column = torch.arange(table.shape[1], device="cpu")
    needed = (column >= ((lens - query_lens) // size - before)[:, None]) | (column < kept)
    live = (column * size < lens[:, None]) & needed
    bad = (live & ((table < 0) | (table >= recent.num_blocks))).nonzero()
    if len(bad):
        row, at = bad[0].tolist()
        first = f"{before} before that of the first new token" if before else "that of the first new token"
        others = f", and in the first {kept}" if kept else ""
        expected = f"blocks in [0, {recent.num_blocks}) from {first} on{others}"
        raise InvalidInputError("recent_table", expected, f"{int(table[row, at])} at row {row}, column {at}")


def _contents_of_scales(call: AttentionCall) -> None:
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if isinstance(scale, torch.Tensor):
            check_elements(name, scale)


def _packed(key: torch.Tensor | None, value: torch.Tensor | None, seq_lens: torch.Tensor | None) -> None:
    """Without a cache both are there, with a row per key of every sequence (not looked at where lengths are None)."""
    if key is None or value is None:
        raise InvalidInputError("key and value", "given where there is no kv_cache", "None")
    total, rows = 0 if seq_lens is None else int(seq_lens.sum()), min(len(key), len(value))
    if rows < total:
        raise InvalidInputError("key and value", f"at least {total} rows, the sum of seq_lens", rows)


def _pair(key: torch.Tensor | None, value: torch.Tensor | None, kv_cache: LayerCache) -> None:
    """Keys and values come together, but for a cache whose values are a view of its keys."""
    if key is None:
        if value is not None:
            raise InvalidInputError("key", "given with value", "None", "pass neither to write nothing")
    elif value is None:
        if kv_cache.value.data_ptr() != kv_cache.key.data_ptr():
            raise InvalidInputError("value", "given with key, as the cache keeps both", "None")
    elif not torch.compiler.is_compiling() and kv_cache.value.data_ptr() == kv_cache.key.data_ptr() != 0:
        raise InvalidInputError("value", "None, as the cache's values are a view of its keys", list(value.shape))


def _tensor(name: str, tensor: torch.Tensor, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dim() != 3 or tensor.shape[1] != heads or tensor.shape[2] != dim:
        raise InvalidInputError(name, f"[T, {heads}, {dim}]", list(tensor.shape))
    if tensor.dtype != dtype:
        raise InvalidInputError(name, str(dtype), tensor.dtype, "build the layer with this dtype, or cast")
    if tensor.device != device:
        raise InvalidInputError(name, f"on {device} as the metadata", tensor.device)
    if tensor.stride(2) != 1 and tensor.numel():
        raise InvalidInputError(name, "contiguous in its last dimension", f"strides {tensor.stride()}")
