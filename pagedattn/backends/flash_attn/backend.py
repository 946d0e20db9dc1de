"""FLASH_ATTN: FlashAttention 2 or 3, the better one that is installed and serves the spec."""

from __future__ import annotations

import torch

from ...call import AttentionCall
from ...errors import InvalidInputError, UnsupportedError
from ...spec import AttentionSpec
from ...spec.capabilities import Capabilities, Rejection
from ..base import AttentionBackend, AttentionImpl, AttentionMetadata, Availability, check_matches_spec
from .calls import fa2, fa3
from .metadata import FlashAttnBuilder, FlashAttnMetadata
from .versions import FA3, VERSIONS, FlashAttnVersion, candidates, library, pick, version_for


class FlashAttnImpl(AttentionImpl):
    """Attention by the version that serves the spec."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        library(version_for(spec))  # fails here, not in the first call

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        if not isinstance(metadata, FlashAttnMetadata):
            got = type(metadata).__name__
            raise InvalidInputError("metadata", "of FLASH_ATTN", got, "build it with the layer")
        check_matches_spec(self.spec, call)
        if self.spec.kv_scale == "none" and (call.k_scale is not None or call.v_scale is not None):
            raise UnsupportedError("FLASH_ATTN was told of no scales; the spec must announce them (kv_scale)")
        (key, _), query, dim = call.keys_and_values, call.query, self.spec.value_dim
        empty = not key.numel() or (call.kv_cache is not None and metadata.common.block_table.shape[1] == 0)
        if empty or not len(query) or not metadata.common.num_seqs:
            if call.lse is not None:
                call.lse.fill_(-torch.inf)
            return call.output(dim).zero_()
        run = fa2 if metadata.version.number == 2 else fa3
        result, lse = run(library(metadata.version), call, self.spec, metadata)
        if call.lse is not None and lse is not None:
            call.lse[: len(lse)].copy_(lse)
        if call.out is None and len(result) == len(query):
            return result.to(query.dtype)  # FA3 computes bfloat16 from fp8
        out = call.output(dim)  # with rows past the last sequence
        out[: len(result)].copy_(result)
        return out


class FlashAttnBackend(AttentionBackend):
    """FlashAttention (Dao et al., 2022 to 2024)."""

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
        if state.ok:  # but not the version asked for
            hint = "set PAGEDATTN_FLASH_ATTN to the one to use, or unset it"
            found = "; ".join(filter(None, (f"found {state.version}", state.reason)))
            return [Rejection("availability", cls.name, found, hint)]
        return [Rejection("availability", cls.name, state.reason, state.hint)]


def _labelled(version: FlashAttnVersion, reason: Rejection, several: bool) -> Rejection:
    text = f"{version.label}: {reason.supported}" if several else reason.supported
    return Rejection(reason.feature, reason.requested, text, reason.hint)
