"""What the contenders share: queries, lengths, caches with shuffled tables, and the float64 answer they are held to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pagedattn import CommonAttentionMetadata, LayerCache, PagedKVCache
from pagedattn.testing import attention_oracle

from .table import Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_TOTAL_BYTES = 2 << 30 if DEVICE.type == "cuda" else 1 << 22  # all layers together, far beyond L2
# A replay of long prompts would take a second, and a prompt's keys come from L2 anyway: fewer layers, 20 ms or so.
_TOTAL_FLOPS = 1.2e13
_ROUNDING = 1e-6  # relative error that float32 may have, however lucky the naive implementation was
_ROWS = 32  # query rows checked at either end of a sequence


class Paged(NamedTuple):
    """The caches of all layers in blocks of one size, and the step's metadata over them."""

    caches: PagedKVCache
    common: CommonAttentionMetadata

    def layer(self, index: int) -> LayerCache:
        """Keys and values of a layer, each [P, S, Hkv, D]."""
        return self.caches.layer(index)


class _Sample(NamedTuple):
    rows: slice  # of the packed queries
    heads: slice  # of the query heads
    want: torch.Tensor  # float64
    naive: torch.Tensor  # the same by a naive implementation in the case's dtype


@dataclass
class Problem:
    """Random data of one case: queries [layers, T, Hq, D], and caches by block size, each made when it is asked for."""

    case: Case
    layers: int
    queries: torch.Tensor
    _paged: dict[int, Paged] = field(default_factory=dict)
    _samples: dict[int, list[_Sample]] = field(default_factory=dict)

    def paged(self, block_size: int | None = None) -> Paged:
        """The caches in blocks of `block_size` (the case's) tokens; sequences' blocks lie in random order."""
        size = block_size or self.case.block_size
        if size not in self._paged:
            self._paged[size] = _paged(self.case, self.layers, size)
        return self._paged[size]

    def error(self, out: torch.Tensor, block_size: int | None = None) -> float:
        """Relative error of layer 0's output [T, Hq, D] against float64, on rows and heads all over the batch.

        Raises:
            ArithmeticError: it is more than twice that of a naive implementation in the same dtype, or not finite.
        """
        size = block_size or self.case.block_size
        if size not in self._samples:
            self._samples[size] = _samples(self.case, self.queries[0], self.paged(size))
        if not bool(torch.isfinite(out).all()):
            raise ArithmeticError("outputs that are not finite")
        worst = 0.0
        for sample in self._samples[size]:
            got = out[sample.rows, sample.heads].double()
            error, allowed = (float((x - sample.want).norm() / sample.want.norm()) for x in (got, sample.naive))
            if not error <= max(2 * allowed, _ROUNDING):
                raise ArithmeticError(f"error {error:.2e} where a naive implementation has {allowed:.2e}")
            worst = max(worst, error)
        return worst


def make_problem(case: Case) -> Problem:
    """As many layers as make `_TOTAL_BYTES` of keys and values, between 2 and 32; fewer of long prompts."""
    work = case.work
    by_bytes = -(-_TOTAL_BYTES // work.bytes_read(case.kv_heads, case.dim, case.torch_dtype.itemsize))
    by_flops = int(_TOTAL_FLOPS / work.flops(case.heads, case.dim))
    layers = max(2, min(32, by_bytes, by_flops))
    torch.manual_seed(0)
    shape = (layers, sum(work.query_lens), case.heads, case.dim)
    return Problem(case, layers, torch.randn(shape, dtype=case.torch_dtype, device=DEVICE))


def _paged(case: Case, layers: int, size: int) -> Paged:
    work, shared = case.work, case.work.shared // size
    counts = [shared, *(-(-keys // size) - shared for keys in work.seq_lens)]
    torch.manual_seed(size)
    shape = (layers, sum(counts) + 1, size, case.kv_heads, case.dim)
    caches = PagedKVCache(*shape, dtype=case.torch_dtype, device=DEVICE)
    caches.slabs.view(case.torch_dtype).normal_()
    prefix, *own = (torch.randperm(sum(counts), dtype=torch.int32) + 1).split(counts)
    table = torch.nn.utils.rnn.pad_sequence([torch.cat((prefix, ids)) for ids in own], batch_first=True).to(DEVICE)
    common = CommonAttentionMetadata.from_lengths(work.query_lens, work.seq_lens, table, block_size=size)
    return Paged(caches, common.replace(shared_prefix_len=shared * size))


def _samples(case: Case, queries: torch.Tensor, paged: Paged) -> list[_Sample]:
    """The first and last rows of four sequences, under the first and the last KV head."""
    work, last = case.work, len(case.work.seq_lens) - 1
    starts = [0, *torch.tensor(work.query_lens).cumsum(0).tolist()]
    out = []
    for seq, head in itertools.product(sorted({0, last // 3, 2 * last // 3, last}), {0, case.kv_heads - 1}):
        rows = work.query_lens[seq]
        for first, end in {(0, min(rows, _ROWS)), (max(0, rows - _ROWS), rows)}:
            keys = work.seq_lens[seq] - rows + end  # what the last of these rows sees
            here = slice(starts[seq] + first, starts[seq] + end)
            out.append(_sample(case, queries, paged, seq, keys, here, head))
    return out


def _sample(case: Case, queries: torch.Tensor, paged: Paged, seq: int, keys: int, rows: slice, head: int) -> _Sample:
    cache, group = paged.layer(0), case.heads // case.kv_heads
    table = paged.common.block_table[seq, : -(-keys // cache.block_size)].long()
    key, value = (x[table, :, head].flatten(0, 1)[:keys, None] for x in (cache.key, cache.value))
    heads = slice(head * group, (head + 1) * group)
    data, scale = (queries[rows, heads], key, value), case.dim**-0.5
    want, _ = attention_oracle(*data, scale=scale)
    naive, _ = attention_oracle(*data, scale=scale, dtype=case.torch_dtype)
    return _Sample(rows, heads, want, naive.double())
