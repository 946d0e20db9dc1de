"""What tests of vLLM's backend share: layers, caches and steps as vLLM makes them, and attention by its definition."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

if find_spec("vllm") is None:
    sys.path.insert(0, str(Path(__file__).parent / "vllm_stand_in"))

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 32, 16, 24
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
SHAPES = ("pair", "packed")  # [P, 2, S, H, D] of vLLM 0.24, [P, H, S, 2 * D] of 0.33
# What `kv_cache` and `layer` are made of: logical dimension order of each physical layout.
_ORDERS = {
    ("pair", "NHD"): (0, 1, 2, 3, 4),
    ("pair", "HND"): (0, 1, 3, 2, 4),
    ("packed", "NHD"): (0, 2, 1, 3),
    ("packed", "HND"): (0, 1, 2, 3),
}


def make_cache(
    shape: str = "pair",
    layout: str = "NHD",
    pad: int = 0,
    dtype: torch.dtype = torch.float32,
    blocks: int = NUM_BLOCKS,
    row: int = 2 * HEAD_DIM,
) -> torch.Tensor:
    """A cache as vLLM allocates it: a physical order, pages padded by `pad` elements, seen in logical order. `row`: the
    elements of a packed row."""
    heads, dim, size = NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE
    logical = (blocks, 2, size, heads, dim) if shape == "pair" else (blocks, heads, size, row)
    order = _ORDERS[shape, layout]
    physical = [logical[i] for i in order]
    strides = [*torch.empty(physical).stride()]
    strides[0] += pad
    raw = torch.zeros(blocks * strides[0], dtype=dtype)
    return torch.as_strided(raw, physical, strides).permute([order.index(i) for i in range(len(order))])


def make_layer(sinks: torch.Tensor | None = None, scale: float = 1.0, **options: Any) -> Any:
    """vLLM's layer, as far as an implementation and a builder look at it."""
    from pagedattn.integrations.vllm.backend import PagedAttentionBackend

    given: dict[str, Any] = {"kv_cache_dtype": "auto", "sliding_window": None, "logits_soft_cap": None}
    given |= {"alibi_slopes": None} | options
    extra: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
    heads = (NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_KV_HEADS)
    impl = PagedAttentionBackend.get_impl_cls()(*heads, **given, **extra)
    scales = {"_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(scale)}
    return SimpleNamespace(impl=impl, kv_cache=torch.tensor([]), **scales)


def make_builder(layers: dict[str, Any], cls: Any = None) -> Any:
    """The builder of a KV group with these layers."""
    from pagedattn.integrations.vllm.backend import PagedAttentionBackend

    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    return (cls or PagedAttentionBackend.get_builder_cls())(spec, [*layers], config, torch.device("cpu"))


def make_common(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: torch.Tensor,
    pad_seqs: int = 0,
    pad_tokens: int = 0,
    block_size: int = BLOCK_SIZE,
    **more: Any,
) -> Any:
    """vLLM's metadata of a step: tails of starts repeat, those of lengths and tables are 0, of slots -1."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    starts = np.concatenate([starts, np.full(pad_seqs, starts[-1], np.int32)])
    rows = torch.zeros(len(query_lens) + pad_seqs, table.shape[1], dtype=torch.int32)
    rows[: len(table)] = table
    slots = slots_of(query_lens, seq_lens, table, block_size)
    fields: dict[str, Any] = {
        "query_start_loc": torch.from_numpy(starts.copy()),
        "query_start_loc_cpu": torch.from_numpy(starts),
        "seq_lens": torch.tensor([*seq_lens, *[0] * pad_seqs], dtype=torch.int32),
        "num_reqs": len(query_lens) + pad_seqs,
        "num_actual_tokens": sum(query_lens) + pad_tokens,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": rows,
        "slot_mapping": torch.tensor([*slots, *[-1] * pad_tokens], dtype=torch.int64),
    }
    return CommonAttentionMetadata(**fields | more)


def slots_of(
    query_lens: Sequence[int], seq_lens: Sequence[int], table: torch.Tensor, size: int = BLOCK_SIZE
) -> list[int]:
    """Where the new tokens of each sequence go, by a table of blocks of `size` tokens."""
    at = [(b, p) for b, (q, k) in enumerate(zip(query_lens, seq_lens, strict=True)) for p in range(k - q, k)]
    return [int(table[b, p // size]) * size + p % size for b, p in at]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: Sequence[float] | None = None,
) -> torch.Tensor:
    """Attention of one sequence's last rows, query [q, H, D] over keys and values [k, Hkv, D]."""
    q, k = len(query), len(keys)
    keys, values = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query, keys) * HEAD_DIM**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    row, column = torch.arange(k - q, k)[:, None], torch.arange(k)[None]
    if slopes is not None:
        logits = logits + torch.tensor(slopes)[:, None, None] * (column - row)
    visible = torch.ones(q, k, dtype=torch.bool)
    if causal:
        visible &= column <= row
    if window:
        visible &= row - column < window
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(NUM_HEADS, q, 1)], -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :k], values)
