"""One rank's share of a decoder: whole heads of the attention, a slice of the MLP, some rows of the LM head.

Column-parallel projections (QKV, gate and up) are narrower here and need nothing else; row-parallel ones (output, down)
give a part of a sum, which one all-reduce completes: two per layer. Norms and the embedding are on every rank, since a
lookup reads as many rows as there are tokens, so that cutting the table would save memory and cost a third kind of
all-reduce. The LM head is read whole in every step, so its rows are cut (those of the embedding where the two are
tied), and logits are gathered on every rank. Each rank samples them for itself: same bits, same seeds, same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pagedattn.errors import UnsupportedError

from .config import ModelConfig
from .decoder import Decoder
from .fused_ops import linear
from .tensor_slice import TensorSlice
from .tp_group import TPGroup


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Which part of a model is a rank's: half-open ranges of heads, KV heads, MLP channels and vocabulary."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    channels: tuple[int, int]
    tokens: tuple[int, int]

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> ShardSpec:
        """The share of a rank. Where ranks outnumber KV heads, neighbours hold copies of the same one.

        Raises:
            UnsupportedError: the model cannot be cut into `size` parts; says which sizes it can be cut into.
        """
        problem = _why_not(config, size)
        if problem:
            possible = [n for n in range(1, config.num_heads + 1) if not _why_not(config, n)]
            raise UnsupportedError(f"tensor_parallel_size={size}: {problem}; possible: {possible}")
        kv_heads = config.num_kv_heads
        first = rank * kv_heads // size
        return cls(
            heads=_part(config.num_heads, rank, size),
            kv_heads=(first, first + max(1, kv_heads // size)),
            channels=_part(config.intermediate_size, rank, size),
            tokens=columns_of(config.vocab_size, rank, size),
        )

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank sees it: fewer heads, a narrower MLP."""
        return replace(
            config,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.channels),
        )


class RowParallelLinear(nn.Module):
    """A linear layer of which every rank has some input features; its output is the sum over ranks, plus the bias."""

    def __init__(self, whole: nn.Linear, ranks: TPGroup) -> None:
        """Take over the parameters of `whole`, which was made with this rank's input features."""
        super().__init__()
        self.weight, self.bias, self._ranks = whole.weight, whole.bias, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, own features] to the same [T, out_features] on every rank."""
        out = self._ranks.all_reduce(linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)


def columns_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Which of `count` columns a rank has, first and end: count / size rounded up, and of the last ranks fewer."""
    width = -(-count // size)
    return min(rank * width, count), min((rank + 1) * width, count)


def gather_columns(own: torch.Tensor, count: int, ranks: TPGroup) -> torch.Tensor:
    """The columns of every rank, [n, those of `columns_of`], as the same [n, count] on every rank."""
    _, width = columns_of(count, 0, ranks.size)
    if own.shape[1] < width:
        own = nn.functional.pad(own, (0, width - own.shape[1]))
    return ranks.all_gather(own).transpose(0, 1).flatten(1)[:, :count]


class ShardedDecoder(Decoder):
    """A rank's share of a decoder; every rank calls it with the same step and gets the same logits."""

    def __init__(self, ranks: TPGroup, config: ModelConfig, *, dtype: torch.dtype, **options: Any) -> None:
        """As `Decoder`, of which `config` describes the whole.

        Raises:
            UnsupportedError: as `ShardSpec.of`.
        """
        share = ShardSpec.of(config, ranks.rank, ranks.size)
        super().__init__(share.local(config), dtype=dtype, **options)
        self.share, self._whole, self._ranks = share, config, ranks
        for name, module in list(self.named_modules()):
            if name.endswith((".self_attn.o_proj", ".mlp.down_proj")) and isinstance(module, nn.Linear):
                self.set_submodule(name, RowParallelLinear(module, ranks))
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, _length(share.tokens), False, "meta", dtype)

    @property
    def kv_heads(self) -> slice:
        """Which of the model's KV heads are here."""
        return slice(*self.share.kv_heads)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `Decoder.logits`, on every rank the whole vocabulary."""
        tied = self.config.tie_word_embeddings
        weight = self.embed_tokens.weight[slice(*self.share.tokens)] if tied else self.lm_head.weight
        logits = gather_columns(hidden @ weight.t(), self.config.vocab_size, self._ranks)
        return logits if out is None else out.copy_(logits)

    def checkpoint_cuts(self) -> Mapping[str, TensorSlice]:
        """As `Decoder.checkpoint_cuts`: this rank's part of each tensor."""
        whole, share = self._whole, self.share
        dim, hidden = whole.head_dim, whole.hidden_size
        rows = {
            "self_attn.q_proj": (share.heads, dim, whole.num_heads * dim),
            "self_attn.k_proj": (share.kv_heads, dim, whole.num_kv_heads * dim),
            "self_attn.v_proj": (share.kv_heads, dim, whole.num_kv_heads * dim),
            "mlp.gate_proj": (share.channels, 1, whole.intermediate_size),
            "mlp.up_proj": (share.channels, 1, whole.intermediate_size),
        }
        columns = {
            "self_attn.o_proj": (share.heads, dim, whole.num_heads * dim),
            "mlp.down_proj": (share.channels, 1, whole.intermediate_size),
        }
        # Tied, the head is the embedding's, and a copy of it in the checkpoint is compared with the whole of that.
        tied = whole.tie_word_embeddings
        cuts = {} if tied else {"lm_head.weight": TensorSlice(0, *share.tokens, (whole.vocab_size, hidden))}
        for layer in range(whole.num_layers):
            for name, ((first, end), unit, full) in rows.items():
                key = f"model.layers.{layer}.{name}"
                cuts[f"{key}.weight"] = TensorSlice(0, first * unit, end * unit, (full, hidden))
                cuts[f"{key}.bias"] = TensorSlice(0, first * unit, end * unit, (full,))
            for name, ((first, end), unit, full) in columns.items():
                cuts[f"model.layers.{layer}.{name}.weight"] = TensorSlice(1, first * unit, end * unit, (hidden, full))
        return cuts


def _why_not(config: ModelConfig, size: int) -> str:
    """What of a model cannot be cut into `size` parts; empty where all of it can."""
    kv_heads = config.num_kv_heads
    if config.num_heads % size:
        return f"it must divide the model's {config.num_heads} attention heads"
    if kv_heads % size and size % kv_heads:
        return f"it must divide the model's {kv_heads} KV heads, or be a multiple of them"
    if config.intermediate_size % size:
        return f"it must divide the model's intermediate_size of {config.intermediate_size}"
    return ""


def _part(whole: int, rank: int, size: int) -> tuple[int, int]:
    return rank * (whole // size), (rank + 1) * (whole // size)


def _length(part: tuple[int, int]) -> int:
    return part[1] - part[0]
