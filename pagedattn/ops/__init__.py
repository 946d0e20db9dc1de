"""Ops: cache writes, copies, merges and attention, each by Triton or torch behind one name."""

from .copy_blocks import copy_blocks
from .gather_kv import gather_kv
from .merge_states import merge_attn_states
from .paged_attention import paged_attention
from .reshape_and_cache import reshape_and_cache
from .slot_mapping import compute_slot_mapping
from .swap_blocks import swap_blocks

__all__ = [
    "compute_slot_mapping",
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "swap_blocks",
]
