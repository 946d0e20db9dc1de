"""swap_blocks: move blocks between a device cache and a host cache, or between two device caches."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ..errors import InvalidInputError
from .block_pairs import check_pairs
from .library import choose, kernels, register


def swap_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    path: str = "auto",
) -> None:
    """Copy block pairs[i, 0] of `source` to block pairs[i, 1] of `target`, in stream order.

    A host tensor should be pinned: then the copy is asynchronous and its caller waits for the stream (or an event)
    before reading it. Pageable host memory is copied synchronously.

    Args:
        source, target: [P, ...] and [P', ...], equal but for the first dimension, contiguous within a block.
        pairs: [n, 2] int64 on the host.
        stream: the stream to copy on; the current one where None.

    Raises:
        InvalidInputError: shapes or dtypes that differ, a block out of range, a target twice, or one tensor as both.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        got = f"{target.dtype} {list(target.shape)}"
        raise InvalidInputError("target", f"{source.dtype} [*, {list(source.shape[1:])}] as the source", got)
    if source.data_ptr() == target.data_ptr():
        raise InvalidInputError("target", "another tensor than source", "the same", "copy_blocks copies within one")
    check_pairs(pairs, len(source), len(target))
    if len(pairs) == 0:
        return
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        _op(source, target, pairs, path)


def _run(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, path: str) -> None:
    device = source.device if source.is_cuda else target.device
    reachable = all(tensor.is_cuda or tensor.is_pinned() for tensor in (source, target)) or not device.type == "cuda"
    if reachable and choose(path, device) == "triton":
        kernels("copy_blocks").copy_between(source, target, pairs.to(device))
        return
    if source.device == target.device:
        on_device = pairs.to(device)
        target[on_device[:, 1]] = source[on_device[:, 0]]
        return
    for src, dst in pairs.tolist():
        target[dst].copy_(source[src], non_blocking=True)


def _fake(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, path: str) -> None:
    return None


_op = register("swap_blocks(Tensor source, Tensor(a!) target, Tensor pairs, str path) -> ()", _run, _fake)
