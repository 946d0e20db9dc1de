"""Problems: a case (values only) becomes tensors in a shuffled, poisoned cache, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends.base import AttentionBackend
from ..backends.hybrid import make_builder, make_impl
from ..call import AttentionCall, lse_dtype
from ..formats.base import LayerCache
from ..formats.registry import format_of
from ..spec import AttentionSpec
from ..step.metadata import CommonAttentionMetadata
from .case import Case
from .oracle import attention_oracle, fp8_oracle, logit_condition
from .recent import blocks_before, by_own_block, recent_cache, sealed_after
from .stored import StoredRows, bits, latent_cache, layer_cache, stored_as, unused_element, unused_planes

# Seed of the case's tensors; fixed, so that a failure can be run again.
_SEED = 20260
# Of the largest LSE: above it, a row of two nearly equal logits is decided by how those were rounded.
_HUGE = 100.0


@dataclass(slots=True)
class Problem:
    """Tensors of a case, the answer, and what the cache must look like afterwards.

    `condition` is `logit_condition` [T, Hq, Dv], where logits, or sums of two caches, are inexact enough to need it.
    `fp8`, `fp8_lse`: what `fp8_oracle` gives over an fp8 cache, for backends that round queries.
    """

    case: Case
    spec: AttentionSpec
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    cache: LayerCache | None
    common: CommonAttentionMetadata
    expected: torch.Tensor
    expected_lse: torch.Tensor
    naive: torch.Tensor
    stored: tuple[StoredRows, StoredRows]  # of K and V
    condition: torch.Tensor | None = None
    fp8: torch.Tensor | None = None
    fp8_lse: torch.Tensor | None = None
    cache_after: LayerCache | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def run(self, backend: type[AttentionBackend]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write (where there is a cache and something to write), then attend, by `backend`."""
        impl = make_impl(backend, backend, self.spec)
        k_scale, v_scale = (side.scale for side in self.stored)
        metadata = make_builder(backend, backend, self.spec, self.query.device).build(self.common)
        if self.cache is not None and self.key is not None and self.case.write:
            impl.write_kv(self.key, self.value, self.cache, metadata.common.slot_mapping, k_scale, v_scale)
            impl.seal(self.cache, metadata)
        device, shape = self.query.device, self.query.shape[:2]
        out = torch.full((*shape, self.spec.value_dim), torch.nan, dtype=self.case.dtype).to(device)
        lse = torch.full(shape, torch.nan, dtype=lse_dtype(self.case.dtype)).to(device) if self.case.lse else None
        extras = (self.sinks, self.alibi_slopes, k_scale, v_scale)
        call = AttentionCall(self.query, self.cache, self.key, self.value, out, lse, *extras)
        return impl.forward(call, metadata), lse


