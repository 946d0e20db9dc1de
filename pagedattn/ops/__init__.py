"""Ops: cache writes, copies, merges and attention, each by csrc, Triton or torch behind one name."""

from ..runtime.op_registry import path_of
from .concat_and_cache_mla import concat_and_cache_mla
from .copy_blocks import copy_blocks
from .gather_kv import gather_kv
from .merge_states import merge_attn_states
from .mla_decode import mla_decode
from .paged_attention import paged_attention
from .reshape_and_cache import reshape_and_cache
from .reshape_and_cache_classic import from_classic_layout, reshape_and_cache_classic
from .seal_blocks import seal_blocks
from .slot_mapping import compute_slot_mapping
from .swap_blocks import swap_blocks

__all__ = [
    "compute_slot_mapping",
    "concat_and_cache_mla",
    "copy_blocks",
    "from_classic_layout",
    "gather_kv",
    "merge_attn_states",
    "mla_decode",
    "paged_attention",
    "path_of",
    "reshape_and_cache",
    "reshape_and_cache_classic",
    "seal_blocks",
    "swap_blocks",
]
