"""A backend in plain torch, to copy and to put a kernel into: padded to the longest, all sequences attend at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedattn import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder, LayerCache
from pagedattn.backends.base import Availability, check_announced
from pagedattn.errors import UnsupportedError
from pagedattn.spec import AttentionSpec, Capabilities, IntRange, Rejection, Scale
from pagedattn.step.metadata import CommonAttentionMetadata


@dataclass(slots=True)
class MyMetadata(AttentionMetadata):
    """What all layers of one step share: B sequences padded to Q query rows and K keys."""

    rows: torch.Tensor  # [B, Q] the query row of each place
    places: tuple[torch.Tensor, torch.Tensor]  # [n] and [n]: the sequence and the place of each query row
    keys: torch.Tensor  # [B, K] 0, 1, ..., clipped to the sequence's last key
    live: torch.Tensor  # [B, K] whether it is a key of the sequence
    visible: torch.Tensor  # [B, Q, K] whether the token may attend to it


class MyMetadataBuilder(AttentionMetadataBuilder):
    """Runs once per step: whatever the layers would compute again and again belongs here."""

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
            live=live,
            visible=live[:, None] & (key[:, None] <= position[..., None]),
        )


class MyImpl(AttentionImpl):
    """Runs once per layer. Nothing here waits for the GPU. `write_kv`, inherited, fills the cache before."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: LayerCache | None,
        metadata: AttentionMetadata,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check_announced(self.spec, sinks, alibi_slopes, q_scale)
        if not isinstance(metadata, MyMetadata):
            raise TypeError(f"metadata must be MyMetadata, got {type(metadata).__name__}; build it with the layer")
        if kv_cache is not None:  # [P, S, Hkv, D], with strides of any order
            key, value, size = kv_cache.key, kv_cache.value, kv_cache.key.shape[1]
            block = metadata.common.block_table.gather(1, metadata.keys // size).long()
            block, slot = torch.where(metadata.live, block, 0), metadata.keys % size
        elif key is not None and value is not None:  # packed [T', Hkv, D], as one large block
            lens = metadata.common.seq_lens.long()
            key, value, block = key[None], value[None], torch.zeros_like(metadata.keys)
            slot = torch.where(metadata.live, (lens.cumsum(0) - lens)[:, None] + metadata.keys, 0)
        else:
            raise TypeError("forward without a cache needs key and value")
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query[metadata.rows].to(wide).unflatten(2, (self.spec.kv_heads, -1))  # [B, Q, Hkv, G, D]
        k, v = key[block, slot].to(wide), value[block, slot].to(wide)  # [B, K, Hkv, D]
        v = torch.where(metadata.live[..., None, None], v, 0)  # 0 * NaN is NaN: unused slots may hold anything
        logits = torch.einsum("bqhgd,bkhd->bqhgk", q, k) * self.spec.softmax_scale
        logits = logits.masked_fill(~metadata.visible[:, :, None, None], -torch.inf)
        lse = logits.logsumexp(-1)  # [B, Q, Hkv, G], -inf where there is no key: the output is 0 there
        weights = logits.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0)
        rows = torch.einsum("bqhgk,bkhd->bqhgd", weights, v)[metadata.places].flatten(1, 2)  # [n, Hq, Dv]
        out = query.new_empty(*query.shape[:2], self.spec.value_dim) if out is None else out
        out[: len(rows)] = rows
        return out, lse[metadata.places].flatten(1, 2).float() if return_lse else None


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
