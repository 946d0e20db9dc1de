"""BlockCopier: the copies of whole blocks that come before a step's forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedattn import PagedKVCache, ops
from pagedattn.errors import CapacityError

from ..scheduler_output import SchedulerOutput


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
        try:
            pinned = cache.device.type == "cuda"
            self._host = torch.empty(layers, num_host_blocks, size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            need = layers * num_host_blocks * size
            raise CapacityError(f"the host has no {need} bytes for swapped blocks; lower swap_space") from error

    def move(self, step: SchedulerOutput) -> None:
        """Make the step's copies: out, in, then from block to block; and zero in between what must be clean."""
        if step.swap_out:
            self._swap(self._cache.slabs, self._host, step.swap_out)
        if self._clean and step.fresh_blocks:
            self._cache.zero_blocks(step.fresh_blocks)
        if step.swap_in:
            self._swap(self._host, self._cache.slabs, step.swap_in)
        if step.copies:
            self._cache.copy_blocks(step.copies)

    def _swap(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """One call for all slabs [n, P, bytes]: block p of slab j is row j * P + p of all rows."""
        rows = torch.arange(len(source))[:, None, None] * torch.tensor([source.shape[1], target.shape[1]])
        every = (rows + torch.tensor(pairs)).reshape(-1, 2)  # [n * pairs, 2]
        ops.swap_blocks(source.flatten(0, 1), target.flatten(0, 1), every)
