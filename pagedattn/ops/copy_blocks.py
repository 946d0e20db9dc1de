"""copy_blocks: copy whole blocks inside caches, all layers, keys and values together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidInputError
from ..kernels.block_copy.pairs import CONTIGUOUS, check_pairs, has_whole_blocks, marked
from ..runtime.op_registry import choose, csrc_op, load, register


def copy_blocks(caches: Sequence[torch.Tensor], pairs: torch.Tensor, *, path: str = "auto") -> None:
    """Copy block pairs[i, 0] to block pairs[i, 1] in every tensor of `caches`.

    Every source is read before any target is written, so a block may be both. The compiled paths want tensors that are
    contiguous within a block; csrc copies all tensors in one launch and sends the pairs along with it.

    Args:
        caches: tensors whose first dimension is the block, one per layer (or per slab), of any further shape.
        pairs: [n, 2] int64 on the host.

    Raises:
        InvalidInputError: a block out of range or a target that occurs twice; nothing is copied then.
    """
    if not caches:
        return
    sizes = {len(cache) for cache in caches}
    if len(sizes) != 1:
        raise InvalidInputError("caches", "tensors with one number of blocks", sorted(sizes))
    devices = {str(cache.device) for cache in caches}
    if len(devices) != 1:
        raise InvalidInputError("caches", "tensors of one device", sorted(devices))
    check_pairs(pairs, len(caches[0]), len(caches[0]))
    if len(pairs):
        _op(list(caches), pairs, path)


def _run(caches: list[torch.Tensor], pairs: torch.Tensor, path: str) -> None:
    device = caches[0].device
    caches = [cache for cache in caches if cache.numel()]
    if not caches:
        return
    needs = "" if all(map(has_whole_blocks, caches)) else CONTIGUOUS
    chosen = choose(path, device, "copy_blocks", needs)
    overlap = marked(pairs[:, 1], len(caches[0]))[pairs[:, 0]]  # of each pair, whether its source is a target too
    if chosen == "torch":
        sources, targets = pairs.to(device, non_blocking=True).unbind(1)
        # Then all sources are read before anything is written: tensors may be views of the same blocks.
        read = list if bool(overlap.any()) else iter
        for cache, moved in zip(caches, read(cache[sources] for cache in caches), strict=True):
            cache[targets] = moved
        return
    copy = csrc_op("copy_blocks") if chosen == "csrc" else load("kernels.block_copy.kernel").launch
    # The kernels copy in any order: what is a target too goes through a staging copy.
    if not bool(overlap.any()):
        copy(caches, caches, pairs)
        return
    staged, direct = pairs[overlap], pairs[~overlap]
    row = torch.arange(len(staged), device="cpu")
    staging = [cache.new_empty(len(staged), *cache.shape[1:]) for cache in caches]
    copy(caches, staging, torch.stack((staged[:, 0], row), 1))
    if len(direct):
        copy(caches, caches, direct)
    copy(staging, caches, torch.stack((row, staged[:, 1]), 1))


def _fake(caches: list[torch.Tensor], pairs: torch.Tensor, path: str) -> None:
    return None


_op = register("copy_blocks(Tensor(a!)[] caches, Tensor pairs, str path) -> ()", _run, _fake)
