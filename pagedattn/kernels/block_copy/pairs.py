"""What copies of whole blocks share: the checks made on the host before anything is copied."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError

CONTIGUOUS = "tensors that are contiguous within a block"


def check_pairs(pairs: torch.Tensor, num_sources: int, num_targets: int) -> None:
    """Refuse pairs that are not int64 [n, 2] on the host, out of range, or that write one target twice."""
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64 or pairs.device.type != "cpu":
        got = f"{pairs.dtype} {list(pairs.shape)} on {pairs.device}"
        raise InvalidInputError("pairs", "int64 [n, 2] on the CPU, rows of (source, target)", got)
    if len(pairs) == 0:
        return
    for column, limit, name in ((0, num_sources, "source"), (1, num_targets, "target")):
        low, high = int(pairs[:, column].min()), int(pairs[:, column].max())
        if low < 0 or high >= limit:
            raise InvalidInputError("pairs", f"{name} blocks in [0, {limit})", low if low < 0 else high)
    if int(marked(pairs[:, 1], num_targets).sum()) != len(pairs):
        raise InvalidInputError("pairs", "each target at most once", "a target that occurs twice")


def check_apart(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Refuse two tensors that are one, or pairs of which a source block shares bytes with a target block.

    Blocks that are not one piece are not looked at: torch copies these, and reads all sources first.
    """
    base = source.untyped_storage().data_ptr()
    if base == 0 or base != target.untyped_storage().data_ptr():
        return
    remedy = "copy_blocks copies within one"
    if source.data_ptr() == target.data_ptr():
        raise InvalidInputError("target", "another tensor than source", "the same", remedy)
    if not (has_whole_blocks(source) and has_whole_blocks(target)):
        return
    size = source.element_size()
    length = source[0].numel() * size
    begin = source.data_ptr() + pairs[:, 0] * (source.stride(0) * size)
    targets = (target.data_ptr() + pairs[:, 1] * (target.stride(0) * size)).sort().values
    # A block of the same length meets [begin, begin + length) where it begins within a length of it on either side.
    first = torch.searchsorted(targets, begin - length, right=True)
    if bool((first < torch.searchsorted(targets, begin + length)).any()):
        raise InvalidInputError("target", "blocks that share no memory with those of source", "an overlap", remedy)


def marked(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """[count] bool, True for each of `blocks`: tells members and duplicates without sorting."""
    return torch.zeros(count, dtype=torch.bool, device="cpu").index_fill_(0, blocks, True)


def has_whole_blocks(tensor: torch.Tensor) -> bool:
    """Whether each block tensor[i] is one piece of memory."""
    return tensor.is_contiguous() or tensor[0].is_contiguous()
