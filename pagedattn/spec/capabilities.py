"""Capabilities: what a backend serves, as data; and the comparison with a spec that says why it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .attention import AttentionSpec, AttentionType, GraphLevel


@dataclass(frozen=True, slots=True)
class Rejection:
    """One reason why a backend cannot serve a spec: the feature, what was asked, what it serves, and what to do."""

    feature: str
    requested: object
    supported: object
    hint: str = ""

    def __str__(self) -> str:
        unavailable = f"not available: {self.supported}"
        known = f"{self.feature}={self.requested} (serves {self.supported})"
        text = unavailable if self.feature == "availability" else known
        return f"{text}: {self.hint}" if self.hint else text


@dataclass(frozen=True, slots=True)
class IntRange:
    """A set of integers as data: `values` if given, else low..high in steps of `multiple_of`."""

    low: int = 1
    high: int | None = None
    multiple_of: int = 1
    values: tuple[int, ...] | None = None

    def __contains__(self, item: int) -> bool:
        if self.values is not None:
            return item in self.values
        return item >= self.low and (self.high is None or item <= self.high) and item % self.multiple_of == 0

    def __str__(self) -> str:
        if self.values is not None:
            return ", ".join(map(str, self.values)) or "-"
        text = f"{self.low}..{self.high}" if self.high is not None else f"{self.low} and more"
        return text if self.multiple_of == 1 else f"multiples of {self.multiple_of} in {text}"


NO_INTEGERS = IntRange(values=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Everything a backend serves. What is not named here it does not serve."""

    devices: tuple[str, ...]
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...]
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    kv_scales: tuple[str, ...] = ("none",)
    head_dims: IntRange
    any_head_dim_v: bool = False
    latent_dims: IntRange = NO_INTEGERS  # of absorbed latent attention (MLA), whose rows `head_dims` does not describe
    rope_dims: IntRange = NO_INTEGERS
    latent_kv_cache_dtypes: tuple[str, ...] = ("auto",)  # formats of latent rows, in place of `kv_cache_dtypes`
    block_sizes: IntRange
    default_block_size: int = 16
    cache_layouts: tuple[str, ...] = ("NHD",)
    gqa_ratios: IntRange = IntRange()
    attn_types: tuple[AttentionType, ...] = (AttentionType.DECODER,)
    non_causal: bool = False
    masks: tuple[str, ...] = ()  # features of a `Mask` beyond causality
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    rounded_lse: bool = False  # sums probabilities in the query's dtype: off by up to half a unit in its last place
    rounded_states: bool = False  # the outputs of parts of the keys are in the query's dtype before they are added up
    fp8_products: bool = False  # may multiply fp8 keys as fp8, which a tensor core sums to 13 bits: logits are as exact
    fp8_queries: bool = False  # rounds queries and probabilities to fp8 over fp8 caches: off by percents
    context_parallel: bool = False
    deterministic: bool = False
    compile: bool = False
    graph_level: GraphLevel = GraphLevel.NEVER
    needs_clean_cache: bool = False

    def rejections(self, spec: AttentionSpec) -> list[Rejection]:
        """Every way in which `spec` asks for more than this."""
        return [*self._value_rejections(spec), *self._feature_rejections(spec)]

    @property
    def serves_mla(self) -> bool:
        """Whether any latent attention is served."""
        return self.latent_dims != NO_INTEGERS

    def rounds_queries(self, spec: AttentionSpec) -> bool:
        """Whether attention of `spec` is by queries and probabilities of 8 bits, which `fp8_queries` says."""
        return self.fp8_queries and spec.uses_cache and spec.kv_cache_dtype.startswith("fp8")

    def _value_rejections(self, spec: AttentionSpec) -> list[Rejection]:
        latent = spec.latent_dim is not None and self.serves_mla
        formats = self.latent_kv_cache_dtypes if latent else self.kv_cache_dtypes
        kinds = tuple(kind.value for kind in self.attn_types)
        members: list[tuple[str, Any, Any, str]] = [
            ("device_type", spec.device_type, self.devices, ""),
            ("dtype", _short(spec.dtype), tuple(map(_short, self.dtypes)), "cast the model"),
            ("kv_cache_dtype", spec.format.encoded_as, formats, "build the cache with one of these"),
            ("kv_scale", spec.kv_scale, self.kv_scales, ""),
            ("gqa_ratio", spec.gqa_ratio, self.gqa_ratios, ""),
            ("cache_layout", spec.cache_layout, self.cache_layouts, "build the cache with this layout"),
            ("attn_type", spec.attn_type.value, kinds, ""),
        ]
        if spec.latent_dim is None:
            members.append(("head_dim", spec.head_dim, self.head_dims, ""))
        elif self.serves_mla:
            members.append(("latent_dim", spec.latent_dim, self.latent_dims, ""))
            members.append(("rope_dim", spec.rope_dim, self.rope_dims, ""))
        out = [Rejection(name, got, _join(has), hint) for name, got, has, hint in members if got not in has]
        if spec.block_size is not None and spec.block_size not in self.block_sizes:
            hint = f"build the cache with block_size={self.default_block_size}"
            out.append(Rejection("block_size", spec.block_size, str(self.block_sizes), hint))
        if spec.latent_dim is not None:
            out += self._latent_rejections(spec)
        elif spec.value_dim != spec.head_dim and not self.any_head_dim_v:
            out.append(Rejection("head_dim_v", spec.value_dim, f"head_dim ({spec.head_dim}) only"))
        if spec.has_recent:
            out += self._recent_rejections(spec)
        if spec.capability is not None:
            if self.min_capability is not None and spec.capability < self.min_capability:
                out.append(Rejection("capability", spec.capability, f"at least {self.min_capability}"))
            if self.max_capability is not None and spec.capability > self.max_capability:
                out.append(Rejection("capability", spec.capability, f"at most {self.max_capability}"))
        return out

    def _latent_rejections(self, spec: AttentionSpec) -> list[Rejection]:
        """What no backend has for latent attention, or this one has not at all."""
        if not self.serves_mla:
            return [Rejection("latent_dim", spec.latent_dim, "none", "it does not serve latent attention (MLA)")]
        asked = (
            ("attn_type", spec.attn_type is not AttentionType.DECODER, spec.attn_type.value, "decoder"),
            ("has_alibi", spec.has_alibi, True, "none"),
            ("has_sinks", spec.has_sinks, True, "none"),
            ("mask_mod", spec.mask.mask_mod is not None, "a function", "none"),
        )
        return [Rejection(name, value, f"{has} with latent_dim") for name, wanted, value, has in asked if wanted]

    def _recent_rejections(self, spec: AttentionSpec) -> list[Rejection]:
        """What stands against attention over full and open blocks, which is two calls with masks of their own."""
        masks = ["own_block", "earlier_blocks", *(["recent_blocks"] if spec.format.window else [])]
        masks += ["from_block", "to_block"] if spec.format.first else []
        asked = (
            ("attn_type", spec.attn_type is not AttentionType.DECODER, spec.attn_type.value, "decoder"),
            ("causal", not spec.causal, False, "causal attention"),
            ("own_block", spec.mask.own_block is not None, spec.mask.own_block, "none"),
            ("masks", not {*masks} <= {*self.masks}, ", ".join(masks), "not all of them"),
            ("needs_lse", not self.lse, True, "no backend without LSE"),
        )
        name = spec.kv_cache_dtype
        hint = "take a format that stores each token when it comes, as int8"
        return [Rejection(what, got, f"{has} over {name}", hint) for what, wanted, got, has in asked if wanted]

    def _feature_rejections(self, spec: AttentionSpec) -> list[Rejection]:
        told = spec.latent_dim is not None and self.serves_mla  # by _latent_rejections
        asked = (
            ("causal", not spec.causal, self.non_causal, False),
            ("softcap", spec.softcap is not None, self.softcap, spec.softcap),
            ("has_alibi", spec.has_alibi and not told, self.alibi, True),
            ("has_sinks", spec.has_sinks and not told, self.sinks, True),
            ("needs_lse", spec.needs_lse, self.lse, True),
            ("context_parallel", spec.context_parallel is not None, self.context_parallel, spec.context_parallel),
            ("deterministic", spec.deterministic, self.deterministic, True),
            ("compile", spec.compile, self.compile, True),
        )
        unserved = spec.mask.unserved(self.masks)
        out = [Rejection(name, getattr(spec.mask, name), "none") for name in unserved]
        out += [Rejection(name, value, "none") for name, wanted, served, value in asked if wanted and not served]
        if spec.graph_level > self.graph_level:
            out.append(Rejection("graph_level", spec.graph_level.name, f"up to {self.graph_level.name}"))
        if self.needs_clean_cache and spec.uses_cache and not spec.clean_cache:
            hint = "set clean_cache=True and call PagedKVCache.zero_blocks on every block the pool hands out"
            out.append(Rejection("clean_cache", False, "clean caches only", hint))
        return out


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(values: tuple[object, ...] | IntRange) -> str:
    return ", ".join(map(str, values)) if isinstance(values, tuple) else str(values)
