"""Which decodes this family serves, and its launch configuration: pure functions of shapes and target."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...formats.turboquant.format import TURBOQUANT
from ...runtime.target import Target
from ...runtime.workspace import COUNTERS
from ...spec import Mask
from ..inputs import AttentionInputs
from ..shape import INT4, K8V4, AttentionShape, BatchBounds
from ..tiles import next_power_of_2

KEYS_PER_WARP = 16
_NARROWEST, _WIDEST = 64, 256  # heads
_CODES_OF_WORDS = {"turboquant3": 32, "turboquant2": 16}  # of whole words of which rows are; of others 8
_MASKS = ("sliding_window", "earlier_blocks", "recent_blocks", "from_block")
_TURBOQUANT = tuple((one.key.codes, one.value.codes) for one in TURBOQUANT)
_4_BITS = (INT4, *_TURBOQUANT)  # or fewer
_CODES = (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("int8", "int8"), K8V4, *_4_BITS)
_NATIVE = (None, None)  # elements that are stored as they are
_SMALL_STATE = 8 * 128  # elements of a warp's output that 168 registers a thread have room for, and
_MOST_STATE = 16 * 128  # 255
WARP_ROWS = 16  # of a query block, tokens times heads of a group, that products of a warp's own keys are made with
FEW_ROWS = 32  # that a warpgroup multiplies codes in registers with
MANY_ROWS = 64  # that it multiplies codes in shared memory with
MOST_ROWS = 256  # from which on copying keys takes less time than converting them for each query block
GROUP = 16  # partial states that one program adds up
_MANY_DIM = 128  # of heads at most whose blocks have more than WARP_ROWS rows


class HopperDecodeTuning(NamedTuple):
    """What is chosen by measurement: warps of a program, programs of an SM, registers of a thread, tiles that an item
    counts for beyond its keys' when they are split, since it takes time until its first keys are there, and keys of a
    warp."""

    warps: int
    per_sm: int
    max_registers: int
    tile_overhead: int
    keys: int = KEYS_PER_WARP

    @property
    def tile(self) -> int:
        """Keys."""
        return self.warps * self.keys


_MOST_WARPS = 4  # of a program
_PROGRAMS_OF_ITEM = 4  # that share an item at most, if programs have fewer warps than that
_FEW_KEYS = 1024  # of an SM
_OF_WARPGROUP = HopperDecodeTuning(4, 2, 255, 2)  # of query blocks of more than WARP_ROWS
_NATIVE_TUNING = HopperDecodeTuning(4, 3, 168, 1)
_NATIVE_ROWS = 8
_NATIVE_DIM = 128
_NATIVE_ITEMS = 2  # of an SM, from which on it is faster than the kernel for every cache,
_NATIVE_KEYS = 512  # where sequences may have more than so many


class HopperDecodeConfig(NamedTuple):
    """A launch of `programs` programs over query blocks of `rows` rows.

    tiles: the most tiles of keys there can be; state: elements of a partial state.
    """

    rows: int
    programs: int
    tiles: int
    state: int
    tuning: HopperDecodeTuning

    @property
    def workspace(self) -> int:
        """int32 elements of the workspace: counters, then two places for partial states per program."""
        return 3 * COUNTERS + 2 * self.programs * self.state


def why_not(shape: AttentionShape, max_query_len: int, here: str, most_rows: int = MOST_ROWS) -> str:
    """Why decodes of so many tokens go to the kernel for every cache, where `here` is what speaks against the GPU; ""
    where they are served. most_rows: beyond which another kernel is to be preferred."""
    if here:
        return here
    native = shape.codes == _NATIVE and shape.stored_dtype == shape.dtype
    if not (native or shape.codes in _CODES) or shape.dtype.itemsize != 2:
        return f"codes {shape.codes} under {shape.dtype} queries"
    dims = shape.head_dim, shape.head_dim_v
    if not all(_NARROWEST <= dim <= _WIDEST and dim % _unit(shape, dim) == 0 for dim in dims):
        return f"head dims {dims[0]} and {dims[1]}, served: {_NARROWEST} to {_WIDEST} in whole words of codes"
    if not shape.paged or shape.block_size is None or shape.block_size % KEYS_PER_WARP:
        return f"blocks of {shape.block_size} tokens, served: multiples of {KEYS_PER_WARP}"
    if unserved := Mask.of(shape.mask).unserved(_MASKS):
        return f"masks with {', '.join(unserved)}"
    most = _NATIVE_ROWS if native else min(WARP_ROWS, _MOST_STATE // width(max(dims)))
    rows = max_query_len * shape.group
    many = not native and dims[0] == dims[1] <= _MANY_DIM and shape.group <= MANY_ROWS
    if rows > (most_rows if many else most):
        return (
            f"{rows} rows of tokens and heads of a group, served: {most}, with heads of up to {_MANY_DIM} {most_rows}"
        )
    return ""


def width(head_dim: int) -> int:
    """Elements of a row as operands have them, zeros beyond the head."""
    return next_power_of_2(head_dim)


def _unit(shape: AttentionShape, dim: int) -> int:
    """What divides head dims whose rows are whole words: of 3 bits, of their lower two and of their upper ones. Of
    elements that are stored as they are only powers of two are served."""
    if shape.codes == _NATIVE:
        return width(dim)
    return max(_CODES_OF_WORDS.get(codes or "", 8) for codes in shape.codes)


def is_faster(shape: AttentionShape, bounds: BatchBounds, target: Target, short: bool = False) -> bool:
    """Whether decodes that are served are faster by this kernel than by the one for every cache, as those over codes
    are. short: sequences have few keys as a rule, for which that one has a tuning."""
    if shape.codes != _NATIVE:
        return True
    if short:
        return False
    seen = Mask.of(shape.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len)
    many = bounds.num_seqs * shape.num_kv_heads >= _NATIVE_ITEMS * target.num_sms and seen > _NATIVE_KEYS
    return many and bounds.max_query_len <= 1 and max(shape.head_dim, shape.head_dim_v) <= _NATIVE_DIM


def has_words(inputs: AttentionInputs) -> bool:
    """Whether the codes, and what keys have of each channel, can be read four bytes at a time, and planes of scales
    begin at a multiple of four bytes: scales of 16 bits are copied as the words that have them."""
    planes, k_scales = [inputs.key, inputs.value], inputs.k_scale_cache
    if k_scales is not None and k_scales.shape[3] > 1:
        planes.append(k_scales)
    starts = [*planes, *(x for x in (k_scales, inputs.v_scale_cache) if x is not None)]
    return all(x.storage_offset() * x.element_size() % 4 == 0 for x in starts) and all(
        step * x.element_size() % 4 == 0 for x in planes for step in x.stride()[:-1]
    )


@lru_cache(maxsize=4096)
def hopper_decode_config(
    shape: AttentionShape, bounds: BatchBounds, target: Target, tuning: HopperDecodeTuning | None = None
) -> HopperDecodeConfig:
    """The configuration of a launch over sequences of these bounds; `tuning` is taken as it is."""
    needed = bounds.max_query_len * shape.group
    rows = _block_rows(needed, width(shape.head_dim))
    items = bounds.num_seqs * shape.num_kv_heads * -(-bounds.max_query_len // (rows // shape.group))
    state, twice = rows * width(max(shape.head_dim, shape.head_dim_v)), _has_double_tiles(shape)
    if tuning is None:
        of_codes = _OF_WARPGROUP if rows > WARP_ROWS else _tuning(items, bounds.max_seq_len, state, twice, target)
        tuning = _NATIVE_TUNING if shape.codes == _NATIVE else of_codes
    tiles = items * max(1, -(-bounds.max_seq_len // tuning.tile))
    programs = min(target.num_sms * tuning.per_sm, tiles, COUNTERS)
    if rows > WARP_ROWS:  # of whose states a second level takes longer than fewer programs
        programs = min(programs, GROUP * items)
    programs = max(1, programs // shape.num_kv_heads) * shape.num_kv_heads  # each head has as many as every other
    return HopperDecodeConfig(rows, programs, tiles, rows * (width(shape.head_dim_v) + 2), tuning)


def _block_rows(needed: int, dim: int) -> int:
    """Rows of a query block, of `needed` at most. Blocks of FEW_ROWS are for heads of which each thread has four
    channels, in operands `dim` wide."""
    sizes = (8, WARP_ROWS, FEW_ROWS) if dim == _MANY_DIM else (8, WARP_ROWS)
    return next((size for size in sizes if needed <= size), MANY_ROWS)


def _has_double_tiles(shape: AttentionShape) -> bool:
    """Whether a warp can have twice the keys: of 4 bits they are as many bytes, and what a tile takes beside its codes
    is shared by more. States of larger heads leave no registers for them."""
    whole = shape.block_size is not None and shape.block_size % (2 * KEYS_PER_WARP) == 0
    return whole and shape.codes in _4_BITS and max(shape.head_dim, shape.head_dim_v) <= 128


def _tuning(items: int, seq_len: int, state: int, twice: bool, target: Target) -> HopperDecodeTuning:
    """Twelve warps an SM, eight where their states are large: in programs of one warp where there are many items, of
    several where there are so few that programs would share them too often, and all states would have to be added up.
    Of few items with few keys one program an SM, for the same reason. That it takes time until an item's first keys are
    there counts only where programs have several items."""
    small, keys = state <= _SMALL_STATE, KEYS_PER_WARP * (2 if twice else 1)
    warps, registers = (12, 168) if small else (8, 255)
    least = 2 if twice and not small else 1  # whose loop spills in programs of one warp
    each = max(least, min(next_power_of_2(-(-warps * target.num_sms // (_PROGRAMS_OF_ITEM * items))), _MOST_WARPS))
    few = each == _MOST_WARPS
    few_keys = few and items * seq_len <= _FEW_KEYS * target.num_sms
    return HopperDecodeTuning(each, 1 if few_keys else warps // each, registers, 0 if few else 2, keys)
