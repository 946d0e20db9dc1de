"""FLASH_MLA: absorbed latent attention (MLA) by FlashMLA's kernel over 16-bit rows, on Hopper GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch

from ...call import AttentionCall
from ...errors import InvalidInputError
from ...runtime.distributions import release_of
from ...spec import AttentionSpec, GraphLevel
from ...spec.capabilities import NO_INTEGERS, Capabilities, IntRange, Rejection
from ..base import AttentionBackend, AttentionImpl, AttentionMetadata, Availability, check_matches_spec
from .metadata import BLOCK_SIZE, INSTALL, FlashMLABuilder, FlashMLAMetadata, library

_LATENT_DIM, _ROPE_DIM = 512, 64  # all that its kernel is compiled for
_HINTS = {
    **dict.fromkeys(("latent_dim", "rope_dim"), "its kernel is compiled for rows of 512 + 64; use TRITON or TORCH"),
    **dict.fromkeys(("sliding_window", "softcap"), "its kernel has no such argument; use TRITON or TORCH"),
    "capability": "its kernel over 16-bit rows is for Hopper; use TRITON",
    "compile": "the first call of a step makes its schedule; use TRITON",
}


class FlashMLAImpl(AttentionImpl):
    """`flash_mla_with_kvcache` over the latent rows of a layer."""

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        """See the base class.

        Raises:
            InvalidInputError: another backend's metadata, no cache, blocks of another size, or too few query rows.
        """
        if not isinstance(metadata, FlashMLAMetadata):
            got = type(metadata).__name__
            raise InvalidInputError("metadata", "of FLASH_MLA", got, "build it with the layer")
        check_matches_spec(self.spec, call)
        if call.kv_cache is None:
            raise InvalidInputError("kv_cache", "a cache of latent rows", "None", "attend to expanded keys and values")
        rows, query, count = call.kv_cache.key, call.query, metadata.num_rows
        if rows.shape[1] != BLOCK_SIZE:
            remedy = "build the cache with Selection.block_size"
            raise InvalidInputError("kv_cache", f"blocks of {BLOCK_SIZE} tokens", rows.shape[1], remedy)
        if len(query) < count:
            raise InvalidInputError("query", f"at least {count} rows, as the metadata says", len(query))
        if not count or not metadata.block_table.shape[1]:
            if call.lse is not None:
                call.lse.fill_(-torch.inf)
            return call.output(_LATENT_DIM).zero_()
        got, lse = library().flash_mla_with_kvcache(
            query[:count].unflatten(0, (-1, metadata.tokens)),
            rows,
            metadata.block_table,
            metadata.seq_lens,
            _LATENT_DIM,
            *metadata.schedule(self.spec.num_heads),
            softmax_scale=self.spec.softmax_scale,
            causal=bool(self.spec.causal),
        )
        if call.lse is not None:  # [B, H, tokens], +inf where a row sees no key
            natural = lse.transpose(1, 2).flatten(0, 1)
            call.lse[:count].copy_(natural.masked_fill(natural == torch.inf, -torch.inf))
        got = got.flatten(0, 1)
        if call.out is None and count == len(query):
            return got
        out = call.output(_LATENT_DIM)
        out[:count].copy_(got)
        return out


class FlashMLABackend(AttentionBackend):
    """FlashMLA (DeepSeek, 2025). It serves absorbed latent attention and nothing else.

    Not for torch.compile: a step's schedule is made by its first call.
    """

    name = "FLASH_MLA"
    builder = FlashMLABuilder
    impl = FlashMLAImpl

    @classmethod
    def availability(cls) -> Availability:
        return _availability()

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=("cuda",),
            min_capability=(9, 0),
            max_capability=(9, 0),
            dtypes=(torch.float16, torch.bfloat16),
            head_dims=NO_INTEGERS,
            latent_dims=IntRange(values=(_LATENT_DIM,)),
            rope_dims=IntRange(values=(_ROPE_DIM,)),
            block_sizes=IntRange(values=(BLOCK_SIZE,)),
            default_block_size=BLOCK_SIZE,
            cache_layouts=("NHD", "HND"),
            non_causal=True,
            lse=True,
            graph_level=GraphLevel.ALWAYS,
        )

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        if spec.latent_dim is None:
            state = cls.availability()
            missing = [] if state.ok else [Rejection("availability", cls.name, state.reason, state.hint)]
            return [*missing, Rejection("latent_dim", None, _LATENT_DIM, "it serves latent attention (MLA) only")]
        return [
            replace(reason, hint=reason.hint or _HINTS.get(reason.feature, "")) for reason in super().rejections(spec)
        ]


@cache
def _availability() -> Availability:
    if find_spec("flash_mla") is None:
        return Availability(ok=False, reason="flash_mla is not installed", hint=INSTALL)
    return Availability(ok=True, version=release_of("flash_mla") or "unknown version")
