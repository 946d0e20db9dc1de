"""What the contenders share: queries, lengths, caches with shuffled tables, and the float64 answer they are held to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from pagedattn import CommonAttentionMetadata, LayerCache, Mask, PagedKVCache
from pagedattn.formats.registry import format_of
from pagedattn.testing import attention_oracle
from pagedattn.testing.stored import bits

from .run import OwnCache
from .table import EXPANDED_DIM, Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_TOTAL_BYTES = 2 << 30 if DEVICE.type == "cuda" else 1 << 22  # all layers together, far beyond L2
# A replay of long prompts would take a second, and a prompt's keys come from L2 anyway: fewer layers, 20 ms or so.
_TOTAL_FLOPS = 1.2e13
_ROUNDING = 1e-6  # relative error that float32 may have, however lucky the naive implementation was
_LAYERS = 32  # at most, in the model's dtype; of formats as many more as make the same bytes, beyond L2 too
_ROWS = 32  # query rows checked at either end of a sequence


class Paged(NamedTuple):
    """The caches of all layers in blocks of one size, and the step's metadata over them."""

    caches: PagedKVCache
    common: CommonAttentionMetadata

    def layer(self, index: int) -> LayerCache:
        """Planes of a layer's keys and values, each [P, S, Hkv, n]."""
        return self.caches.layer(index)


class _Sample(NamedTuple):
    rows: slice  # of the packed queries
    heads: slice  # of the query heads
    want: torch.Tensor  # float64
    naive: torch.Tensor  # the same by a naive implementation in the case's dtype


class LatentHeads(NamedTuple):
    """Up-projections of a latent layer: w_uk [Hq, N, L] and w_uv [Hq, V, L]."""

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Query [Hq, N + R] as [Hq, L + R], float64."""
        nope, rope = query.double().split((self.w_uk.shape[1], query.shape[1] - self.w_uk.shape[1]), -1)
        return torch.cat((torch.einsum("hn,hnl->hl", nope, self.w_uk.double()), rope), -1)

    def values(self, summed: torch.Tensor) -> torch.Tensor:
        """Sums of latent rows [n, Hq, L] as outputs [n, Hq, V], in their dtype."""
        return torch.einsum("thl,hvl->thv", summed, self.w_uv.to(summed.dtype))


@dataclass
class Problem:
    """Random data of one case: queries [layers, T, Hq, D], and caches of the same rows by block size and format, each
    made when it is asked for. `latent_heads`: of a latent layer's case, whose queries are [layers, T, Hq, N + R]."""

    case: Case
    layers: int
    queries: torch.Tensor
    _paged: dict[tuple[int, str], Paged] = field(default_factory=dict)
    _samples: dict[tuple[int, str], list[_Sample]] = field(default_factory=dict)
    _rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    sinks: torch.Tensor | None = None  # [Hq] in the model's dtype
    latent_heads: LatentHeads | None = None

    def paged(self, block_size: int | None = None, kv_cache_dtype: str | None = None) -> Paged:
        """The caches in blocks of `block_size` (the case's) tokens, stored in a format (the case's); sequences' blocks
        lie in random order."""
        key = size, name = block_size or self.case.block_size, kv_cache_dtype or self.case.kv_cache_dtype
        if key not in self._paged:
            rows = _paged(self.case, self.layers, size) if name == "auto" else self.paged(size, "auto")
            self._paged[key] = rows if name == "auto" else _encoded(self.case, rows, name)
        return self._paged[key]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [N, Hkv, D] and [N, Hkv, Dv], packed: those that its cache has, copied once."""
        if layer not in self._rows:
            common, size, cache = self.paged().common, self.case.block_size, self.paged().layer(layer)
            lens = self.case.work.seq_lens
            tables = [common.block_table[i, : -(-n // size)].long() for i, n in enumerate(lens)]
            key, value = (
                torch.cat([plane[t].flatten(0, 1)[:n] for t, n in zip(tables, lens, strict=True)])
                for plane in (cache.key, cache.value)
            )
            self._rows[layer] = key, value
        return self._rows[layer]

    def packed_common(self) -> CommonAttentionMetadata:
        """The step's metadata without a cache."""
        work = self.case.work
        return CommonAttentionMetadata.from_lengths(work.query_lens, work.seq_lens, device=DEVICE)

    def error(
        self,
        out: torch.Tensor,
        block_size: int | None = None,
        kv_cache_dtype: str | None = None,
        tolerance: float = 0.0,
        own_cache: OwnCache | None = None,
    ) -> float:
        """Relative error of layer 0's output [T, Hq, D] against float64, on rows and heads all over the batch: both
        attend to the rows that these caches, or `own_cache`, stand for. Of absorbed latent attention the output is
        [T, Hq, L].

        Raises:
            ArithmeticError: it is more than `tolerance` and than twice that of a naive implementation in the model's
                dtype, or not finite.
        """
        key = block_size or self.case.block_size, kv_cache_dtype or self.case.kv_cache_dtype
        if key not in self._samples:
            paged = self.paged(*key) if own_cache is None else self.paged(key[0], "auto")
            self._samples[key] = _samples(self, paged, own_cache)
        if not bool(torch.isfinite(out).all()):
            raise ArithmeticError("outputs that are not finite")
        worst = 0.0
        for sample in self._samples[key]:
            got = out[sample.rows, sample.heads].double()
            error, allowed = (float((x - sample.want).norm() / sample.want.norm()) for x in (got, sample.naive))
            if not error <= max(2 * allowed, _ROUNDING, tolerance):
                raise ArithmeticError(f"error {error:.2e} where a naive implementation has {allowed:.2e}")
            worst = max(worst, error)
        return worst


