"""copy_blocks: copy whole blocks inside caches, all layers, keys and values together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidInputError
from .block_pairs import check_pairs
from .library import choose, kernels, register


def copy_blocks(caches: Sequence[torch.Tensor], pairs: torch.Tensor, *, path: str = "auto") -> None:
    """Copy block pairs[i, 0] to block pairs[i, 1] in every tensor of `caches`.

    Every source is read before any target is written, so a block may be both.

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
    check_pairs(pairs, len(caches[0]), len(caches[0]))
    if len(pairs):
        _op(list(caches), pairs, path)


def _run(caches: list[torch.Tensor], pairs: torch.Tensor, path: str) -> None:
    overlap = bool(torch.isin(pairs[:, 0], pairs[:, 1]).any())
    device = caches[0].device
    if not overlap and choose(path, device) == "triton":
        kernels("copy_blocks").launch(caches, pairs.to(device, non_blocking=True))
        return
    on_device = pairs.to(device)
    for cache in caches:
        cache[on_device[:, 1]] = cache[on_device[:, 0]]


def _fake(caches: list[torch.Tensor], pairs: torch.Tensor, path: str) -> None:
    return None


_op = register("copy_blocks(Tensor(a!)[] caches, Tensor pairs, str path) -> ()", _run, _fake)
