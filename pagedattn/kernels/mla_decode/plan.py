"""What the MLA decode kernels serve, and their launch configuration: pure functions of shapes, bounds and target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ...runtime.target import Target, target_of
from ...runtime.workspace import COUNTERS, new_workspace
from ...spec import Mask
from .. import hopper as gpu
from ..shape import AttentionShape, BatchBounds
from ..tiles import next_power_of_2

MAX_LATENT_DIM = 512  # the output of a query block stays in registers
MAX_ROPE_DIM = 128
MAX_ROWS = 64  # packed rows (tokens x heads) of a query block
_CODES = (torch.float8_e4m3fn, torch.uint8)  # rows of e4m3, and of `fp8_ds_mla`
_MAX_ROWS_OF_CODES = 32  # a tile that is converted takes registers too
HOPPER_DIMS = (512, 64)  # latent and rotated
HOPPER_KEYS = 64  # of a tile of the kernels for Hopper
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the kernels for Hopper, where all items have at most so many keys, by measurement: more would leave partial states,
# 2 KB a row to be written and read again, that take longer than is saved by each having fewer keys.
HOPPER_MOST_PROGRAMS = ((1 << 14, 64), (1 << 15, 96), (1 << 16, 128))
# Programs of an item that add up its states themselves, by measurement, on Hopper over rows of codes: of more of them
# each level takes longer than a second launch, and over other rows registers of the loop over keys would be spilled.
_FEW_SHARING = 2
_SPLIT_FIELDS = 3  # int32 elements for each token and part: first program, last program, first row


class MLADecodeTuning(NamedTuple):
    """What is chosen by measurement: keys per tile, warps, pipeline stages, programs per SM; tile_overhead: tiles that
    an item counts for beyond its keys'."""

    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    tile_overhead: int = 1


class MLADecodeMerge(NamedTuple):
    """What a thread block of the second launch adds up: `dims` elements of the states of `heads` heads of a token, one
    head after the other, `unroll` states at a time."""

    unroll: int
    dims: int
    heads: int


class MLADecodePlaces(NamedTuple):
    """Of a workspace: which programs share a token's keys, for the second launch; partial states; and counters, by
    which programs say that they have left one, for the launch in which they are added up."""

    splits: torch.Tensor | None
    states: torch.Tensor | None
    flags: torch.Tensor | None


