"""FLASH_ATTN: FlashAttention 2, 3 or 4, the best that is installed and serves the spec."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError, UnsupportedError
from ...formats.base import LayerCache
from ...spec import AttentionSpec, Scale
from ...spec.capabilities import Capabilities, Rejection
from ..base import AttentionBackend, AttentionImpl, AttentionMetadata, Availability, check_announced
from .calls import Call, fa2, fa3, fa4
from .metadata import FlashAttnBuilder, FlashAttnMetadata
from .versions import FA3, VERSIONS, FlashAttnVersion, candidates, library, pick, version_for

_CALLS = {2: fa2, 3: fa3, 4: fa4}


class FlashAttnImpl(AttentionImpl):
    """Attention by the version that serves the spec."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        library(version_for(spec))  # fails here, not in the first call

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
        if not isinstance(metadata, FlashAttnMetadata):
            got = type(metadata).__name__
            raise InvalidInputError("metadata", "of FLASH_ATTN", got, "build it with the layer")
        check_announced(self.spec, sinks, alibi_slopes, q_scale)
        if k_scale is not None or v_scale is not None:
            raise UnsupportedError("FLASH_ATTN reads no scaled caches; the spec must announce scales (kv_scale)")
        keys, values = (key, value) if kv_cache is None else (kv_cache.key, kv_cache.value)
        if keys is None or values is None:
            raise InvalidInputError("key and value", "given where there is no kv_cache", "None")
        if not len(query) or not metadata.common.num_seqs:
            return _nothing(query, self.spec.value_dim, out), _no_keys(query) if return_lse else None
        if keys.numel() == 0 or (kv_cache is not None and metadata.common.block_table.shape[1] == 0):
            return _nothing(query, self.spec.value_dim, out).zero_(), _no_keys(query) if return_lse else None
        paged = kv_cache is not None
        call = Call(self.spec, metadata, query, keys, values, paged, sinks, alibi_slopes, return_lse)
        result, lse = _CALLS[metadata.version.number](library(metadata.version), call)
        if len(result) < len(query):  # rows past the last sequence
            full = _nothing(query, self.spec.value_dim, out)
            full[: len(result)] = result
            lse = None if lse is None else torch.nn.functional.pad(lse, (0, 0, 0, len(query) - len(result)))
            return full, lse
        return (result, lse) if out is None else (out.copy_(result), lse)


class FlashAttnBackend(AttentionBackend):
    """FlashAttention (Dao et al., 2022 to 2026)."""

    name = "FLASH_ATTN"
    builder = FlashAttnBuilder
    impl = FlashAttnImpl

    @classmethod
    def availability(cls) -> Availability:
        found = [one.describe_release() for one in VERSIONS if one.module() is not None]
        refused = "; ".join(filter(None, (one.refusal() for one in VERSIONS)))
        if found:
            return Availability(ok=True, version=", ".join(found), reason=refused)
        hint = "; ".join(f"{one.label}: {one.install}" for one in VERSIONS)
        return Availability(ok=False, reason=refused or "no version of FlashAttention is installed", hint=hint)

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Of the version that is tried first here; `rejections` asks all that are installed."""
        return next(iter([*candidates(), FA3])).capabilities

    @classmethod
    def variant(cls, spec: AttentionSpec) -> str:
        version = pick(spec)
        return "" if version is None else f"{version.label} via {version.module()}"

    @classmethod
    def preferred_block_size(cls, spec: AttentionSpec) -> int:
        return (pick(spec) or FA3).capabilities.default_block_size

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        tried = [(one, one.rejections(spec)) for one in candidates() if one.module() is not None]
        if any(not reasons for _, reasons in tried):
            return []
        if tried:
            return [_labelled(one, reason, len(tried) > 1) for one, reasons in tried for reason in reasons]
        state = cls.availability()
        if state.ok:  # but not the version asked for, or none that is chosen unasked
            hint = "set PAGEDATTN_FLASH_ATTN to the one to use (FA4 is untested here and never chosen unasked)"
            found = "; ".join(filter(None, (f"found {state.version}", state.reason)))
            return [Rejection("availability", cls.name, found, hint)]
        return [Rejection("availability", cls.name, state.reason, state.hint)]


def _labelled(version: FlashAttnVersion, reason: Rejection, several: bool) -> Rejection:
    text = f"{version.label}: {reason.supported}" if several else reason.supported
    return Rejection(reason.feature, reason.requested, text, reason.hint)


def _nothing(query: torch.Tensor, dim: int, out: torch.Tensor | None) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], dim) if out is None else out


def _no_keys(query: torch.Tensor) -> torch.Tensor:
    return torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
