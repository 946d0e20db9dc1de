"""AttentionInputs: everything one attention call is given, named once for the op and its paths."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import InvalidInputError
from ..formats.base import CacheFormat, check_scales
from ..formats.native.format import NATIVE
from ..formats.registry import stored_as
from ..runtime.op_registry import expect, refuse

# What differs from layer to layer of a step, by the names of the kernels' parameters.
VARYING = (
    *("query", "key", "value", "out", "sinks", "alibi_slopes", "k_scale", "v_scale"),
    *("qk_scale", "out_scale", "k_scale_cache", "v_scale_cache", "scales", "halves"),
)


def outputs_kept(inputs: AttentionInputs) -> tuple[str, ...]:
    """Parameters that stay what they are when a launch is made again for another layer: outputs that are no layer's,
    but for another launch to add to."""
    return ("out",) if inputs.out.dtype != inputs.query.dtype else ()


class AttentionInputs(NamedTuple):
    """The op's arguments in the order of its schema; see `ops.paged_attention`."""

    query: torch.Tensor  # [T, Hq, D]
    key: torch.Tensor  # codes [P, S, Hkv, n], elements [P, S, Hkv, D] as a rule, or packed [N, Hkv, D]
    value: torch.Tensor  # the same of values
    block_table: torch.Tensor | None  # [B, max_blocks] int32, None for packed keys; of a copy [B, 1], first rows
    query_start_loc: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    sinks: torch.Tensor | None  # [Hq]
    alibi_slopes: torch.Tensor | None  # [Hq]
    k_scale: torch.Tensor | None  # [1] or [Hkv] float32; a host float is already part of `scale`
    v_scale: torch.Tensor | None  # [1] or [Hkv] float32
    out: torch.Tensor  # [T, Hq, Dv]
    lse: torch.Tensor | None  # [T, Hq]
    scale: float
    out_scale: float  # a value scale known to the host
    mask: tuple[int, ...]  # `Mask.constants`
    softcap: float  # 0 is none
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    deterministic: bool
    k_scale_cache: torch.Tensor | None = None  # second planes of the cache, [P, S or 1, Hkv, n]
    v_scale_cache: torch.Tensor | None = None
    kv_cache_dtype: str = "auto"  # the cache's format; "auto": as its dtype says
    accumulate: bool = False  # out and lse hold attention of these rows over other keys, which this is added to
    prior: torch.Tensor | None = None  # float32 [T, Hq, Dv], contiguous: what holds the outputs of those, if not out

    @property
    def format(self) -> CacheFormat:
        """How the cache, or packed keys, are stored."""
        return stored_as(self.kv_cache_dtype, self.key.dtype)

    def check(self) -> None:
        """Raise InvalidInputError for shapes, dtypes or strides that do not fit each other."""
        # No `expect` here: its texts would be made at every call.
        query, key, value, lens = self.query, self.key, self.value, self.seq_lens
        if query.dim() != 3 or query.stride(2) != 1:
            refuse("query", "[T, Hq, D], last stride 1", query)
        rank = 3 if self.block_table is None else 4
        if key.dim() != rank or key.stride(-1) != 1:
            refuse("key", f"rank {rank}, last stride 1", key)
        if value.dim() != rank or value.stride(-1) != 1:
            refuse("value", f"rank {rank}, last stride 1", value)
        if value.shape[:-1] != key.shape[:-1]:
            refuse("value", f"{list(key.shape[:-1])} and Dv", value)
        if query.shape[1] % key.shape[-2]:
            raise InvalidInputError("query", f"a multiple of {key.shape[-2]} heads", query.shape[1])
        if lens.dtype != torch.int32 or lens.dim() != 1 or not lens.is_contiguous():
            refuse("seq_lens", "int32 [B], contiguous", lens)
        count, starts = lens.shape[0], self.query_start_loc
        if starts.dtype != torch.int32 or len(starts) != count + 1 or not starts.is_contiguous():
            refuse("query_start_loc", f"int32 [{count + 1}], contiguous", starts)
        if not 0 <= self.num_decodes <= count:
            raise InvalidInputError("num_decodes", f"in 0..{count}, the number of sequences", self.num_decodes)
        if self.block_table is not None:
            _check_table(self.block_table, count)
            if len(key) == 0 and self.block_table.numel():
                refuse("key", "one block at least", key)
        for name, of_head in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            if of_head is not None and (of_head.shape != query.shape[1:2] or not of_head.is_contiguous()):
                refuse(name, f"[{query.shape[1]}], contiguous", of_head)
        self._check_outputs()
        self._check_planes()

    def _check_outputs(self) -> None:
        query, out, lse, prior = self.query, self.out, self.lse, self.prior
        fits = out.dim() == 3 and out.shape[:2] == query.shape[:2] and out.stride(2) == 1
        if not fits or out.dtype not in (query.dtype, torch.float32):
            refuse("out", "[T, Hq, Dv] in the query's dtype or float32", out)
        if self.accumulate and lse is None:
            raise InvalidInputError("lse", "what `out` has the outputs of, with accumulate=True", "None")
        if lse is not None and (lse.shape != query.shape[:2] or not lse.is_contiguous()):
            refuse("lse", "[T, Hq], contiguous", lse)
        if prior is not None:
            fits = prior.shape == out.shape and prior.dtype == torch.float32 and prior.is_contiguous()
            if not fits:
                refuse("prior", f"float32 {list(out.shape)}, contiguous", prior)

    def _check_planes(self) -> None:
        form, query, out = self.format, self.query, self.out
        if form is NATIVE and not self.key.dtype == self.value.dtype == query.dtype:
            refuse("key and value", f"{query.dtype} as the query, or of another format", self.key)
        for name, rows, dim, codes, scales in (
            ("key", form.key, query.shape[2], self.key, self.k_scale_cache),
            ("value", form.value, out.shape[2], self.value, self.v_scale_cache),
        ):
            planes = rows.planes(dim, query.dtype)
            first = planes[0]
            if codes.dtype != first.dtype or (name == "key" and codes.shape[-1] != first.width):
                refuse(name, f"{first.dtype} [..., {first.width}], as {form.name} stores {dim} elements", codes)
            if codes.shape[-1] != first.width:
                refuse("out", "[T, Hq, Dv] for these values", out)
            check_scales(f"{name[0]}_scale_cache", planes, scales, codes)

    def part(self, first: int, last: int) -> AttentionInputs:
        """The same call for sequences first..last alone; rows of the others are not touched."""
        table = None if self.block_table is None else self.block_table[first:last]
        starts, lens = self.query_start_loc[first : last + 1], self.seq_lens[first:last]
        decodes = min(max(self.num_decodes - first, 0), last - first)
        return self._replace(block_table=table, query_start_loc=starts, seq_lens=lens, num_decodes=decodes)

    def heads(self, first: int, last: int) -> AttentionInputs:
        """The same call for KV heads first..last alone, and the query heads of theirs; of a paged cache."""
        of_query = slice(*(end * (self.query.shape[1] // self.key.shape[2]) for end in (first, last)))
        taken: dict[str, torch.Tensor | None] = {name: getattr(self, name)[:, of_query] for name in ("query", "out")}
        taken["lse"] = None if self.lse is None else self.lse[:, of_query]
        for name in ("sinks", "alibi_slopes"):
            given = getattr(self, name)
            taken[name] = None if given is None else given[of_query]
        for name in ("key", "value", "k_scale_cache", "v_scale_cache"):
            given = getattr(self, name)
            taken[name] = None if given is None else given[:, :, first:last]
        for name in ("k_scale", "v_scale"):
            given = getattr(self, name)
            taken[name] = given if given is None or len(given) == 1 else given[first:last]
        return self._replace(**taken)


def scale_parts(
    name: str, scale: float | torch.Tensor | None, kv_heads: int, device: torch.device
) -> tuple[torch.Tensor | None, float]:
    """A scale as a tensor of [1] or [Hkv] (None where there is none) and a host factor (1.0 where there is none)."""
    if scale is None:
        return None, 1.0
    if not isinstance(scale, torch.Tensor):
        return None, float(scale)
    fits = scale.numel() in (1, kv_heads) and scale.dtype == torch.float32 and scale.device == device
    expect(fits, name, f"float32 with 1 or {kv_heads} elements on {device}", scale)
    return scale.reshape(-1).contiguous(), 1.0


def scale_stride(scale: torch.Tensor | None) -> int:
    """Of a scale [1] or [Hkv], from a KV head to the next."""
    return 0 if scale is None or len(scale) == 1 else 1


def _check_table(table: torch.Tensor, num_seqs: int) -> None:
    fits = table.dtype == torch.int32 and table.dim() == 2 and len(table) == num_seqs
    if not (fits and table.stride(1) == 1):
        refuse("block_table", f"int32 [{num_seqs}, max_blocks]", table)
