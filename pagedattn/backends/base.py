"""The contract of a backend: facts as data, a metadata builder run once per step, an implementation run per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..capabilities import Capabilities, Rejection
from ..kv_cache import LayerCache
from ..metadata import CommonAttentionMetadata
from ..spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here at all: the version found, or why not and what to type."""

    ok: bool
    version: str = ""
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that static buffers must hold."""

    max_seqs: int
    max_tokens: int
    max_blocks_per_seq: int


@dataclass(slots=True)
class AttentionMetadata:
    """What a builder makes of one step. Backends add fields; integers inside captured metadata are bounds."""

    common: CommonAttentionMetadata

    def describe(self) -> str:
        """Which kernel and path will run on this step."""
        return type(self).__name__


class AttentionMetadataBuilder(ABC):
    """Makes metadata once per step for each (KV group, spec); all host work of a backend happens here."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.spec, self.device, self.limits, self.workspace = spec, device, limits, workspace

    @abstractmethod
    def build(self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None) -> AttentionMetadata:
        """Metadata of a step. `into` rewrites the static buffers of captured metadata in place and returns it."""

    def device_update(self, metadata: AttentionMetadata) -> None:
        """The part of `build` that a CUDA graph may capture; nothing by default."""
        return None


class AttentionImpl(ABC):
    """Runs one layer's attention. Stateless but for the spec."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
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
        q_scale: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, writing nothing to the cache.

        Args:
            query: [T, Hq, D]. key, value: [T', Hkv, D] and [T', Hkv, Dv], read only where kv_cache is None.
            kv_cache: the layer's cache, already written; None for dense attention over packed key and value.
            out: [T, Hq, Dv]. sinks, alibi_slopes: [Hq], exactly where the spec announces them.

        Returns:
            output [T, Hq, Dv], and LSE [T, Hq] float32 (natural log) with return_lse, else None.
        """

    @abstractmethod
    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Write the first len(slot_mapping) rows of key [T', Hkv, D] and value [T', Hkv, Dv] to their slots."""


class AttentionBackend(ABC):
    """Class-level facts; never instantiated."""

    name: str
    builder: type[AttentionMetadataBuilder]
    impl: type[AttentionImpl]

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Whether its library can be imported here."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """What it serves, as data."""

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        """Every reason why it cannot serve `spec`; none means that it can."""
        state = cls.availability()
        missing = [] if state.ok else [Rejection("availability", cls.name, state.reason, state.hint)]
        return [*missing, *cls.capabilities().rejections(spec)]
