"""Which prompts have their keys and values dequantised before they are attended to: pure functions."""

from __future__ import annotations

from ...spec import Mask
from ..shape import AttentionShape, BatchBounds

MOST_BYTES = 64 << 20  # of the copy: a step takes no more memory than this, whatever its context
_FEWEST_ROWS = {"e4m3": 1024, "e5m2": 1024}  # tokens times heads of a group, for which a copy takes less time than it
_FEWEST_ROWS_ELSE = 512  # saves; kernels that read fp8 codes lose less


def native_shape(shape: AttentionShape) -> AttentionShape:
    """The shape of attention over the copy."""
    return shape._replace(stored_dtype=shape.dtype, codes=(None, None))


def pays(shape: AttentionShape, bounds: BatchBounds) -> bool:
    """Whether the prompts of these bounds are attended to faster over a copy, and it is no larger than MOST_BYTES."""
    size, code = shape.block_size, shape.codes[0]
    if code is None or size is None or not shape.paged:
        return False
    if bounds.max_query_len * shape.group < _FEWEST_ROWS.get(code, _FEWEST_ROWS_ELSE):
        return False
    if 2 * Mask.of(shape.mask).max_visible_keys(bounds.max_query_len, bounds.max_seq_len) < bounds.max_seq_len:
        return False  # most of the copy would not be read
    keys = min(bounds.max_seq_len, bounds.max_keys or bounds.max_seq_len)
    rows = (bounds.num_seqs - bounds.num_decodes) * -(-keys // size) * size * shape.num_kv_heads
    return rows * (shape.head_dim + shape.head_dim_v) * shape.dtype.itemsize <= MOST_BYTES