def make_problem(
    case: Case, device: torch.device | str = "cpu", seed: int = 0, oracle_on: torch.device | str | None = None
) -> Problem:
    """Random tensors for `case`: shuffled blocks, unused slots poisoned, garbage in the table's tail.

    The oracle computes on `oracle_on`; where None, on the device for 16 bits (much faster there) and on the CPU for
    float32, which a GPU sums in another order.
    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(_SEED + seed)
    spec = case.spec(device)
    (heads, kv_heads), dim, dim_v = case.heads, case.head_dim, spec.value_dim

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * case.magnitude).to(case.dtype)

    total = sum(case.query_lens)
    queries = normal(total, heads, dim).split(case.query_lens)
    keys = [normal(n, kv_heads, dim) for n in case.seq_lens]
    latent = case.latent_dim is not None  # values are a part of the keys
    values = [rows[..., :dim_v] if latent else normal(len(rows), kv_heads, dim_v) for rows in keys]
    sinks = None if case.sinks is None else torch.full((heads,), case.sinks) + torch.randn(heads, generator=generator)
    slopes = 2.0 ** -(torch.arange(heads) + 1.0) if case.alibi else None
    stored = stored_as(case)
    cache, table = _paged(case, stored, keys, values, generator) if case.paged else (None, None)
    common = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, table, block_size=case.block_size, device="cpu"
    ).replace(shared_prefix_len=case.shared_prefix)
    if spec.has_recent and cache is not None:
        recent, recent_table = recent_cache(case, keys, values, generator)
        cache, common = replace(cache, recent=recent), common.replace(recent_table=recent_table)
    where = oracle_on or (device if case.dtype.itemsize == 2 else "cpu")
    rows, extras = (queries, keys, values), [None if x is None else x.to(where) for x in (sinks, slopes)]
    expected, lse, naive, condition, *fp8 = _answer_all(case, spec, stored, rows, extras, where)
    (new_key, new_value), after = _given(case, keys, values), None
    if cache is not None:
        after = _written(case, stored, cache, common.slot_mapping, new_key, new_value)
        if latent:
            cache, after, new_value = latent_cache(cache), latent_cache(after), None
        elif cache.recent is not None:
            after = _written_recent(case, cache, common, keys, values, (new_key, new_value))
    parts = _strided(case, torch.cat(queries), new_key, new_value)
    facts = {"expected": expected, "expected_lse": lse, "naive": naive, "stored": stored}
    facts |= {"condition": condition if condition.any() else None, **dict(zip(("fp8", "fp8_lse"), fp8, strict=False))}
    facts |= {"cache_after": after, "sinks": sinks, "alibi_slopes": slopes}
    problem = Problem(case, spec, *parts, cache=None, common=common, **facts)
    _move(problem, cache, device)
    return problem


def _paged(
    case: Case,
    stored: tuple[StoredRows, StoredRows],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    generator: torch.Generator,
) -> tuple[LayerCache, torch.Tensor]:
    """A poisoned cache with every sequence's earlier rows in place, and the table with a garbage tail."""
    size = case.block_size
    blocks = [-(-n // size) for n in case.seq_lens]
    spare = 3
    # Block 0 belongs to no sequence: what is masked is read from there, and its poison must not get out.
    ids = 1 + torch.randperm(sum(blocks) + spare - 1, generator=generator).to(torch.int32)
    garbage = torch.tensor([2**31 - 1, -1, -(2**31)], dtype=torch.int32)
    table = garbage[torch.randint(0, 3, (len(blocks), max(blocks, default=0) + 2), generator=generator)]
    sides = [
        (side, rows, unused_planes(side.rows.planes(rows[0].shape[2], case.dtype), sum(blocks) + spare, case))
        for side, rows in zip(stored, (keys, values), strict=True)
    ]
    start = 0
    for row, count in enumerate(blocks):
        table[row, :count] = ids[start : start + count]
        start += count
    if case.share_blocks:
        _share_block(case, keys, values, table)
    for row, length in enumerate(case.seq_lens):
        if row and length:
            _share(case.shared_prefix, size, 0, row, keys, values, table)
    for row in range(len(keys)):
        old = _stored(case, row)
        held = table[row, : -(-old // size)].long()
        for side, rows, planes in sides:
            for plane, blocks_of_row in zip(
                planes, side.blocks(rows[row][:old], size, _sealed(case, row)), strict=True
            ):
                _place(plane, blocks_of_row, held, old)
                if case.poison_behind:  # released blocks, somebody else's by now
                    mask = case.spec(table.device).mask
                    behind = mask.first_needed_block(case.seq_lens[row] - case.query_lens[row], size)
                    plane[table[row, :behind].long()] = unused_element(plane.dtype, case)
    (_, _, key_planes), (_, _, value_planes) = sides
    return layer_cache(key_planes, value_planes, case.kv_cache_dtype), table


def _read(case: Case, side: StoredRows, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """What attention sees of each sequence's keys, or values."""
    if not case.paged:
        return rows
    return [side.read(one, case.block_size, _sealed(case, row)) for row, one in enumerate(rows)]


def _old(case: Case, row: int) -> int:
    """Tokens of a sequence that were there before the step."""
    return max(case.seq_lens[row] - (case.query_lens[row] if case.write else 0), 0)


def _stored(case: Case, row: int) -> int:
    """Those that the cache has: of a format with a window, none of recent blocks."""
    recent = blocks_before(case)
    return max((_old(case, row) // case.block_size - recent) * case.block_size, 0) if recent else _old(case, row)


def _sealed(case: Case, row: int) -> int:
    """Its blocks that were full before the step."""
    return _old(case, row) // case.block_size


def _place(plane: torch.Tensor, blocks: torch.Tensor, held: torch.Tensor, length: int) -> None:
    """Put a sequence's blocks [n, S or 1, Hkv, width] in place, but for slots of the last one that hold no token."""
    full = length // blocks.shape[1] if blocks.shape[1] > 1 else len(blocks)
    bits(plane)[held[:full]] = bits(blocks)[:full]
    if full < len(blocks):
        rest = length - full * blocks.shape[1]
        bits(plane)[held[full], :rest] = bits(blocks)[full, :rest]


def _share_block(case: Case, keys: list[torch.Tensor], values: list[torch.Tensor], table: torch.Tensor) -> None:
    """Sequences whose context is long enough take sequence 1's first block, contents and id."""
    size = case.block_size
    for row in range(2, len(keys)):
        if case.seq_lens[row] - case.query_lens[row] >= size <= case.seq_lens[1] - case.query_lens[1]:
            _share(size, size, 1, row, keys, values, table)


def _share(
    length: int,
    size: int,
    source: int,
    row: int,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    table: torch.Tensor,
) -> None:
    """A row's first `length` tokens, whole blocks, become those of another."""
    keys[row][:length], values[row][:length] = keys[source][:length], values[source][:length]
    table[row, : length // size] = table[source, : length // size]


def _answers(
    case: Case,
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Output, LSE, the naive output, and the condition: zeros where it is not needed; then `fp8` and `fp8_lse`, where
    the cache is of fp8."""
    options: dict[str, Any] = {
        "scale": spec.softmax_scale,
        "mask": spec.mask,
        "softcap": spec.softcap,
        "alibi_slopes": slopes,
    }
    out, lse = attention_oracle(q, k, v, sinks=sinks, **options)
    naive, _ = attention_oracle(q, k, v, sinks=sinks, dtype=case.dtype, **options)
    # Logits of latent rows are sums of several hundred products, as inexact in float32 as huge ones. What two caches
    # have is weighted by the LSE of each, as inexact as a logit.
    parts = case.paged and format_of(case.kv_cache_dtype).whole_blocks
    inexact = parts or case.latent_dim is not None or bool((lse[lse.isfinite()].abs() > _HUGE).any())
    needed = case.dtype.itemsize > 2 and inexact
    condition = logit_condition(q, k, v, out, lse, **options) if needed else torch.zeros_like(out)
    rounded = case.paged and case.kv_cache_dtype.startswith("fp8") and sinks is None
    return out, lse, naive, condition, *(fp8_oracle(q, k, v, **options) if rounded else ())


def _answer_all(
    case: Case,
    spec: AttentionSpec,
    stored: tuple[StoredRows, StoredRows],
    rows: tuple[Sequence[torch.Tensor], list[torch.Tensor], list[torch.Tensor]],
    extras: Sequence[torch.Tensor | None],
    where: torch.device | str,
) -> list[torch.Tensor]:
    """What `_answers` gives for all sequences' queries, keys and values, packed."""
    queries, *came_in = [[x.to(where) for x in one] for one in rows]
    read = [_read(case, side.to(where), one) for side, one in zip(stored, came_in, strict=True)]
    answers = []
    for q, k, v, *came in zip(queries, *read, *came_in, strict=True):
        runs = by_own_block(case, q, (k, v), came) if spec.has_recent and case.paged else [(q, k, v)]
        answers += [_answers(case, spec, *run, *extras) for run in runs]
    return [torch.cat(parts) for parts in zip(*answers, strict=True)]


def _given(
    case: Case, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The rows a layer is handed: new ones with a cache, all of them without, none where nothing is written."""
    if not case.paged:
        return torch.cat(keys), torch.cat(values)
    if not case.write:
        return None, None
    new = [_last(rows, n) for rows, n in zip(keys, case.query_lens, strict=True)]
    new_v = [_last(rows, n) for rows, n in zip(values, case.query_lens, strict=True)]
    return torch.cat(new), torch.cat(new_v)


def _last(rows: torch.Tensor, n: int) -> torch.Tensor:
    """The last n, after NaN for the positions before a sequence's first: those have no slot."""
    missing = max(n - len(rows), 0)
    return torch.cat((rows.new_full((missing, *rows.shape[1:]), torch.nan), rows[max(len(rows) - n, 0) :]))


def _written(
    case: Case,
    stored: tuple[StoredRows, StoredRows],
    cache: LayerCache,
    slots: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> LayerCache:
    """The cache after the step's rows were written."""
    sides = []
    for side, rows, planes in (
        (stored[0], key, (cache.key, cache.key_scale)),
        (stored[1], value, (cache.value, cache.value_scale)),
    ):
        copies = [plane.clone() for plane in planes if plane is not None]
        sides.append(copies)
        if rows is None or side.whole_blocks:
            continue
        written = slots >= 0
        slot = slots[written].long()
        block, offset = slot // case.block_size, slot % case.block_size
        for plane, new in zip(copies, side.blocks(rows, 1, 0), strict=True):
            bits(plane)[block, offset if plane.shape[1] > 1 else 0] = bits(new)[written, 0]
    return layer_cache(sides[0], sides[1], case.kv_cache_dtype)


def _written_recent(
    case: Case,
    cache: LayerCache,
    common: CommonAttentionMetadata,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    new: tuple[torch.Tensor | None, torch.Tensor | None],
) -> LayerCache:
    """Both caches after the step: new rows in the second one, and the blocks that they fill encoded."""
    table, native = common.recent_table, case.but(kv_cache_dtype="auto")
    if cache.recent is None or table is None:
        raise ValueError("this cache has no second one")
    slots = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, table, block_size=case.block_size, device="cpu"
    ).slot_mapping
    recent = _written(native, stored_as(native), cache.recent, slots, *new)
    return replace(sealed_after(case, cache, common.block_table, keys, values), recent=recent)


def _strided(
    case: Case, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """With padding rows appended (NaN), and as slices of one fused QKV where the case says so."""
    pad = case.padding_rows
    parts = [query, *([] if key is None else [key]), *([] if value is None else [value])]
    if pad:
        parts = [torch.cat((x, torch.full((pad, *x.shape[1:]), torch.nan, dtype=x.dtype))) for x in parts]
    if case.fused_qkv and key is not None and len(key) == len(query):
        fused = torch.cat([x.flatten(1) for x in parts], 1)
        widths = [x.shape[1] * x.shape[2] for x in parts]
        pieces = fused.split(widths, 1)
        parts = [piece.unflatten(1, x.shape[1:]) for piece, x in zip(pieces, parts, strict=True)]
    filled = [*parts, None, None][:3]
    first = filled[0] if filled[0] is not None else query
    return first, filled[1], filled[2]


def _move(problem: Problem, cache: LayerCache | None, device: torch.device) -> None:
    """Everything but what the cache must hold afterwards goes to `device`."""

    case = problem.case

    def place(x: torch.Tensor, by_head: bool = case.layout == "HND") -> torch.Tensor:
        x = x.to(device)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if by_head else x

    results = ("expected", "expected_lse", "naive", "condition", "fp8", "fp8_lse")
    for name in ("query", "key", "value", *results, "sinks", "alibi_slopes"):
        tensor = getattr(problem, name)
        setattr(problem, name, None if tensor is None else tensor.to(device))
    if cache is not None:
        scales = (cache.key_scale, cache.value_scale)
        k_scale, v_scale = (None if x is None else place(x, not case.scales_by_slot) for x in scales)
        recent = cache.recent
        if recent is not None:
            recent = LayerCache(place(recent.key), place(recent.value), format=recent.format)
        problem.cache = LayerCache(place(cache.key), place(cache.value), k_scale, v_scale, cache.format, recent)
        if case.latent_dim is not None:
            problem.cache = latent_cache(problem.cache)
    problem.stored = problem.stored[0].to(device), problem.stored[1].to(device)
    names = ["query_start_loc", "seq_lens", "block_table", "slot_mapping"]
    names += [] if problem.common.recent_table is None else ["recent_table"]
    problem.common = problem.common.replace(**{name: getattr(problem.common, name).to(device) for name in names})
