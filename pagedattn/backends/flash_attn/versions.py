"""The FlashAttention versions that FLASH_ATTN can call: what each is called, and what it serves, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from ... import env
from ...errors import UnsupportedError
from ...runtime.distributions import release_of
from ...spec import AttentionSpec, AttentionType, GraphLevel
from ...spec.capabilities import Capabilities, IntRange, Rejection
from ..base import Availability
from ..releases import Releases

_HALF = (torch.float16, torch.bfloat16)
_COMMON = Capabilities(
    devices=("cuda",),
    min_capability=(8, 0),
    dtypes=_HALF,
    head_dims=IntRange(8, 256, 8),
    block_sizes=IntRange(),
    cache_layouts=("NHD", "HND"),
    attn_types=tuple(AttentionType),
    non_causal=True,
    masks=("sliding_window",),
    softcap=True,
    lse=True,
)


@dataclass(frozen=True, slots=True)
class FlashAttnVersion:
    """One of the libraries. `probes` tell that it is installed, the first of `modules` that imports has its calls.

    It may be built from source, without a distribution and of no known release.
    """

    number: int
    probes: tuple[str, ...]
    modules: tuple[str, ...]
    releases: Releases
    install: str
    capabilities: Capabilities
    hints: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """FA2 or FA3."""
        return f"FA{self.number}"

    def module(self) -> str | None:
        """The module with its calls where a release that is served is installed here; nothing is imported."""
        return None if self.refusal() else self._found_module()

    def refusal(self) -> str:
        """Why the release that is installed is not served; empty where it is, and where none is installed."""
        found = release_of(self.releases.distribution)
        return self.releases.refusal(found) if found is not None and self._found_module() else ""

    def availability(self) -> Availability:
        """Whether it is installed here, in a release that is served."""
        if self.module() is not None:
            return Availability(ok=True, version=self.describe_release())
        return Availability(ok=False, reason=self.refusal() or "not installed", hint=self.install)

    def describe_release(self) -> str:
        """Label, the installed release, and those that are served."""
        found = release_of(self.releases.distribution) or "unknown version"
        return f"{self.label} {found} (serves {self.releases})"

    def _found_module(self) -> str | None:
        return next((name for probe, name in zip(self.probes, self.modules, strict=True) if _installed(probe)), None)

    def rejections(self, spec: AttentionSpec) -> list[Rejection]:
        """Why this version does not serve `spec`."""
        out = self.capabilities.rejections(spec)
        if self.number == 2 and spec.sliding_window is not None and spec.gqa_ratio > 1:
            reason = "its windowed decode reads the cache once per query head; FA3 and TRITON read it once per KV head"
            out.append(Rejection("sliding_window", spec.sliding_window, "gqa_ratio=1 only", reason))
        if self.number == 2 and spec.sliding_window is not None and spec.uses_cache and not spec.clean_cache:
            reason = "NaN in blocks behind the window, released and used again, would get out"
            out.append(Rejection("clean_cache", False, "clean caches under a window", reason))
        if spec.softmax_scale <= 0:
            reason = "it takes each row's largest product, scaled, for the largest logit; negate the queries"
            out.append(Rejection("scale", spec.softmax_scale, "positive scales only", reason))
        if self.number == 2 and spec.has_alibi and spec.needs_lse:
            reason = "its LSE leaves out the query's own position"
            out.append(Rejection("needs_lse", True, "no LSE with ALiBi", reason))
        if self.number == 3 and spec.kv_cache_dtype == "fp8_e4m3" and spec.head_dim % 16:
            out.append(Rejection("head_dim", spec.head_dim, "multiples of 16 over fp8 caches", "use another backend"))
        if self.capabilities.serves_mla and spec.latent_dim is not None:
            hint = "its kernels of latent rows (qv) were not tried so; use TRITON or TORCH"
            asked = (("sliding_window", spec.sliding_window), ("softcap", spec.softcap))
            out += [Rejection(name, value, "none with latent_dim", hint) for name, value in asked if value is not None]
        return [replace(r, hint=self.hints.get(r.feature, r.hint)) for r in out]


FA2 = FlashAttnVersion(
    2,
    ("flash_attn_2_cuda",),
    ("flash_attn",),
    Releases("flash-attn", oldest="2.8.0.post2", newest="2.8.3.post2"),
    "pip install 'flash-attn>=2.8.0.post2,<2.9' --no-build-isolation",
    replace(
        _COMMON,
        block_sizes=IntRange(256, None, 256),
        default_block_size=256,
        alibi=True,
        graph_level=GraphLevel.UNIFORM_BATCH,
    ),
    {"has_sinks": "FlashAttention 2 has no sinks", "kv_cache_dtype": "FlashAttention 2 reads no fp8 caches"},
)
FA3 = FlashAttnVersion(
    3,
    ("flash_attn_3", "flash_attn_interface"),
    ("flash_attn_3.flash_attn_interface", "flash_attn_interface"),
    Releases("flash-attn-3", oldest="3.0.0b1", newest="3.0.0"),
    "build it from FlashAttention's hopper folder, or pip install flash-attn-3 from PyTorch's index",
    replace(
        _COMMON,
        min_capability=(9, 0),
        max_capability=(9, 0),
        kv_cache_dtypes=("auto", "fp8_e4m3"),
        kv_scales=("none", "float", "tensor", "head"),
        latent_dims=IntRange(values=(512,)),
        rope_dims=IntRange(values=(64,)),
        fp8_products=True,
        fp8_queries=True,
        needs_clean_cache=True,
        graph_level=GraphLevel.ALWAYS,
    ),
    {
        "has_alibi": "FlashAttention 3 has no ALiBi",
        "kv_cache_dtype": "FlashAttention 3 reads 8-bit caches of e4m3 only, and no such latent rows",
    },
)
VERSIONS = (FA3, FA2)  # best first


def candidates() -> Sequence[FlashAttnVersion]:
    """Versions to consider, best first: the one PAGEDATTN_FLASH_ATTN names, or every one that is installed."""
    forced = env.flash_attn_version()
    if forced is not None:
        return [one for one in VERSIONS if one.number == forced]
    return [one for one in VERSIONS if one.module() is not None]


def pick(spec: AttentionSpec) -> FlashAttnVersion | None:
    """The best version that serves `spec`."""
    return next((one for one in candidates() if one.module() is not None and not one.rejections(spec)), None)


def version_for(spec: AttentionSpec) -> FlashAttnVersion:
    """As `pick`.

    Raises:
        UnsupportedError: none serves it; with the reasons of those that are installed.
    """
    version = pick(spec)
    if version is None:
        refused = [one.refusal() for one in VERSIONS]
        reasons = [f"{one.label} {reason}" for one in candidates() for reason in one.rejections(spec)]
        text = "; ".join(filter(None, [*refused, *reasons])) or "none is installed"
        raise UnsupportedError(f"no installed FlashAttention serves this: {text}")
    return version


@cache
def library(version: FlashAttnVersion) -> ModuleType:
    """The module with a version's calls.

    Raises:
        UnsupportedError: it is not installed, or does not load; a build for another torch or CUDA shows only then.
    """
    name = version.module()
    if name is None:
        wanted = " or ".join(dict.fromkeys(version.modules))
        reason = version.refusal() or f"{version.label} needs the module {wanted}, which is not installed"
        raise UnsupportedError(f"{reason}; {version.install}")
    try:
        return import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"{version.label} ({name}) cannot be loaded: {error}; {version.install}") from error


@cache
def _installed(module: str) -> bool:
    return find_spec(module) is not None
