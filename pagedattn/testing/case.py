"""Case: the values of one attention problem, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..spec import AttentionSpec, AttentionType, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. `paged=False` attends to the given keys; `cross` is decided by attn_type.

    `latent_dim`: latent attention over rows of head_dim elements, whose first latent_dim are the value.

    `shared_prefix`: the number of first tokens, whole blocks, that all sequences but padding have in the same blocks.
    """

    query_lens: tuple[int, ...] = (5, 1, 17)
    seq_lens: tuple[int, ...] = (5, 37, 40)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    head_dim_v: int | None = None
    latent_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "NHD"
    attn_type: AttentionType = AttentionType.DECODER
    causal: bool | None = None
    sliding_window: int | None = None
    mask: Mask | None = None  # in place of both
    softcap: float | None = None
    alibi: bool = False
    sinks: float | None = None
    scale: float | None = None
    paged: bool = True
    lse: bool = True
    share_blocks: bool = False
    shared_prefix: int = 0
    fused_qkv: bool = False
    padding_rows: int = 0
    poison: float = float("nan")
    clean_cache: bool = False
    kv_cache_dtype: str = "auto"
    kv_scale: str = "none"
    deterministic: bool = False
    poison_behind: bool = False
    magnitude: float = 1.0
    write: bool = True
    scales_by_slot: bool = False
    note: str = ""

    @property
    def id(self) -> str:
        """What differs from the default case, as a test id."""
        default = Case()
        parts = []
        for name in self.__slots__:
            value = getattr(self, name)
            if value != getattr(default, name) and name not in ("note", "poison"):
                text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                text = text.removeprefix("torch.").removeprefix("AttentionType.")
                parts.append(f"{name}={text if len(text) < 24 else text[:21] + '...'}")
        return self.note or "-".join(parts) or "default"

    def spec(self, device: torch.device) -> AttentionSpec:
        """The AttentionSpec that this case asks for on `device`."""
        return AttentionSpec(
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            latent_dim=self.latent_dim,
            dtype=self.dtype,
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            block_size=self.block_size if self.paged else None,
            cache_layout=self.layout,
            attn_type=self.attn_type,
            mask=Mask(self.causal, self.sliding_window) if self.mask is None else self.mask,
            softcap=self.softcap,
            has_alibi=self.alibi,
            has_sinks=self.sinks is not None,
            needs_lse=self.lse,
            scale=self.scale,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_scale=self.kv_scale,
            clean_cache=self.clean_cache,
            deterministic=self.deterministic,
        )

    @property
    def unused(self) -> float:
        """What lies in slots that were not written: zeros in a clean cache, poison elsewhere."""
        return 0.0 if self.clean_cache else self.poison

    def but(self, **changes: Any) -> Case:
        """The same case with other values."""
        return replace(self, **changes)
