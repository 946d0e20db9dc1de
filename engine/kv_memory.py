"""How many KV blocks fit: given, or measured on a GPU after a warm-up at the full token budget, or a share of a CPU.

And how many more the host has room for, where preempted requests are swapped.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

import torch

from pagedattn.errors import CapacityError

from .config import EngineConfig
from .request import Request
from .sampling_params import SamplingParams
from .step import ScheduledRequest, Step, SwapRoom

_CPU_BYTES = 1 << 30
_WARM_UP_CONTEXT = 4096
_GIB = 1 << 30
_SWAP_BYTES = 4 << 30
# What a device moves to or from pinned host memory, in bytes/s, and what it multiplies while it computes prompts, in
# FLOP/s. Their ratio decides between swap and recompute, and is within a factor of two of these on H100, H200 and A100.
_RATES = {"cuda": (50e9, 4e14), "cpu": (1e10, 1e11)}

logger = logging.getLogger("pagedattn.engine")


def size_kv_blocks(
    config: EngineConfig,
    device: torch.device,
    block_bytes: int,
    blocks_per_sequence: int,
    run: Callable[[Step], object],
    num_groups: int,
    max_model_len: int,
) -> int:
    """The number of blocks of the cache, the null block included.

    On a GPU: total memory x utilization - what is in use by anybody - what activations reserve at their peak, which is
    measured by running a step at the full token budget and one of decodes.

    Args:
        block_bytes: of one block id, all slabs and scales together.
        blocks_per_sequence: blocks that the longest sequence needs.
        run: executes a step with a cache of one block.
        max_model_len: the longest sequence that the model has positions for.

    Raises:
        CapacityError: not even one sequence of one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type != "cuda":
        wanted = 1 + blocks_per_sequence * config.max_num_seqs
        return min(wanted, max(1 + blocks_per_sequence, _CPU_BYTES // block_bytes))
    activations = _peak_of_activations(config, device, run, num_groups, max_model_len)
    free, total = torch.cuda.mem_get_info(device)
    available = int(total * config.gpu_memory_utilization) - (total - free) - activations
    blocks = available // block_bytes
    parts = (
        f"{total / _GIB:.1f} GiB x {config.gpu_memory_utilization} - {(total - free) / _GIB:.1f} GiB in use "
        f"- {activations / _GIB:.1f} GiB for activations"
    )
    if blocks < 2:
        raise CapacityError(
            f"no memory for the KV cache: {parts} leaves {available / _GIB:.2f} GiB, two blocks need "
            f"{2 * block_bytes / _GIB:.2f} GiB; raise gpu_memory_utilization or lower max_num_batched_tokens"
        )
    logger.info("KV cache of %d blocks, %.1f GiB (%s)", blocks, blocks * block_bytes / _GIB, parts)
    return blocks


def swap_room(config: EngineConfig, device: torch.device, block_bytes: int, num_parameters: int) -> SwapRoom:
    """Host memory for swapped blocks, and what one costs: its bytes twice, against 2 FLOP per parameter and token.

    Args:
        block_bytes: as `size_kv_blocks`.
        num_parameters: of the model.

    Raises:
        CapacityError: preemption="swap", and not even one block fits into `swap_space`.
    """
    default = _SWAP_BYTES if config.preemption == "swap" or device.type == "cuda" else 0
    space = default if config.swap_space is None else config.swap_space
    if config.preemption == "recompute":
        return SwapRoom()
    if config.preemption == "swap" and space < block_bytes:
        raise CapacityError(f"swap_space={space} holds no block: one has {block_bytes} bytes; raise swap_space")
    bandwidth, flops = _RATES.get(device.type, _RATES["cpu"])
    tokens = (2 * block_bytes / bandwidth) / (2 * num_parameters / flops)
    return SwapRoom(space // block_bytes, tokens)


def _peak_of_activations(
    config: EngineConfig, device: torch.device, run: Callable[[Step], object], num_groups: int, max_model_len: int
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


def _warm_up_steps(config: EngineConfig, num_groups: int, max_model_len: int) -> list[Step]:
    """A step of prompts at the full budget and one of decodes, sampled in the way that needs most memory."""
    budget = config.max_num_batched_tokens
    longest = min(max_model_len, _WARM_UP_CONTEXT, budget)
    sequences = min(config.max_num_seqs, budget)
    prompts, rest = [], budget
    while rest and len(prompts) < sequences:
        prompts.append(min(longest, -(-rest // (sequences - len(prompts))), rest))
        rest -= prompts[-1]
    return [
        Step(tuple(_item(0, size, num_groups) for size in prompts), 0, ()),
        Step(tuple(_item(longest - 1, 1, num_groups) for _ in range(sequences)), sequences if longest > 1 else 0, ()),
    ]


def _item(start: int, num_tokens: int, num_groups: int) -> ScheduledRequest:
    """A request whose blocks are all the null block: what it computes is never read."""
    length = start + num_tokens
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=1)
    request = Request("warm-up", array("i", [0]) * length, sampling, arrival=0, max_total_tokens=length + 1)
    request.block_ids = [[0] * length] * num_groups
    return ScheduledRequest(request, start, num_tokens, samples=True)
