"""swap_blocks: move blocks between a device cache and a host cache, or between two device caches."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ..errors import InvalidInputError
from ..kernels.block_copy.pairs import CONTIGUOUS, check_apart, check_pairs, has_whole_blocks
from ..runtime.op_registry import choose, csrc_op, load, register

_BEST = 0  # the mechanism that csrc/swap_blocks.cu picks by itself; 1, 2 and 3 are for measuring


def swap_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    path: str = "auto",
) -> None:
    """Copy block pairs[i, 0] of `source` to block pairs[i, 1] of `target`, in stream order.

    A host tensor should be pinned: then the copy is asynchronous, and its caller waits for the stream (or an event)
    before reading or freeing either tensor. Pageable host memory is copied synchronously. The compiled paths want
    tensors that are contiguous within a block, and not of two GPUs; Triton wants host tensors pinned.

    Tensors of bytes, such as slabs, do not say of which format they are: `PagedKVCache.swap_blocks` compares formats.

    Args:
        source, target: [P, ...] and [P', ...], equal but for the first dimension, contiguous within a block.
        pairs: [n, 2] int64 on the host.
        stream: the stream to copy on; the current one where None.

    Raises:
        InvalidInputError: shapes or dtypes that differ, a block out of range, a target twice, one tensor as both, a
            source that shares memory with a target, or a stream of another device.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        got = f"{target.dtype} {list(target.shape)}"
        expected, remedy = f"{source.dtype} [*, {list(source.shape[1:])}] as the source", "make both of the same format"
        raise InvalidInputError("target", expected, got, remedy)
    if stream is not None and stream.device not in (source.device, target.device):
        raise InvalidInputError("stream", f"of {source.device} or {target.device} as the tensors", stream.device)
    check_pairs(pairs, len(source), len(target))
    if len(pairs) == 0 or target.numel() == 0:
        return
    check_apart(source, target, pairs)
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        _op(source, target, pairs, path)


def _run(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, path: str) -> None:
    device = source.device if source.is_cuda else target.device
    chosen = choose(path, device, "swap_blocks", _needs(source, target))
    if chosen == "triton" and not _reachable(source, target):
        chosen = choose("torch" if path == "auto" else path, device, "swap_blocks", "pinned host memory")
    if chosen == "csrc":
        csrc_op("swap_blocks")(source, target, pairs, _BEST)
    elif chosen == "triton":
        load("kernels.block_copy.kernel").copy_between(source, target, pairs.to(device, non_blocking=True))
    elif source.device == target.device:
        on_device = pairs.to(device, non_blocking=True)
        target[on_device[:, 1]] = source[on_device[:, 0]]
    else:
        for src, dst in pairs.tolist():
            target[dst].copy_(source[src], non_blocking=True)


def _needs(source: torch.Tensor, target: torch.Tensor) -> str:
    """What the compiled paths want and these tensors are not; empty where they will do."""
    if not (has_whole_blocks(source) and has_whole_blocks(target)):
        return CONTIGUOUS
    if source.is_cuda and target.is_cuda and source.device != target.device:
        return "tensors of one GPU, or of one and the host"
    return ""


def _reachable(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a Triton kernel can address both, which it cannot where one of them is pageable host memory."""
    if source.is_cuda == target.is_cuda:
        return True
    return (target if source.is_cuda else source).is_pinned()


def _fake(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, path: str) -> None:
    return None


_op = register("swap_blocks(Tensor source, Tensor(a!) target, Tensor pairs, str path) -> ()", _run, _fake)