class MLADecodeConfig(NamedTuple):
    """A launch of `programs` programs, `parts` of them over each range of keys, one for each group of `heads` heads.

    block_m: rows of a query block, of which tokens x heads are in use. max_tokens: query tokens at most. merge: of the
    second launch, which adds up partial states; None where the programs that share an item do so themselves.
    """

    block_m: int
    heads: int
    parts: int
    programs: int
    state: int  # float32 elements of a partial state
    max_tokens: int
    supports_pdl: bool
    tuning: MLADecodeTuning
    merge: MLADecodeMerge | None

    @property
    def splits_keys(self) -> bool:
        """Whether programs may share an item, whose partial states are added up."""
        return self.programs > self.parts

    @property
    def workspace(self) -> int:
        """int32 elements: counters, zero between launches, which programs share a token's keys, and two places for
        partial states per program."""
        if not self.splits_keys:
            return 0
        return self.states_at + 2 * self.programs * self.state

    @property
    def splits_at(self) -> int:
        """Where in the workspace it stands which programs share a token's keys, [max_tokens, parts, 3]."""
        return 3 * COUNTERS

    @property
    def states_at(self) -> int:
        """Where in the workspace partial states begin, at 16 bytes."""
        return self.splits_at + -(-_SPLIT_FIELDS * self.max_tokens * self.parts // 4) * 4

    def places(self, workspace: torch.Tensor | None) -> MLADecodePlaces:
        """The parts of a workspace, None of those that are not in use."""
        if workspace is None or not self.splits_keys:
            return MLADecodePlaces(None, None, None)
        states = workspace[self.states_at :]
        if self.merge is None:
            return MLADecodePlaces(None, states, workspace[: self.splits_at])
        return MLADecodePlaces(workspace[self.splits_at : self.states_at], states, None)


HOPPER_TUNING = MLADecodeTuning(block_n=HOPPER_KEYS, num_warps=4, num_stages=2, per_sm=1)


@dataclass(slots=True, eq=False)
class MLADecodePlan:
    """The launches of a step: calls that share a plan must not run at the same time, as they share the workspace. Those
    that do may wait for each other's states for ever.

    module: the file of this folder whose `launch` serves it.
    """

    shape: AttentionShape
    num_seqs: int
    config: MLADecodeConfig
    module: str = "kernel"
    workspace: torch.Tensor | None = None

    def serves(self, shape: AttentionShape, num_seqs: int, rows: torch.Tensor) -> bool:
        """Whether a call of this shape, of so many sequences over this cache, can be made by this plan."""
        fits = self.shape.covers(shape) and self.num_seqs == num_seqs
        return fits and (self.module == "kernel" or can_load(rows))

    def take_workspace(self, workspace: torch.Tensor | None, device: torch.device) -> None:
        """Use this workspace, or a new one where it is too small or None."""
        need = self.config.workspace
        if need and (workspace is None or workspace.numel() < need):
            workspace = new_workspace(need, device)
        self.workspace = workspace

    def describe(self) -> str:
        """Which kernel runs, by how many programs."""
        config = self.config
        tiles = f"{config.programs} programs, tiles of {config.block_m} rows and {config.tuning.block_n} keys"
        where = "" if self.module == "kernel" else " for Hopper"
        adds = "" if config.merge or not config.splits_keys else ", which add up shared states themselves"
        return f"MLA decode kernel{where}: {self.num_seqs} sequences ({tiles}{adds})"


def why_not(shape: AttentionShape) -> str:
    """What the Triton kernels want of a call's tensors, where these are otherwise; "" where they serve."""
    if shape.dtype not in _DTYPES or shape.stored_dtype not in (shape.dtype, *_CODES):
        return "float32, float16 or bfloat16 queries, and rows of their dtype or of e4m3"
    if shape.head_dim_v > MAX_LATENT_DIM:
        return f"latent parts of at most {MAX_LATENT_DIM} elements"
    if shape.head_dim - shape.head_dim_v > MAX_ROPE_DIM:
        return f"rotated parts of at most {MAX_ROPE_DIM} elements"
    return ""


def why_not_hopper(shape: AttentionShape, here: str) -> str:
    """Why the kernel for Hopper does not serve calls of this shape, where `here` is what speaks against the GPU; ""
    where it does."""
    if here:
        return here
    if shape.dtype.itemsize != 2 or shape.stored_dtype not in (shape.dtype, *_CODES):
        return f"rows of {shape.stored_dtype}"
    if (shape.head_dim_v, shape.head_dim - shape.head_dim_v) != HOPPER_DIMS:
        return f"rows that are not {HOPPER_DIMS[0]} + {HOPPER_DIMS[1]} elements"
    size = shape.block_size
    if size is None or size < 8 or size & (size - 1):
        return f"blocks of {size}, not of a power of two from 8 on"
    unserved = Mask.of(shape.mask).unserved(("sliding_window",))
    return f"masks with {', '.join(unserved)}" if unserved else ""


def can_load(rows: torch.Tensor) -> bool:
    """Whether the kernel for Hopper can load a cache [P, S, 1, D]."""
    return bool(len(rows)) and gpu.is_aligned(rows[:, :, 0])


def max_rows(dtype: torch.dtype, stored: torch.dtype) -> int:
    """Packed rows of a query block at most, of queries of one dtype over rows of another."""
    if dtype.itemsize == 4:
        return 16
    return _MAX_ROWS_OF_CODES if stored in _CODES else MAX_ROWS


def plan_mla_decode(
    shape: AttentionShape, bounds: BatchBounds, device: torch.device, aligned: bool = True
) -> MLADecodePlan:
    """The plan of a step, without its workspace. aligned: the cache is as `can_load` says."""
    hopper = aligned and not why_not_hopper(shape, gpu.why_not_here(device))
    module = "kernel" if not hopper else "hopper" if shape.stored_dtype == shape.dtype else "hopper_fp8"
    config = mla_decode_config(
        num_seqs=bounds.num_seqs,
        num_heads=shape.group,
        latent_dim=shape.head_dim_v,
        rope_dim=shape.head_dim - shape.head_dim_v,
        itemsize=shape.dtype.itemsize,
        stored_itemsize=shape.stored_dtype.itemsize,
        max_rows=max_rows(shape.dtype, shape.stored_dtype),
        num_tokens=bounds.num_tokens,
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        target=target_of(device),
        hopper=hopper,
    )
    return MLADecodePlan(shape, bounds.num_seqs, config, module)


@lru_cache(maxsize=4096)
def mla_decode_config(
    *,
    num_seqs: int,
    num_heads: int,
    latent_dim: int,
    rope_dim: int,
    itemsize: int,
    stored_itemsize: int,
    max_rows: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    target: Target,
    tuning: MLADecodeTuning | None = None,
    hopper: bool = False,
) -> MLADecodeConfig:
    """The configuration of a launch over sequences of at most so many query tokens and keys. itemsize: of queries and
    of the operands of products; stored_itemsize: of rows; max_rows: packed rows of a query block at most.

    `tuning` is taken as it is, but for what does not fit the device's shared memory; of those for Hopper only
    block_n, per_sm and tile_overhead count.
    """
    most = _most_rows(max_rows, latent_dim, rope_dim, itemsize, target)
    parts = -(-num_heads // most)
    heads = -(-num_heads // parts)  # of equal parts: 96 heads are two times 48
    longest = max(max_query_len, 1)
    block_m = max(16, min(next_power_of_2(longest * heads), most))
    if hopper:
        tuning = tuning or HOPPER_TUNING
    else:
        sizes = (latent_dim, rope_dim, itemsize, stored_itemsize)
        tuning = _fitted(tuning or _tuning(block_m, itemsize), block_m, *sizes, target)
    tokens = max(1, block_m // heads)
    items = num_seqs * -(-longest // tokens)
    tiles = items * parts * max(1, -(-max_seq_len // tuning.block_n))
    programs = min(target.num_sms * tuning.per_sm, tiles)
    if hopper:
        programs = min(programs, _most_programs(items * parts, max_seq_len))
    programs = max(1, programs // parts) * parts
    width = max(16, next_power_of_2(latent_dim))
    state = 2 * block_m + block_m * width
    sharing = programs // parts // items
    merges_in_launch = hopper and stored_itemsize < itemsize and sharing <= _FEW_SHARING  # by `hopper_fp8.py` alone
    merge = None if merges_in_launch else _merging(sharing, width)
    return MLADecodeConfig(block_m, heads, parts, programs, state, num_tokens, target.supports_pdl, tuning, merge)


def _most_programs(items: int, keys: int) -> int:
    """HOPPER_MOST_PROGRAMS of items of so many keys each, about as many for each item: a bound of the launch, of which
    the device takes fewer where a step has fewer keys (`hopper_items.py`)."""
    most = next((programs for most, programs in HOPPER_MOST_PROGRAMS if items * keys <= most), COUNTERS)
    return max(1, (most + items // 2) // items) * items


def _merging(sharing: int, width: int) -> MLADecodeMerge:
    """Of the second launch, where about so many programs share an item. Where they are many, there are few rows to add
    up, and what takes time is how often a thread block waits for loads; where they are fewer than items, most tokens
    have nothing to add up, and what takes time is how many thread blocks there are."""
    if sharing > 64:
        return MLADecodeMerge(128, min(width, 64), 1)
    if sharing > 12:
        return MLADecodeMerge(64, min(width, 128), 1)
    return MLADecodeMerge(16 if sharing > 4 else 8, width, 1 if sharing else 4)


def _tuning(block_m: int, itemsize: int) -> MLADecodeTuning:
    """By what ptxas says of registers and shared memory alone: no GPU has measured these yet (README.md)."""
    if itemsize == 4:
        return MLADecodeTuning(block_n=32, num_warps=8, num_stages=2, per_sm=1)
    return MLADecodeTuning(block_n=32 if block_m == MAX_ROWS else 64, num_warps=8, num_stages=3, per_sm=1)


def _most_rows(largest: int, latent_dim: int, rope_dim: int, itemsize: int, target: Target) -> int:
    """Rows of the largest query block, where there is room for them beside 16 keys."""
    most = largest
    while most > 16 and _shared_memory(most, 16, latent_dim, rope_dim, itemsize) > target.shared_bytes:
        most //= 2
    return most


def _shared_memory(block_m: int, keys: int, latent_dim: int, rope_dim: int, itemsize: int) -> int:
    """Bytes: the query tile, the rows of all buffers, and what reductions and layouts pass through."""
    width = next_power_of_2(latent_dim) + next_power_of_2(rope_dim)
    return (block_m + keys) * width * itemsize + (8192 if block_m < MAX_ROWS else 16384)


def _fitted(
    tuning: MLADecodeTuning,
    block_m: int,
    latent_dim: int,
    rope_dim: int,
    itemsize: int,
    stored_itemsize: int,
    target: Target,
) -> MLADecodeTuning:
    """With fewer stages, then fewer keys a tile, until tiles fit; then as many programs per SM as there is room for."""

    def taken(one: MLADecodeTuning) -> int:
        # The products of 64 rows (wgmma) still read a tile while the next one is loaded.
        buffers = max(1, one.num_stages - (block_m < MAX_ROWS))
        keys = buffers * one.block_n
        if stored_itemsize != itemsize:  # buffers of codes, and a tile of operands
            keys = one.block_n + -(-keys * stored_itemsize // itemsize)
        return _shared_memory(block_m, keys, latent_dim, rope_dim, itemsize)

    # Two stages are one buffer, in which the row is key and value; with one it would be copied there for each of them.
    while taken(tuning) > target.shared_bytes and tuning.num_stages > 2:
        tuning = tuning._replace(num_stages=tuning.num_stages - 1)
    while taken(tuning) > target.shared_bytes and tuning.block_n > 16:
        tuning = tuning._replace(block_n=tuning.block_n // 2)
    return tuning._replace(per_sm=max(1, min(tuning.per_sm, target.shared_bytes // taken(tuning))))
