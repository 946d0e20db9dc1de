"""How many KV blocks fit: given, or measured on a GPU after a warm-up at the full token budget, or a share of a CPU.

Beside them, of formats that encode whole blocks, those of the second cache, and in host memory those of preempted
requests that are swapped.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch

from pagedattn.errors import CapacityError

from ..config import EngineConfig
from ..kv_group import KVGroup, SwapConfig
from ..request import Request
from ..sampling_params import SamplingParams
from ..scheduler_output import ScheduledRequest, SchedulerOutput

_CPU_BYTES = 1 << 30
_MOST_RECENT = 4  # the second cache has at most one byte of this many
_WARM_UP_CONTEXT = 4096
_GIB = 1 << 30
_SWAP_BYTES = 4 << 30
# What a device moves to or from pinned host memory, in bytes/s, and what it multiplies while it computes prompts, in
# FLOP/s. Their ratio decides between swap and recompute, and is within a factor of two of these on H100, H200 and A100.
_RATES = {"cuda": (50e9, 4e14), "cpu": (1e10, 1e11)}

logger = logging.getLogger("pagedattn.engine")


class BlockBytes(NamedTuple):
    """Of one block id, all slabs and scales together: of the cache, and of its second one for blocks that are not
    encoded, which formats that encode whole blocks have."""

    cache: int
    recent: int = 0


class NumBlocks(NamedTuple):
    """The null block included; `recent` is of the second cache, None where there is none."""

    cache: int
    recent: int | None = None

    def bytes(self, of_one: BlockBytes) -> int:
        """That they take."""
        return self.cache * of_one.cache + (self.recent or 0) * of_one.recent


def size_kv_blocks(
    config: EngineConfig,
    device: torch.device,
    block_bytes: BlockBytes,
    groups: Sequence[KVGroup],
    max_model_len: int,
    run: Callable[[SchedulerOutput], object],
    graph_bytes: Callable[[], int] = lambda: 0,
) -> NumBlocks:
    """The numbers of blocks of the cache, and of the second one where `block_bytes` has one.

    The second cache has a block for each of `max_num_seqs`, `full_recent_blocks` more, and one for each block_size of
    the tokens of a step; never more than the first has, and where memory is measured, at most a quarter of it: with
    fewer blocks fewer requests run at a time, and their chunks are shorter.

    On a GPU: total memory x utilization - what is in use by anybody - what activations reserve at their peak, which is
    measured by running a step at the full token budget and one of decodes - what CUDA graphs will need.

    Args:
        groups: those of layers.
        max_model_len: the longest sequence that the model has positions for.
        run: executes a step with a cache of one block.
        graph_bytes: called after the warm-up; captures graphs over a cache that is thrown away, returns their bytes.

    Raises:
        CapacityError: the blocks do not fit the device, not even two do, or they are too few for one sequence of the
            `max_model_len` that the config asks for.
    """
    if config.num_kv_blocks is not None:
        most_recent = _most_recent(config, groups) if block_bytes.recent else None
        blocks = _with_recent(config.num_kv_blocks, most_recent)
        _check_fits(blocks, block_bytes, most_recent or 0, device)
    elif device.type == "cuda":
        blocks = _measured(config, device, block_bytes, run, groups, max_model_len, graph_bytes)
    else:
        longest = sum(group.blocks_for(max_model_len, config.max_num_batched_tokens) for group in groups)
        # A longest sequence has room in both, be it more than the share.
        most = _split(_CPU_BYTES, config, block_bytes, groups)
        blocks = _with_recent(min(1 + longest * config.max_num_seqs, max(1 + longest, most.cache)), most.recent)
    _check_longest(config, blocks.cache, groups, max_model_len)
    return blocks


def _most_recent(config: EngineConfig, groups: Sequence[KVGroup]) -> int:
    """Blocks of the second cache that are enough for the fullest step but for prompts in very small pieces."""
    each = 1 + groups[0].full_recent_blocks
    return 1 + each * config.max_num_seqs + -(-config.max_num_batched_tokens // groups[0].block_size)


def _with_recent(blocks: int, most_recent: int | None) -> NumBlocks:
    """What is not encoded yet has a block in the first cache too."""
    return NumBlocks(blocks, None if most_recent is None else min(blocks, most_recent))


def _split(available: int, config: EngineConfig, block_bytes: BlockBytes, groups: Sequence[KVGroup]) -> NumBlocks:
    """How many blocks so many bytes hold; fewer than two of the cache, or less than none, where what one request needs
    of the second one leaves no more."""
    if not block_bytes.recent:
        return NumBlocks(available // block_bytes.cache)
    least = 2 + groups[0].full_recent_blocks  # for one request
    recent = min(_most_recent(config, groups), max(least, available // _MOST_RECENT // block_bytes.recent))
    return NumBlocks((available - recent * block_bytes.recent) // block_bytes.cache, recent)


def _measured(
    config: EngineConfig,
    device: torch.device,
    block_bytes: BlockBytes,
    run: Callable[[SchedulerOutput], object],
    groups: Sequence[KVGroup],
    max_model_len: int,
    graph_bytes: Callable[[], int],
) -> NumBlocks:
    num_tables = len(groups) + (block_bytes.recent > 0)
    activations = _peak_of_activations(config, device, run, num_tables, max_model_len)
    graphs = graph_bytes()
    free, total = torch.cuda.mem_get_info(device)
    available = int(total * config.gpu_memory_utilization) - (total - free) - activations - graphs
    blocks = _split(available, config, block_bytes, groups)
    parts = (
        f"{total / _GIB:.1f} GiB x {config.gpu_memory_utilization} - {(total - free) / _GIB:.1f} GiB in use "
        f"- {activations / _GIB:.1f} GiB for activations - {graphs / _GIB:.1f} GiB for CUDA graphs"
    )
    if blocks.cache < 2:
        raise _no_memory(f"{parts} leaves {available / _GIB:.2f} GiB", available, config, block_bytes, groups[0])
    blocks = _with_recent(*blocks)
    count = str(blocks.cache) if blocks.recent is None else f"{blocks.cache} and {blocks.recent}"
    logger.info("KV cache of %s blocks, %.1f GiB (%s)", count, blocks.bytes(block_bytes) / _GIB, parts)
    return blocks


def _no_memory(
    left: str, available: int, config: EngineConfig, block_bytes: BlockBytes, group: KVGroup
) -> CapacityError:
    """Two blocks of the cache are what the least has, and of the second one a request's open block and its window."""
    kept, two = group.full_recent_blocks, 2 * sum(block_bytes)
    others = (
        f"raise gpu_memory_utilization or lower max_num_batched_tokens ({config.max_num_batched_tokens}) or "
        f"max_num_seqs ({config.max_num_seqs})"
    )
    if not kept:
        need = f"two blocks need {two / _GIB:.2f} GiB"
        return CapacityError(f"no memory for the KV cache: {left}, {need}; {others}")
    need = f"two blocks and what each sequence keeps in the model's dtype, {kept} blocks of {group.block_size} tokens, "
    need += f"need {(two + kept * block_bytes.recent) / _GIB:.2f} GiB"
    fits = max(0, (available - two) // block_bytes.recent)
    remedy = f"lower window and first of kv_cache_dtype={str(config.kv_cache_dtype)!r} to {fits} blocks together"
    return CapacityError(f"no memory for the KV cache: {left}, {need}; {remedy}, lower max_model_len, or {others}")


def _check_fits(blocks: NumBlocks, block_bytes: BlockBytes, most_recent: int, device: torch.device) -> None:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and blocks.bytes(block_bytes) > free:
        recent = blocks.recent
        second = f", and {recent} of {block_bytes.recent} for those that are not encoded," if recent else ""
        # As many of each, or all of the second that there may be.
        most = max(free // sum(block_bytes), (free - most_recent * block_bytes.recent) // block_bytes.cache)
        raise CapacityError(
            f"num_kv_blocks={blocks.cache} of {block_bytes.cache} bytes{second} need "
            f"{blocks.bytes(block_bytes) / _GIB:.2f} GiB and {device} has {free / _GIB:.2f} GiB free; lower "
            f"num_kv_blocks to {most} at most"
        )


def _check_longest(config: EngineConfig, blocks: int, groups: Sequence[KVGroup], max_model_len: int) -> None:
    """Refuse a length that was asked for and cannot be reached; say so where it is only the model's."""

    def fits(num_tokens: int) -> bool:
        # The last token of a sequence is never written.
        return sum(group.blocks_for(num_tokens - 1, 1) for group in groups) < blocks

    if fits(max_model_len):
        return
    reachable = bisect_left(range(max_model_len), True, key=lambda length: not fits(length)) - 1
    need = 1 + sum(group.blocks_for(max_model_len - 1, 1) for group in groups)
    problem = f"a sequence of {max_model_len} tokens needs {need} blocks and the KV cache has {blocks}"
    if config.max_model_len is not None:
        raise CapacityError(
            f"{problem}; lower max_model_len to {reachable}, or raise num_kv_blocks or gpu_memory_utilization"
        )
    logger.warning("%s: sequences end at %d tokens", problem, reachable)


def swap_config(
    config: EngineConfig, device: torch.device, block_bytes: int, groups: Sequence[KVGroup], num_parameters: int
) -> SwapConfig:
    """Host memory for blocks, and what one costs: its bytes twice, against 2 FLOP per parameter and token.

    Args:
        block_bytes, groups: as `size_kv_blocks`.
        num_parameters: of the model.

    Raises:
        CapacityError: not even one block fits into `swap_space`, with preemption="swap", or into `prefix_space`.
    """
    default = _SWAP_BYTES if config.preemption == "swap" or device.type == "cuda" else 0
    space = default if config.swap_space is None else config.swap_space
    prefixes = config.prefix_space if config.enable_prefix_caching else 0
    for name, given, wanted in (
        ("swap_space", space, config.preemption == "swap"),
        ("prefix_space", prefixes, prefixes > 0),
    ):
        if wanted and given < block_bytes:
            raise CapacityError(f"{name}={given} holds no block: one has {block_bytes} bytes; raise {name}")
    bandwidth, flops = _RATES.get(device.type, _RATES["cpu"])
    tokens = (2 * block_bytes / bandwidth) / (2 * num_parameters / flops)
    # No block has the number of tokens from which moving it would pay.
    pays = config.preemption == "swap" or tokens < max(group.block_size for group in groups)
    if config.preemption == "recompute" or not pays:
        space = 0
    return SwapConfig((space + prefixes) // block_bytes, tokens if space else inf, prefixes > 0)


def _peak_of_activations(
    config: EngineConfig,
    device: torch.device,
    run: Callable[[SchedulerOutput], object],
    num_groups: int,
    max_model_len: int,
) -> int:
    """Bytes that the allocator reserves for activations at their peak, above what stays reserved."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for step in _warm_up_steps(config, num_groups, max_model_len):
        run(step)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - torch.cuda.memory_reserved(device)


def _warm_up_steps(config: EngineConfig, num_groups: int, max_model_len: int) -> list[SchedulerOutput]:
    """A step of prompts at the full budget and one of decodes, sampled in the way that needs most memory."""
    budget = config.max_num_batched_tokens
    longest = min(max_model_len, _WARM_UP_CONTEXT, budget)
    sequences = min(config.max_num_seqs, budget)
    prompts, rest = [], budget
    while rest and len(prompts) < sequences:
        prompts.append(min(longest, -(-rest // (sequences - len(prompts))), rest))
        rest -= prompts[-1]
    return [
        SchedulerOutput(tuple(_item(0, size, num_groups) for size in prompts), 0, ()),
        SchedulerOutput(
            tuple(_item(longest - 1, 1, num_groups) for _ in range(sequences)), sequences if longest > 1 else 0, ()
        ),
    ]


def _item(start: int, num_tokens: int, num_groups: int) -> ScheduledRequest:
    """A request whose blocks are all the null block: what it computes is never read."""
    length = start + num_tokens
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=1)
    request = Request("warm-up", array("i", [0]) * length, sampling, arrival=0, max_total_tokens=length + 1)
    request.block_ids = [[0] * length] * num_groups
    return ScheduledRequest(request, start, num_tokens, samples=True)
