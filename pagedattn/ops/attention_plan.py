"""plan_attention: which kernels serve which sequences of a step; the one place that chooses among families.

Metadata carry the plan of a step and the op executes it. An op that is called without one makes it by the same
function, from its tensors.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..kernels import hopper
from ..kernels.decode import cascade
from ..kernels.decode.plan import DECODE_ROWS, DecodeConfig, DecodeTuning, decode_config
from ..kernels.decode_sm90 import plan as sm90_decode
from ..kernels.decode_sm90.plan import HopperDecodeConfig
from ..kernels.dequantise import plan as dequantise
from ..kernels.inputs import AttentionInputs
from ..kernels.prefill.plan import attention_config
from ..kernels.prefill_sm90 import plan as sm90
from ..kernels.shape import AttentionShape, BatchBounds, bounds_of, shape_of
from ..kernels.tiles import MIN_SPLIT_KEYS
from ..runtime.target import Target, target_of
from ..runtime.workspace import COUNTERS, new_workspace
from ..spec import Mask
from .launch_plan import KernelLaunch, KeyPass, LaunchPlan, Span

DECODE_TOKENS = 16  # a sequence of at most this number of new tokens is a decode
_ANY_ROWS = 1 << 31
_OWN_BLOCK_ROWS = 16  # that see one block, from which on there is nothing to split
_NARROW = 128  # heads of whose states 16 rows are added up by one program in little time
_SHORT_KEYS = 1024  # of a decode that may be one tile's work in any step
_PREFIX_KEYS_PER_SM = 1024  # of a shared prefix, for each block of DECODE_ROWS rows
_KEYS_PER_SM_TILE = 2048  # of longer ones, for each tile that an SM has


def plan_attention(
    shape: AttentionShape,
    bounds: BatchBounds,
    device: torch.device,
    *,
    prefix_len: int = 0,
    max_prefix_len: int | None = None,
    not_sm90: str = "",
    not_copied: str = "",
    has_words: bool = True,
) -> LaunchPlan:
    """The plan of a step, without its tensors.

    Args:
        prefix_len: the number of first keys, whole blocks that each new token of the decodes sees, which all sequences
            have in the same blocks.
        max_prefix_len: share it whatever it saves; the most keys that a step shares which uses the plan again. None
            shares where that pays.
        not_sm90: why tensors of this step are not for the Hopper kernel, whatever their shape. not_copied: the same,
            where it attends to a copy of the cache.
        has_words: whether the kernel for codes can read this cache.
    """
    target, here = target_of(device), hopper.why_not_here(device)
    not_sm90_decode = here if has_words else "a cache that cannot be read four codes at a time"
    many = bounds.max_query_len > DECODE_TOKENS
    because = "" if only_decodes(shape, bounds) else _why_not_sm90(shape, here) or not_sm90
    copied = many and not (_why_not_copied(shape, here) or not_copied)
    # Where prompts would need a copy of their keys, which takes longer than converting them for each query block.
    by_codes = many and bool(because) and not sm90_decode.why_not(shape, bounds.max_query_len, not_sm90_decode)
    by_codes &= not (copied and dequantise.beats_converting(shape, bounds, sm90_decode.MANY_ROWS))
    copied &= not by_codes
    turns = dequantise.copy_turns(shape, bounds, bool(because)) if copied else 0
    because = "" if turns else because
    in_passes = copied and not turns and (because or dequantise.passes_pay(shape, bounds))
    passes = plan_passes(shape, bounds, device, because, has_words) if in_passes else ()
    because = "" if passes else because
    of_turn = dequantise.native_shape(shape._replace(num_kv_heads=shape.num_kv_heads // turns)) if turns else shape
    params = sm90.params_of(of_turn, bounds, target.num_sms)
    length = _shared_prefix(shape, bounds, target, prefix_len, max_prefix_len) if prefix_len else 0
    launches, size = [], 0
    fuse = not (length or turns or passes)
    for span in plan_spans(shape, bounds, params, bool(because), fuse, by_codes, not_sm90_decode):
        if span.max_query_len and span.last > span.first:
            part = bounds.part(*span[1:])
            launch = _launch(
                span, shape, part, target, params, not_sm90_decode, is_rest=bool(length and span.first == 0)
            )
            size = max(size, _workspace_size(launch, part))
            launches.append(launch)
    prefix = None
    if length:
        rows = _prefix_bounds(bounds.part(*launches[0].span[1:]), length)
        prefix = plan_prefix(shape, rows, target, here or not_sm90, not_sm90_decode)
        size = max(size, prefix.workspace_size)
    size = max(size, *(one.plan.workspace_size for one in passes)) if passes else size
    return LaunchPlan(shape, bounds, tuple(launches), because, size, copy_turns=turns, passes=passes, prefix=prefix)


def plan_prefix(
    shape: AttentionShape, rows: BatchBounds, target: Target, not_sm90: str, not_sm90_decode: str
) -> LaunchPlan:
    """Of one call over a prefix, whose `rows` are those of one sequence and see all of it. It is never copied: the copy
    of a captured step would have to be as long as its longest prefix."""
    whole = shape._replace(mask=cascade.PLAIN.constants)
    params = sm90.params_of(whole, rows, target.num_sms)
    # The kernel for codes adds before it rounds, too.
    by_codes = _converts_as_fast(whole, rows.max_query_len, not_sm90_decode, _ANY_ROWS)
    by_prompts = not (by_codes or _why_not_sm90(whole, not_sm90)) and has_prompts_work(shape, rows, target)
    span = Span("prefill_sm90" if by_prompts else "decode", 0, 1, rows.max_query_len)
    launch = _launch(span, whole, rows, target, params, not_sm90_decode, most_rows=_ANY_ROWS)
    return LaunchPlan(whole, rows, (launch,), "", _workspace_size(launch, rows))


def plan_passes(
    shape: AttentionShape, bounds: BatchBounds, device: torch.device, not_sm90: str = "", has_words: bool = True
) -> tuple[KeyPass, ...]:
    """Of prompts of which a copy has no room for one head: passes over their keys, each by a plan of its own. not_sm90,
    has_words: as `plan_attention` takes them."""
    tile, size = copied_tile(shape), shape.block_size
    keys = dequantise.keys_per_pass(shape, bounds, tile)
    if not keys or size is None:
        return ()
    prompts = bounds.part(bounds.num_decodes, bounds.num_seqs, bounds.max_query_len)
    mask, passes = Mask.of(shape.mask), []
    for first in range(0, dequantise.most_keys(bounds), keys):
        block = first // size
        own = mask if mask.from_block is None else mask.replace(from_block=max(mask.from_block - block, 0) or None)
        rest = prompts._replace(max_seq_len=bounds.prompt_keys - first, max_keys=keys, max_prompt_keys=0)
        masked = shape._replace(mask=own.constants)
        plan = plan_attention(masked, rest, device, not_sm90=not_sm90, has_words=has_words)
        passes.append(KeyPass(block, block + keys // size, plan))
    return tuple(passes)


# What is decided by the shape alone is decided once, not in every step.
_why_not_sm90 = lru_cache(maxsize=256)(sm90.why_not)


@lru_cache(maxsize=256)
def _why_not_copied(shape: AttentionShape, here: str) -> str:
    """Why the Hopper kernel does not attend to a copy of the cache in 16 bits; "" where it can."""
    dims = shape.head_dim, shape.head_dim_v  # which a copy pads
    if not {*dims} <= {*sm90.HEAD_DIMS}:
        return f"head dims {dims[0]} and {dims[1]}, not multiples of 8 from 64 to 256"
    return sm90.why_not_copied(dequantise.native_shape(shape), here)


def copied_tile(shape: AttentionShape) -> int:
    """Keys of a tile of attention over a copy."""
    return sm90.keys_per_tile(dequantise.native_shape(shape).head_dim)


def plan_spans(
    shape: AttentionShape,
    bounds: BatchBounds,
    params: sm90.TileSchedulerParams,
    portable: bool,
    fuse: bool = True,
    by_codes: bool = False,
    not_sm90_decode: str = "",
) -> list[Span]:
    """Which sequences a step's decode and prefill launches serve; some may be empty.

    Args:
        portable: whether only the portable prefill kernel can serve.
        fuse: whether one launch may serve decodes and prompts; decodes with a shared prefix have one of their own.
        by_codes: whether the decode kernel for codes is to serve the prompts. not_sm90_decode: why it cannot read this
            cache, whatever its shape.
    """
    count, decodes, longest = bounds.num_seqs, bounds.num_decodes, bounds.max_query_len
    if only_decodes(shape, bounds):
        return [Span("decode", 0, count, longest)]
    prefill = "prefill" if portable else "prefill_sm90"
    everything = Span(prefill, 0, count, longest)
    if shape.deterministic or not shape.paged:
        return [everything]
    own_block = Mask.of(shape.mask).own_block
    if longest <= DECODE_TOKENS and not (own_block and longest * shape.group > _OWN_BLOCK_ROWS):
        fewest = _fewest_prompt_rows(shape, longest, not_sm90_decode)
        few_keys = shape.codes[0] is None and see_few_keys(params, bounds)
        fused = fuse and not portable and (few_keys or handles_short_queries(params, bounds, fewest))
        return [everything if fused else Span("decode", 0, count, longest)]
    if own_block or (fuse and not portable and should_fuse_decodes(params, bounds)):
        return [everything]
    rest = "decode" if by_codes or (fuse and portable and prefers_split_kv(params, bounds)) else prefill
    return [Span("decode", 0, decodes, 1), Span(rest, decodes, count, longest)]


def _fewest_prompt_rows(shape: AttentionShape, max_query_len: int, not_sm90_decode: str) -> int:
    """Of sequences of a few new tokens, the rows from which on they may go to the Hopper prefill kernel: those that a
    warp of the decode kernel has no registers for, or whose states one program of it adds up slowly. Keys that it would
    convert take longer there than by the decode kernel for codes, where that does so in registers."""
    most, few = sm90_decode.FEW_ROWS, sm90_decode.WARP_ROWS
    if _converts_as_fast(shape, max_query_len, not_sm90_decode, most):
        return most + 1
    return (few if max(shape.head_dim, shape.head_dim_v) <= _NARROW else few // 2) + 1


def _converts_as_fast(shape: AttentionShape, max_query_len: int, not_sm90_decode: str, most_rows: int) -> bool:
    """Whether the decode kernel for codes takes no longer over keys that the Hopper prefill kernel converts than that:
    not with heads of 64, whose tiles are half the work and as many barriers."""
    served = not sm90_decode.why_not(shape, max_query_len, not_sm90_decode, most_rows)
    return sm90.converts_keys(shape.codes[0], shape.dtype) and shape.head_dim > _NARROW // 2 and served


def only_decodes(shape: AttentionShape, bounds: BatchBounds) -> bool:
    """Whether the decode kernel serves all of a step, so that no prefill kernel is considered."""
    return bounds.max_query_len <= 1 and shape.paged and not shape.deterministic


def should_fuse_decodes(params: sm90.TileSchedulerParams, bounds: BatchBounds) -> bool:
    """Whether the decodes of a step that also has prompts are tiles among theirs: decodes wait for memory while prompts
    compute. Where so few are so long that some SMs would be left with one while others are done, only if the tiles of
    both are split: else a launch of their own splits their keys. Nor for heads that do not fit one tile, which would
    read their keys several times."""
    most = max(_SHORT_KEYS, _KEYS_PER_SM_TILE * bounds.num_decodes * params.num_kv_heads // params.num_sms)
    seen = Mask.of(params.mask).max_visible_keys(1, bounds.max_seq_len)
    whole = params.pack >= params.group
    return bounds.num_decodes > 0 and whole and (seen <= most or sm90.splits_kv(params, bounds))


def handles_short_queries(
    params: sm90.TileSchedulerParams, bounds: BatchBounds, fewest: int = sm90_decode.WARP_ROWS + 1
) -> bool:
    """Whether sequences of a few new tokens each go to the Hopper prefill kernel, not to the one for decodes: where
    they have the `fewest` rows, and either keys are split, or no SM is left with much longer ones than others."""
    group, tiles = params.group, bounds.num_seqs * params.num_kv_heads
    rows = bounds.max_query_len * group
    if bounds.max_query_len <= 1 or rows < fewest or params.pack < group:
        return False
    even = tiles >= params.num_sms and bounds.max_seq_len <= _KEYS_PER_SM_TILE * tiles // params.num_sms
    # As many tokens as there can be: how many padding rows a query has must not decide.
    most = bounds._replace(num_tokens=bounds.num_seqs * bounds.max_query_len)
    return even or sm90.splits_kv(params, most)


def see_few_keys(params: sm90.TileSchedulerParams, bounds: BatchBounds) -> bool:
    """Whether sequences of a few new tokens each go to the Hopper prefill kernel since they see few keys: where every
    tile has an SM, one of them attends to a sequence's keys in less time than the decode kernel's programs that share
    them add up their partial states."""
    tiles = bounds.num_seqs * params.heads
    keys = Mask.of(params.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len)
    many_rows = bounds.max_query_len * params.group > sm90_decode.WARP_ROWS
    return bounds.max_query_len > 1 and many_rows and tiles <= params.num_sms and keys < MIN_SPLIT_KEYS


def prefers_split_kv(params: sm90.TileSchedulerParams, bounds: BatchBounds) -> bool:
    """Whether the decode kernel is to serve prompts where only the portable prefill kernel could: where their query
    blocks are fewer than SMs, and see many keys."""
    prompts = bounds.num_seqs - bounds.num_decodes
    blocks = prompts * params.num_kv_heads * -(-bounds.max_query_len * params.group // DECODE_ROWS)
    keys = Mask.of(params.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len)
    return blocks <= params.num_sms and keys >= max(MIN_SPLIT_KEYS, 4 * bounds.max_query_len)


def has_prompts_work(shape: AttentionShape, rows: BatchBounds, target: Target) -> bool:
    """Whether the rows over a shared prefix are work for the Hopper prefill kernel: of less, what it takes before its
    first keys and after its last ones is more than what it gains."""
    count, fewest = rows.max_query_len * shape.group, sm90_decode.WARP_ROWS if shape.codes[0] else DECODE_ROWS
    work = shape.num_kv_heads * -(-count // DECODE_ROWS) * rows.max_seq_len
    return count > fewest and work >= _PREFIX_KEYS_PER_SM * target.num_sms


def decode_query_len(max_query_len: int) -> int:
    """New tokens at most of those sequences of a step that the decode kernel serves apart from prompts."""
    return max_query_len if max_query_len <= DECODE_TOKENS else 1


def decode_config_of(
    shape: AttentionShape, bounds: BatchBounds, target: Target, short: bool = False, tuning: DecodeTuning | None = None
) -> DecodeConfig:
    """How the decode kernel serves sequences of these bounds; `short` and `tuning` as of `decode_config`."""
    # Under a window, or in a query's own block, few keys, however long sequences are.
    seen = Mask.of(shape.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len)
    return decode_config(
        num_seqs=bounds.num_seqs,
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        itemsize=shape.dtype.itemsize,
        stored_itemsize=shape.stored_dtype.itemsize,
        max_query_len=bounds.max_query_len,
        max_seq_len=seen,
        target=target,
        short=short,
        tile_keys=shape.tile_keys,
        tuning=tuning,
    )


def plan_call(
    inputs: AttentionInputs,
    workspace: torch.Tensor | None = None,
    tile_schedule: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    prefix_len: int = 0,
) -> LaunchPlan:
    """The plan of one call, from its tensors. Those of another plan for this step, filled, are used where they fit.

    Raises:
        InvalidInputError: prefix_len is no whole number of blocks.
    """
    device, table = inputs.query.device, inputs.block_table
    if prefix_len and table is not None:
        cascade.check_length(prefix_len, inputs.key.shape[1])
    plan = plan_attention(
        shape_of(inputs),
        bounds_of(inputs),
        device,
        prefix_len=prefix_len,
        max_prefix_len=prefix_len,
        not_sm90=sm90.why_not_tensors(inputs),
        not_copied=sm90.why_not_queries(inputs),
        has_words=sm90_decode.has_words(inputs),
    )
    size = plan.workspace_size
    if size:
        fits = workspace is not None and workspace.numel() >= size
        plan.workspace = workspace if fits else new_workspace(size, device)
    plan.allocate(device, table, prefix_len)
    known = not plan.passes
    if plan.tile_schedule is not None:
        if known := tile_schedule is not None and tile_schedule.shape == plan.tile_schedule.shape:
            plan.tile_schedule = tile_schedule
    if plan.cascade is not None and plan.prefix is not None:
        if shared is not None and shared.shape == plan.cascade.tensor.shape:
            plan.cascade.tensor = shared
            plan.prefix.update(*plan.cascade.of_prefix, None)
        else:
            known = False
    if not known:
        plan.update(inputs.query_start_loc, inputs.seq_lens, table)
    return plan


def _shared_prefix(
    shape: AttentionShape, bounds: BatchBounds, target: Target, prefix_len: int, max_prefix_len: int | None
) -> int:
    """Keys that the decodes attend to once, at most; 0 where that does not pay, or cannot be: under a window or ALiBi
    distances differ from row to row."""
    longest = decode_query_len(bounds.max_query_len)
    count = bounds.num_seqs if bounds.max_query_len <= DECODE_TOKENS else bounds.num_decodes
    never = not Mask.of(shape.mask).sees_first_keys or shape.alibi or shape.deterministic
    if never or not (count and longest and shape.block_size and shape.paged):
        return 0
    if max_prefix_len is not None:
        return max_prefix_len
    own = bounds.part(0, count, longest)
    rest = own._replace(max_seq_len=max(own.max_seq_len - prefix_len, 0))
    alone, after = (decode_config_of(shape, one, target) for one in (own, rest))
    first = decode_config_of(shape, _prefix_bounds(own, prefix_len), target)
    key_bytes = (shape.head_dim + shape.head_dim_v) * shape.stored_dtype.itemsize
    return prefix_len if cascade.pays(alone, first, after, key_bytes) else 0


def _prefix_bounds(bounds: BatchBounds, length: int) -> BatchBounds:
    """Of the launch over a shared prefix: all rows are those of one sequence."""
    rows = bounds.max_query_len * bounds.num_seqs
    return bounds._replace(num_seqs=1, num_decodes=0, max_query_len=rows, max_seq_len=length, max_prompt_keys=0)


def _launch(
    span: Span,
    shape: AttentionShape,
    bounds: BatchBounds,
    target: Target,
    params: sm90.TileSchedulerParams,
    not_sm90_decode: str,
    is_rest: bool = False,
    most_rows: int = sm90_decode.MOST_ROWS,
) -> KernelLaunch:
    """The configuration of a span's launch; what is too large for a decode kernel goes to the portable one. is_rest:
    of what follows a shared prefix, few keys as a rule."""
    if span.kernel == "prefill_sm90":
        return KernelLaunch(span, params)
    if span.kernel == "decode":
        served = not sm90_decode.why_not(shape, bounds.max_query_len, not_sm90_decode, most_rows)
        if served and sm90_decode.is_faster(shape, bounds, target, short=is_rest):
            config = sm90_decode.hopper_decode_config(shape, bounds, target)
            if _is_countable(config):
                return KernelLaunch(Span("decode_sm90", *span[1:]), config)
        config = decode_config_of(shape, bounds, target, short=is_rest)
        if _is_countable(config):
            return KernelLaunch(span, config)
    heads = {"group": shape.group, "head_dim": shape.head_dim, "head_dim_v": shape.head_dim_v}
    stored = {"packed_keys": shape.stored_dtype == torch.uint8, "tile_keys": shape.tile_keys}
    config = attention_config(**heads, **stored, itemsize=shape.dtype.itemsize, target=target, mask=Mask.of(shape.mask))
    return KernelLaunch(Span("prefill", *span[1:]), config)


def _workspace_size(launch: KernelLaunch, bounds: BatchBounds) -> int:
    config = launch.config
    if isinstance(config, DecodeConfig | HopperDecodeConfig):
        return config.workspace
    if isinstance(config, sm90.TileSchedulerParams) and sm90.splits_kv(config, bounds):
        return config.workspace
    return 0


def _is_countable(config: DecodeConfig | HopperDecodeConfig) -> bool:
    """Whether int32 counts the launch's tiles, and there are as many counters as programs."""
    return config.tiles * (1 + config.tuning.tile_overhead) < 2**31 and config.programs <= COUNTERS
