"""Which calls the Hopper prefill kernel serves, and how large the tile schedule and workspace of a step are."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...runtime.workspace import COUNTERS
from ...spec import Mask
from ..hopper import is_aligned
from ..inputs import AttentionInputs
from ..shape import FOUR_BIT_VALUES, INT4, AttentionShape, BatchBounds
from ..tiles import MIN_SPLIT_KEYS

FP8 = ("e4m3", "e5m2")
FOUR_BIT_DIM = 128  # heads whose values of 4 bits it reads
HEAD_DIMS = range(64, 257, 8)
WHOLE_HEAD_DIMS = (64, 128, 256)  # that are read in one part
MASKS = ("sliding_window",)  # what its own masking serves beyond causality
# Over a copy, and codes with scales: blocks not beside a window.
COPY_MASKS = (*MASKS, "earlier_blocks", "recent_blocks", "from_block")
TILE_ROWS = 128  # packed query rows of a tile
FIELDS = 8  # int32 per entry of a schedule; the first's counters hand out tiles, the second says how many there are
SPLIT_FIELDS = 16  # of a schedule of splits, which also lists the blocks whose splits are to be added up
_SCALE_BYTES = 8  # of the int8 key and value of a token and head
CHANNEL_KEYS = 32  # of one block: a format with steps of channels has no smaller ones
_TILES_PER_SM = 4  # at most, for keys to be split: of more tiles all SMs have about as many
_MOST_HEADS = 64  # of a tile, as many as a consumer has rows
_BY_EIGHTS = (3, 5)  # heads of a group of which 16 copies of eight rows have more tokens than 128 padded rows
_FEWEST_KEYS_BY_EIGHTS = 1024  # of a step; of fewer, so many copies of queries take longer than padding
_LARGEST_NOT_BY_EIGHTS = 64  # heads whose tiles take half of the time
_MOST_TOGETHER = 16  # heads, so that eight tiles and more share the keys of each
# Of fewer keys than MIN_SPLIT_KEYS, tiles less for an SM, for splits to be added up in less time.
_FEWEST_TILES_LESS = 3.5
MOST_SPLIT_BLOCKS = 256  # query blocks, which one program of the scheduler looks at all together


class TileSchedulerParams(NamedTuple):
    """What a tile schedule depends on besides a step's lengths. max_keys: as of `BatchBounds`. deterministic: keys are
    never split, since which blocks are depends on the batch."""

    num_kv_heads: int
    group: int
    head_dim: int
    mask: tuple[int, ...]  # `Mask.constants`
    max_keys: int
    num_sms: int
    head_dim_v: int = 0  # 0: head_dim
    deterministic: bool = False
    max_query_len: int = 0  # of the sequences it is for, as `heads_per_tile` takes it
    whole_groups: bool = False  # as it takes them

    @property
    def pack(self) -> int:
        """Query heads of a tile."""
        return heads_per_tile(self.group, self.max_query_len, self.whole_groups)

    @property
    def heads(self) -> int:
        """Packs of query heads: an entry of the schedule is a tile of each."""
        return self.num_kv_heads * -(-self.group // self.pack)

    @property
    def max_partials(self) -> int:
        """Splits that leave a partial (m, l, O), of all heads together, at most."""
        return 2 * self.num_sms

    @property
    def workspace(self) -> int:
        """int32 elements of a workspace for those partials: two halves of each, behind the decode kernel's counters."""
        return 3 * COUNTERS + 2 * self.max_partials * partial_size(self.head_dim_v or self.head_dim)


def params_of(shape: AttentionShape, bounds: BatchBounds, num_sms: int) -> TileSchedulerParams:
    """Of the calls of a plan."""
    heads, longest = (shape.num_kv_heads, shape.group, shape.head_dim), bounds.max_query_len
    # By what all plans of a step know: whether a schedule is another plan's its shape alone says.
    whole_groups = bounds.max_seq_len >= _FEWEST_KEYS_BY_EIGHTS and shape.head_dim > _LARGEST_NOT_BY_EIGHTS
    rest = (bounds.max_keys, num_sms, shape.head_dim_v, shape.deterministic, longest, whole_groups)
    return TileSchedulerParams(*heads, shape.mask, *rest)