def make_problem(case: Case) -> Problem:
    """As many layers as make `_TOTAL_BYTES` of keys and values, between 2 and `_LAYERS`; fewer of long prompts."""
    work, plain, stored = case.work, case.bytes_read("auto"), case.bytes_read(case.kv_cache_dtype)
    by_flops = int(_TOTAL_FLOPS / case.flops)
    layers = max(2, min(_LAYERS * plain // stored, -(-_TOTAL_BYTES // stored), by_flops))
    torch.manual_seed(0)
    shape = (layers, sum(work.query_lens), case.heads, case.query_dim)
    queries = torch.randn(shape, dtype=case.torch_dtype, device=DEVICE)
    sinks = torch.randn(case.heads, dtype=case.torch_dtype, device=DEVICE) if case.sinks else None
    return Problem(case, layers, queries, sinks=sinks, latent_heads=_latent_heads(case) if case.by_layer else None)


def _latent_heads(case: Case) -> LatentHeads:
    """Weights that make keys and values as large as the rows are."""
    shape = (case.heads, EXPANDED_DIM, case.latent)
    options = {"dtype": case.torch_dtype, "device": DEVICE}
    return LatentHeads(*(torch.randn(shape, **options) * case.latent**-0.5 for _ in range(2)))


def _paged(case: Case, layers: int, size: int) -> Paged:
    work, shared = case.work, case.work.shared // size
    counts = [shared, *(-(-keys // size) - shared for keys in work.seq_lens)]
    torch.manual_seed(size)
    caches = PagedKVCache.from_specs([case.cache_spec(size)] * layers, sum(counts) + 1, device=DEVICE)
    caches.slabs.view(case.torch_dtype).normal_()
    prefix, *own = (torch.randperm(sum(counts), dtype=torch.int32) + 1).split(counts)
    table = torch.nn.utils.rnn.pad_sequence([torch.cat((prefix, ids)) for ids in own], batch_first=True).to(DEVICE)
    common = CommonAttentionMetadata.from_lengths(work.query_lens, work.seq_lens, table, block_size=size)
    return Paged(caches, common.replace(shared_prefix_len=shared * size))


def _encoded(case: Case, plain: Paged, kv_cache_dtype: str) -> Paged:
    """The same rows in the same blocks, as a format stores them. Of latent rows those of keys, whose bytes are also
    the values'."""
    form, (blocks, size) = format_of(kv_cache_dtype), plain.layer(0).key.shape[:2]
    # Some blocks of such formats are read as they came: the second cache has all, under the same ids.
    recent_blocks = blocks if form.whole_blocks else None
    specs = [case.cache_spec(size, kv_cache_dtype)] * plain.caches.num_layers
    caches = PagedKVCache.from_specs(specs, blocks, device=DEVICE, recent_blocks=recent_blocks)
    kinds = (form.key,) if case.latent else (form.key, form.value)
    for index in range(caches.num_layers):
        rows = plain.layer(index).key, plain.layer(index).value
        for kind, given, planes in zip(kinds, rows, caches.layer(index).sides, strict=False):
            for plane, encoded in zip(planes, kind.encode(given), strict=True):
                plane.copy_(encoded)
        recent = caches.layer(index).recent
        if recent is not None:
            recent.key.copy_(rows[0])
            recent.value.copy_(rows[1])
    return Paged(caches, plain.common.replace(recent_table=plain.common.block_table if form.whole_blocks else None))


def _samples(problem: Problem, paged: Paged, own_cache: OwnCache | None) -> list[_Sample]:
    """The first and last rows of four sequences, under the first and the last KV head."""
    case = problem.case
    work, last = case.work, len(case.work.seq_lens) - 1
    starts = [0, *torch.tensor(work.query_lens).cumsum(0).tolist()]
    out = []
    for seq, head in itertools.product(sorted({0, last // 3, 2 * last // 3, last}), {0, case.kv_heads - 1}):
        rows = work.query_lens[seq]
        for first, end in {(0, min(rows, _ROWS)), (max(0, rows - _ROWS), rows)}:
            keys = work.seq_lens[seq] - rows + end  # what the last of these rows sees
            here = slice(starts[seq] + first, starts[seq] + end)
            sample = _latent_sample if case.latent else partial(_sample, head=head, own_cache=own_cache)
            out.append(sample(problem, paged, seq, keys, here))
    return out


def _latent_sample(problem: Problem, paged: Paged, seq: int, keys: int, rows: slice) -> _Sample:
    """Under all heads, as these share their keys: heads of a token are rows of one head that all see what it sees."""
    case, cache = problem.case, paged.layer(0)
    table = paged.common.block_table[seq, : -(-keys // cache.block_size)].long()
    stored = [bits(plane)[table].view(plane.dtype) for plane in cache.sides[0]]
    latent_rows = format_of(cache.format or "auto").key.decode(stored, case.dim, torch.float64)
    latent_rows, heads = latent_rows.flatten(0, 1)[:keys], problem.latent_heads  # [keys, 1, L + R]

    def attended(dtype: torch.dtype) -> torch.Tensor:
        every = []
        for token in range(rows.start, rows.stop):
            seen = latent_rows[: keys - (rows.stop - 1 - token)]
            query = problem.queries[0, token] if heads is None else heads.absorb(problem.queries[0, token])
            query = query[:, None]  # [Hq, 1, L + R]
            options = {"scale": case.scale, "mask": Mask(causal=False), "dtype": dtype}
            every.append(attention_oracle(query, seen, seen[..., : case.latent], **options)[0].squeeze(1))
        summed = torch.stack(every)
        return summed if heads is None else heads.values(summed)

    return _Sample(rows, slice(None), attended(torch.float64), attended(case.torch_dtype).double())


def stored_rows(case: Case, cache: LayerCache, table: torch.Tensor, head: int, keys: int) -> list[torch.Tensor]:
    """Keys and values, float64 [keys, 1, D] and [keys, 1, Dv], that the blocks of a table [n] stand for."""
    form = format_of(cache.format or "auto")
    decoded = (
        kind.decode([bits(plane)[table][:, :, [head]].view(plane.dtype) for plane in planes], dim, torch.float64)
        for kind, planes, dim in zip(
            (form.key, form.value), cache.sides, (case.dim, case.dim_v or case.dim), strict=True
        )
    )
    return [x.flatten(0, 1)[:keys] for x in decoded]


def _sample(
    problem: Problem, paged: Paged, seq: int, keys: int, rows: slice, head: int, own_cache: OwnCache | None
) -> _Sample:
    case, cache = problem.case, paged.layer(0)
    group, form = case.heads // case.kv_heads, format_of(cache.format or "auto")
    table = paged.common.block_table[seq, : -(-keys // cache.block_size)].long()
    heads = slice(head * group, (head + 1) * group)
    stored = stored_rows(case, cache, table, head, keys) if own_cache is None else own_cache.rows(seq, head, keys)
    sinks = None if problem.sinks is None else problem.sinks[heads]
    options = {"scale": case.scale, "mask": case.mask, "softcap": case.softcap or None, "sinks": sinks}

    def attended(dtype: torch.dtype) -> torch.Tensor:
        queries = problem.queries[0, rows, heads]
        if cache.recent is None:
            return attention_oracle(queries, *stored, **options, dtype=dtype)[0]
        given, size = [x[table][:, :, [head]].flatten(0, 1)[:keys] for x in cache.recent.planes], cache.block_size
        recent, first = form.recent_blocks(size) or None, form.first_blocks(size) or None
        encoded, every = Mask(causal=True, earlier_blocks=size, recent_blocks=recent, from_block=first), []
        for position, query in enumerate(queries, keys - len(queries)):
            seen = torch.arange(position + 1, device=query.device)
            where = encoded.visible(torch.tensor(position, device=query.device), seen)[:, None, None]
            rows_seen = [torch.where(where, a[: len(seen)], b[: len(seen)]) for a, b in zip(stored, given, strict=True)]
            every.append(attention_oracle(query[None], *rows_seen, **options, dtype=dtype)[0])
        return torch.cat(every)

    return _Sample(rows, heads, attended(torch.float64), attended(case.torch_dtype).double())
