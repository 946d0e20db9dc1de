"""Triton: copy whole blocks by (source, target) pairs, within a tensor or between two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...runtime.device import on_device
from ...runtime.launcher import Launcher
from ...runtime.op_registry import expect

_WORDS = 1024


@triton.jit
def _copy_blocks_kernel(pairs, source, target, s_source, s_target, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    pair = tl.program_id(0)
    src = tl.load(pairs + 2 * pair)
    dst = tl.load(pairs + 2 * pair + 1)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    mask = word < WORDS
    tl.store(target + dst * s_target + word, tl.load(source + src * s_source + word, mask=mask), mask=mask)


_launch = Launcher(_copy_blocks_kernel)


def as_words(*caches: torch.Tensor) -> list[torch.Tensor]:
    """[P, words] views of block-first tensors with blocks of one size, in the widest integer that divides a block and
    the addresses of all of them, without a copy: words of two widths would not be the same bytes."""
    flats = [_as_bytes(cache) for cache in caches]
    for word in (torch.int64, torch.int32, torch.int16):
        sizes = [n for flat in flats for n in (flat.shape[1], flat.storage_offset(), flat.stride(0))]
        if all(n % word.itemsize == 0 for n in sizes):
            return [flat.view(word) for flat in flats]
    return flats


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    expect(cache[0].is_contiguous() if len(cache) else True, "caches", "contiguous within a block", cache)
    cache = cache.unsqueeze(1) if cache.dim() == 1 else cache
    return cache.view(torch.uint8).flatten(1) if cache.dtype != torch.uint8 else cache.flatten(1)


def launch(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """Block-first tensors on one device, a target for each source. pairs: [n, 2] int64 on the host."""
    on_device = pairs.to(sources[0].device, non_blocking=True)
    for source, target in zip(sources, targets, strict=True):
        copy_between(source, target, on_device)


def copy_between(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """One launch, pairs on the device; `source` or `target` may be pinned host memory, which the GPU addresses."""
    src, dst = as_words(source, target)
    with on_device(pairs):
        # The pairs first: the launcher takes the first tensor's device, and source or target may be on the host.
        arguments, constants = (pairs, src, dst, src.stride(0), dst.stride(0)), {"WORDS": src.shape[1], "CHUNK": _WORDS}
        _launch((len(pairs), triton.cdiv(src.shape[1], _WORDS)), arguments, constants)