@lru_cache(maxsize=1024)
def heads_per_tile(group: int, max_query_len: int = 0, whole_groups: bool = False) -> int:
    """Query heads of a group in one tile: a power of two that divides it, _MOST_HEADS at most, or, where that makes
    fewer tiles of sequences of at most so many new tokens (0: any number), the next one above it, or, with
    whole_groups, the group itself, of 3 and 5 (`tile_rows`): then every tile has all heads of a group, and keys are
    read once."""
    divides, above = min(group & -group, _MOST_HEADS), 1 << (group - 1).bit_length()
    whole = (group,) if whole_groups and group in _BY_EIGHTS else ()
    packs = (divides, *((above,) if above <= _MOST_HEADS else ()), *whole)
    return min(packs, key=lambda pack: -(-group // pack) * -(-max_query_len // tokens_per_tile(pack)))


def by_eights(pack: int) -> bool:
    """Whether eight tokens of a head follow each other in a tile of so many heads (`tile_rows`)."""
    return pack & (pack - 1) != 0


def copied_queries(pack: int) -> tuple[int, int]:
    """Tokens and heads that one copy of queries brings, by eights heads and tokens."""
    return (1, 8) if by_eights(pack) else (TILE_ROWS // 2 // pack, pack)


def value_width(inputs: AttentionInputs) -> int:
    """Elements of a value as kernels have it: a copy is wider than a head, codes of 4 bits are narrower."""
    return max(inputs.value.shape[-1], inputs.out.shape[2])


def whole_tokens(rows: int, pack: int) -> int:
    """Tokens of which a tile's first rows have all heads: as many as come before that of the next row."""
    return rows // 8 // pack * 8 if by_eights(pack) else rows // pack


def tokens_per_tile(pack: int) -> int:
    """Query tokens of a tile of so many heads."""
    return whole_tokens(TILE_ROWS, pack)


def halves_per_tile(pack: int, max_query_len: int) -> int:
    """Of 64 rows each, that tiles of sequences of at most so many new tokens (0: any number) may have rows in."""
    return 1 if 0 < max_query_len <= whole_tokens(TILE_ROWS // 2, pack) else 2


def keys_per_tile(head_dim: int, head_dim_v: int = 0) -> int:
    """Keys that are loaded at once; head_dim_v: 0 is head_dim."""
    parts, parts_v = sum(head_parts(head_dim)), sum(head_parts(head_dim_v or head_dim))
    # Shared memory has room for two stages of 128 keys and of as many values, and for one of queries.
    return 128 if parts <= 192 and parts_v <= 128 else 64


def heads_together(num_kv_heads: int) -> int:
    """KV heads whose tiles are handed out before those of others, 0 for all at once: with as many heads as SMs no two
    tiles that run at one time would share keys, and all would come from memory for each of them."""
    if num_kv_heads <= _MOST_TOGETHER:
        return 0
    return max(n for n in range(1, _MOST_TOGETHER + 1) if num_kv_heads % n == 0)


def partial_size(head_dim_v: int) -> int:
    """Elements of the partial of half a tile: maxima, sums, outputs."""
    return TILE_ROWS // 2 * (sum(head_parts(head_dim_v)) + 2)


def max_query_blocks(params: TileSchedulerParams, bounds: BatchBounds) -> int:
    """Query blocks at most; the query may have padding rows."""
    tokens = min(bounds.num_tokens, bounds.num_seqs * bounds.max_query_len)
    return tokens // tokens_per_tile(params.pack) + bounds.num_seqs


def splits_kv(params: TileSchedulerParams, bounds: BatchBounds) -> bool:
    """Whether tiles may be splits of the keys of a query block: where the blocks are so few that SMs would be idle, and
    their keys so many that it matters. Which are split, the device decides. Beside decodes, where every tile has an SM:
    of more, the longest stay whole, which decodes are."""
    if params.deterministic or not params.max_keys:
        return False
    keys = Mask.of(params.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len)
    per_sm = 1 if bounds.num_decodes else _TILES_PER_SM
    few = min(MOST_SPLIT_BLOCKS, per_sm * params.num_sms // params.heads)
    blocks = max_query_blocks(params, bounds)
    if blocks > few or keys < 4 * bounds.max_query_len:
        return False
    tiles = keys // keys_per_tile(params.head_dim, params.head_dim_v)
    idle = 1 - blocks * params.heads / params.num_sms  # of the SMs, where keys are not split
    return keys >= MIN_SPLIT_KEYS or tiles * idle >= _FEWEST_TILES_LESS


def schedule_shape(params: TileSchedulerParams, bounds: BatchBounds) -> tuple[int, int]:
    """Of a tile schedule: 2 + tiles at most, FIELDS or SPLIT_FIELDS."""
    entries = 2 + max_query_blocks(params, bounds)
    if splits_kv(params, bounds):
        return entries + params.max_partials // params.heads, SPLIT_FIELDS
    return entries, FIELDS


def why_not(shape: AttentionShape, here: str, masks: tuple[str, ...] = MASKS) -> str:
    """Why the kernel does not serve calls of this shape, where `here` is what speaks against the GPU and `masks` are
    served, over codes with scales COPY_MASKS; "" where it does."""
    if here:
        return here
    native = shape.stored_dtype == shape.dtype and shape.dtype in (torch.bfloat16, torch.float16)
    scaled = shape.codes in (("int8", "int8"), *FOUR_BIT_VALUES)
    codes = (scaled or {*shape.codes} <= {*FP8}) and shape.dtype in (torch.bfloat16, torch.float16)
    if not (native or (shape.paged and codes)):
        return f"queries of {shape.dtype} over a cache of {shape.stored_dtype}"
    if reason := _why_not_dims(shape, native):
        return reason
    size = shape.block_size
    if size is not None and (size < 16 or size & (size - 1)):
        return f"blocks of {size}, not of a power of two from 16 on"
    if shape.codes in FOUR_BIT_VALUES and shape.head_dim != FOUR_BIT_DIM:
        return f"heads of {shape.head_dim} with values of 4 bits, served: {FOUR_BIT_DIM}"
    if shape.codes == INT4 and size is not None and size < CHANNEL_KEYS:
        return f"blocks of {size} with steps of channels, served: {CHANNEL_KEYS} and more"
    if scaled and size is not None and size * _SCALE_BYTES % shape.head_dim:
        return f"blocks of {size}, whose scales a cache has in between, so that the next one begins within a slot"
    if unserved := Mask.of(shape.mask).unserved(COPY_MASKS if scaled else masks):
        return f"masks with {', '.join(unserved)}"
    if reason := _why_not_blocks(Mask.of(shape.mask)):
        return reason
    return "ALiBi" if shape.alibi else ""


def why_not_copied(native: AttentionShape, here: str) -> str:
    """Why the kernel over a copy of a quantised cache does not serve calls of this shape, that of the copy. Only long
    chunks are worth one, and a deterministic row must not depend on its chunk."""
    return "deterministic" if native.deterministic else why_not(native, here, COPY_MASKS)


def _why_not_blocks(mask: Mask) -> str:
    beside = mask.earlier_blocks and (mask.sliding_window or not mask.causal)
    return "masks with earlier_blocks and a window, or not causal" if beside else ""


def _why_not_dims(shape: AttentionShape, native: bool) -> str:
    dim, dim_v = shape.head_dim, shape.head_dim_v
    if not native:
        dims = ", ".join(map(str, WHOLE_HEAD_DIMS))
        return "" if _is_whole(dim, dim_v) else f"head dims {dim} and {dim_v}, not {dims}"
    if not (dim in HEAD_DIMS and dim_v in HEAD_DIMS):
        return f"head dims {dim} and {dim_v}, not multiples of 8 from 64 to 256"
    (first, more), (first_v, more_v) = head_parts(dim), head_parts(dim_v)
    # Outputs leave by way of the queries' tile.
    alike = first == first_v and more_v in (0, more)
    return "" if alike else f"head dims {dim} and {dim_v}, which are not read in like parts"


def _is_whole(dim: int, dim_v: int) -> bool:
    """Whether heads are read in one part, keys as values."""
    return dim in WHOLE_HEAD_DIMS and dim_v == dim


def head_parts(dim: int) -> tuple[int, int]:
    """Two powers of two that a head of `dim` elements is read in, the second one 0 where one is enough. Elements beyond
    `dim` are read as 0."""
    first = 1 << (dim.bit_length() - 1)
    return first, max(16, 1 << (dim - first - 1).bit_length()) if dim > first else 0


def module_of(shape: AttentionShape) -> str:
    """Which module's kernel serves calls of a shape that is served."""
    code = shape.codes[0]
    if code is None:
        return "kernel" if _is_whole(shape.head_dim, shape.head_dim_v) else "parts_kernel"
    return "codes_kernel"


def converts_keys(codes: str | None, dtype: torch.dtype) -> bool:
    """Whether keys become float16 as values do: int8, int4, and fp8 under queries that no two e4m3 stand for."""
    return codes in ("int8", "int4_per_channel") or (codes in FP8 and dtype != torch.bfloat16)


def why_not_tensors(inputs: AttentionInputs) -> str:
    """Why the kernel does not serve these tensors, whose shape it serves; "" where it does."""
    _, key, value, _ = inputs[:4]
    if reason := why_not_queries(inputs):
        return reason
    by_slots = _is_whole(inputs.query.shape[2], inputs.out.shape[2])
    caches = (in_blocks(key), in_blocks(value))
    fit = all(is_aligned(rows) and (not by_slots or _is_matrix(rows)) for rows in caches)
    if not fit:
        return "strides that TMA cannot follow"
    channels = inputs.k_scale_cache if inputs.format.key.codes == INT4[0] else None
    return "" if channels is None or is_aligned(channels) else "steps of channels that do not begin at 16 bytes"


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """A cache as it is; packed keys or values [N, H, D] as one block of N slots."""
    return rows if rows.dim() == 4 else rows.unsqueeze(0)


def why_not_queries(inputs: AttentionInputs) -> str:
    """The same, over a copy of the cache."""
    query, key, _, table = inputs[:4]
    if (table is not None and not table.shape[1]) or not len(key) or inputs.scale <= 0:
        return "no keys, or a scale that is not positive"
    has_scales = inputs.k_scale is not None or inputs.v_scale is not None or inputs.out_scale != 1.0
    if has_scales and not inputs.format.takes_scales:
        return "scales of a cache that is not fp8"
    return "" if is_aligned(query) else "strides that TMA cannot follow"


def has_vectors(*planes: torch.Tensor | None) -> bool:
    """Whether scales [P, S, Hkv, 1] of a head's slots lie one after the other, and begin at multiples of 16 bytes."""
    return all(plane is None or _has_vectors(plane) for plane in planes)


def _has_vectors(plane: torch.Tensor) -> bool:
    steps = (plane.stride(0), plane.stride(2)) if plane.shape[2] > 1 else (plane.stride(0),)
    whole = not any(step * plane.element_size() % 16 for step in steps)
    return plane.stride(1) == 1 and whole and plane.data_ptr() % 16 == 0


def _is_matrix(cache: torch.Tensor) -> bool:
    """Whether a cache [P, S, H, D] is a matrix of slots: blocks a whole number of slots apart, and heads either so too
    or beside each other within a slot; with rows that int32 can count."""
    blocks, size, heads, dim = cache.shape
    per_block, per_slot, per_head, _ = cache.stride()
    if per_slot < dim or per_block % per_slot or (blocks * per_block) // per_slot + heads * size >= 1 << 31:
        return False
    within = (heads - 1) * per_head + dim <= per_slot
    return heads == 1 or within or (per_head >= per_slot and per_head % per_slot == 0)
