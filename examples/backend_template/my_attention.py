"""A backend in plain torch, to copy and to put a kernel into: padded to the longest, all sequences attend at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedattn import (
    AttentionBackend,
    AttentionCall,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from pagedattn.backends.base import Availability, check_matches_spec
from pagedattn.errors import UnsupportedError
from pagedattn.spec import AttentionSpec, Capabilities, IntRange, Rejection


@dataclass(slots=True)
class MyMetadata(AttentionMetadata):
    """What all layers of one step share: B sequences padded to Q query rows and K keys."""

    rows: torch.Tensor  # [B, Q] the query row of each place
    places: tuple[torch.Tensor, torch.Tensor]  # [n] and [n]: the sequence and the place of each query row
    keys: torch.Tensor  # [B, K] 0, 1, ..., clipped to the sequence's last key
    packed: torch.Tensor  # [B, K] its row where keys are packed, without a cache
    live: torch.Tensor  # [B, K] whether it is a key of the sequence
    visible: torch.Tensor  # [B, Q, K] whether the token may attend to it


class MyMetadataBuilder(AttentionMetadataBuilder):
    """Runs once per step: what all its layers share is computed here."""

    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        if capture or into is not None:
            raise UnsupportedError("MINE cannot be captured; its capabilities say so (graph_level)")
        device, starts = common.seq_lens.device, common.query_start_loc.long()
        query_lens, seq_lens = starts.diff()[:, None], common.seq_lens.long()[:, None]
        place, key = (torch.arange(n, device=device)[None] for n in (common.max_query_len, common.max_seq_len))
        row = torch.arange(common.num_tokens, device=device)
        owner = torch.searchsorted(starts[1:], row, right=True).clamp(max=max(common.num_seqs - 1, 0))
        live = key < seq_lens
        position = seq_lens - query_lens + place  # causal is bottom-right aligned: the last query sees the last key
        return MyMetadata(
            common,
            rows=(starts[:-1, None] + place).clamp(max=max(common.num_tokens - 1, 0)),
            places=(owner, (row - starts[owner]).clamp(max=max(common.max_query_len - 1, 0))),
            keys=torch.where(live, key, 0),
            packed=torch.where(live, seq_lens.cumsum(0) - seq_lens + key, 0),
            live=live,
            visible=live[:, None] & (key[:, None] <= position[..., None]),
        )


class MyImpl(AttentionImpl):
    """Runs once per layer. Nothing here waits for the GPU. `write_kv`, inherited, fills the cache before."""

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        check_matches_spec(self.spec, call)
        if not isinstance(metadata, MyMetadata):
            raise TypeError(f"metadata must be MyMetadata, got {type(metadata).__name__}; build it with the layer")
        key, value = call.keys_and_values
        if call.kv_cache is None:  # [T', Hkv, D]
            at = (metadata.packed,)
        else:  # [P, S, Hkv, D], with strides of any order
            block = metadata.common.block_table.gather(1, metadata.keys // key.shape[1]).long()
            at = torch.where(metadata.live, block, 0), metadata.keys % key.shape[1]
        wide = torch.promote_types(call.query.dtype, torch.float32)
        q = call.query[metadata.rows].to(wide).unflatten(2, (self.spec.kv_heads, -1))  # [B, Q, Hkv, G, D]
        k, v = key[at].to(wide), value[at].to(wide)  # [B, K, Hkv, D]
        v = torch.where(metadata.live[..., None, None], v, 0)  # 0 * NaN is NaN: unused slots may hold anything
        logits = torch.einsum("bqhgd,bkhd->bqhgk", q, k) * self.spec.softmax_scale
        logits = logits.masked_fill(~metadata.visible[:, :, None, None], -torch.inf)
        lse = logits.logsumexp(-1)  # [B, Q, Hkv, G], -inf where there is no key: the output is 0 there
        weights = logits.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0)
        out, n = call.output(self.spec.value_dim), metadata.common.num_tokens
        out[:n] = torch.einsum("bqhgk,bkhd->bqhgd", weights, v)[metadata.places].flatten(1, 2)
        if call.lse is not None:
            call.lse[:n] = lse[metadata.places].flatten(1, 2)
        return out


class MyBackend(AttentionBackend):
    """The facts. What is not stated here is refused with a reason, and neither called nor tested."""

    name, builder, impl = "MINE", MyMetadataBuilder, MyImpl

    @classmethod
    def availability(cls) -> Availability:
        return Availability(ok=True, version="0.1.0")  # import your library here: ok=False, reason=..., hint="pip ..."

    @classmethod
    def capabilities(cls) -> Capabilities:
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        shapes = {"head_dims": IntRange(), "any_head_dim_v": True, "block_sizes": IntRange()}
        return Capabilities(devices=("cpu", "cuda"), dtypes=dtypes, cache_layouts=("NHD", "HND"), lse=True, **shapes)

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        return super().rejections(spec)  # what capabilities cannot say, such as "no fp16 with head_dim 512"
