"""BlockCopier: the copies of whole blocks that come before a step's forward pass."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from pagedattn import PagedKVCache
from pagedattn.errors import CapacityError

from .host_batch import BlockMoves


class BlockCopier:
    """Copies blocks within a cache, out to host memory and back in.

    All copies run on the current stream, the one of the forward pass: blocks that are swapped out are written again by
    that very step, and those swapped in are read by it, so that a stream beside it could only be waited for. The host
    waits for none of them.
    """

    def __init__(self, cache: PagedKVCache, num_host_blocks: int, clean: bool = False) -> None:
        """Serve `cache`, with host memory for `num_host_blocks` blocks of all its layers, pinned if that is on a GPU.

        Args:
            clean: zero blocks when they are handed out, so that no slot ever holds what another request left there.

        Raises:
            CapacityError: the host has not enough memory.
        """
        self._cache, self._clean = cache, clean
        layers, _, size = cache.slabs.shape
        need = layers * num_host_blocks * size
        try:
            host = self._pinned(need) if cache.device.type == "cuda" and need else torch.empty(need, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise CapacityError(
                f"the host has no {need / (1 << 30):.1f} GiB for {num_host_blocks} blocks beside the GPU's; lower "
                "swap_space or prefix_space"
            ) from error
        self._host = cache.over(host.view(layers, num_host_blocks, size))

    def move(self, moves: BlockMoves) -> None:
        """Make a step's copies: out, in, then from block to block; and zero in between what must be clean."""
        swap_out, fresh, swap_in, copies = map(torch.from_numpy, moves[:4])
        if len(swap_out):
            self._cache.swap_blocks(self._host, swap_out)
        if self._clean and len(fresh):
            self._cache.zero_blocks(fresh)
        if len(swap_in):
            self._host.swap_blocks(self._cache, swap_in)
        if len(copies):
            self._cache.copy_blocks(copies)
        if self._cache.recent is not None:
            self._move_recent(self._cache.recent, *map(torch.from_numpy, moves[4:]))

    def _move_recent(self, cache: PagedKVCache, fresh: torch.Tensor, copies: torch.Tensor) -> None:
        if self._clean and len(fresh):
            cache.zero_blocks(fresh)
        if len(copies):
            cache.copy_blocks(copies)

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory of just this size: torch's own pinned memory comes in powers of two, up to twice as much."""
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # there is less to pin
        host = torch.frombuffer(pages, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._cache.device):
            torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), num_bytes, 0))
        weakref.finalize(self, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
        return host
