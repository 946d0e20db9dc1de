"""FLASHINFER: FlashInfer's wrappers over the paged cache; they plan on the host once per step."""

from __future__ import annotations

import math
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ...call import AttentionCall
from ...errors import InvalidInputError, UnsupportedError
from ...formats.mla_rows.format import split
from ...runtime.distributions import release_of
from ...spec import AttentionSpec, AttentionType, GraphLevel, Scale
from ...spec.capabilities import Capabilities, IntRange, Rejection
from ..base import AttentionBackend, AttentionImpl, AttentionMetadata, Availability
from ..releases import Releases, precedence
from .metadata import DEFAULT_BLOCK_SIZE, FlashInferBuilder, FlashInferMetadata
from .plan import Part

RELEASES = Releases("flashinfer-python", oldest="0.6.13", newest="0.7.2.post1")
# Before 0.7 a masked product counts as -5e4 and is scaled then: under a smaller scale than this it would still weigh.
SMALLEST_SCALE = 1e-3
# LSE (base 2) of a row without keys is about -5e4 before 0.7, and -inf since.
EMPTY_LSE = -4.9e4
# Packages of compiled kernels; before 0.7.2 flashinfer raises when it is imported beside those of another release.
_COMPILED, _IGNORES_OTHERS = ("flashinfer-cubin", "flashinfer-jit-cache"), "0.7.2"
_ALIGNMENT = 16  # bytes that a kernel loads at once


class FlashInferImpl(AttentionImpl):
    """Runs the wrappers that the metadata planned."""

    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        """See the base class. Scales are host floats. What `build` could not plan (see the metadata) is planned here.

        Raises:
            UnsupportedError: sinks or slopes, which these kernels would ignore.
            InvalidInputError: a scale of another kind, or a cache whose keys and values lie differently in memory.
        """
        if not isinstance(metadata, FlashInferMetadata):
            got = type(metadata).__name__
            raise InvalidInputError("metadata", "of FLASHINFER", got, "build it with the layer")
        for name, given in (("sinks", call.sinks), ("alibi_slopes", call.alibi_slopes)):
            if given is not None:
                raise UnsupportedError(f"FLASHINFER takes no {name}; the spec must announce it, then another serves it")
        query, out, scales = call.query, call.out, self._scales(call.k_scale, call.v_scale)
        parts = metadata.parts(None if call.kv_cache is None else call.kv_cache.block_size)
        direct = out is not None and _is_direct(out, query)
        target = out if out is not None and direct else query.new_empty(*query.shape[:2], self.spec.value_dim)
        for part in parts:
            self._run(part, call, target, scales)
        if call.lse is not None:
            call.lse.masked_fill_(call.lse <= EMPTY_LSE, -math.inf).mul_(math.log(2))
        if out is not None and not direct and parts:
            out[: parts[-1].last].copy_(target[: parts[-1].last])
        return target if out is None else out

    def _run(self, part: Part, call: AttentionCall, out: torch.Tensor, scales: dict[str, float]) -> None:
        rows, query, lse = slice(part.first, part.last), call.query, call.lse
        if len(query) < part.last:
            raise InvalidInputError("query", f"at least {part.last} rows, as the metadata says", len(query))
        if part.num_keys == 0:
            out[rows].zero_()
            if lse is not None:
                lse[rows].fill_(-math.inf)
            return
        given = {} if lse is None else {"lse": lse[rows], "return_lse": True}
        query = _aligned(query[rows])
        queries = (query,) if self.spec.latent_dim is None else split(query, self.spec.latent_dim)
        part.wrapper().run(*queries, *self._attended(part, call), out=out[rows], **scales, **given)

    def _attended(self, part: Part, call: AttentionCall) -> tuple[Any, ...]:
        """What `run` takes after the query: a pair of caches, or packed keys and values without their padding."""
        key, value = call.keys_and_values
        if call.kv_cache is not None and self.spec.latent_dim is not None:
            return split(key.squeeze(2), self.spec.latent_dim)
        if call.kv_cache is None:
            return _aligned(key[: part.num_keys]), _aligned(value[: part.num_keys])
        if key.stride() != value.stride():
            expected = f"keys and values with equal strides (keys have {key.stride()})"
            raise InvalidInputError("kv_cache", expected, value.stride(), "build it with PagedKVCache")
        if self.spec.cache_layout == "HND":
            return ((key.transpose(1, 2), value.transpose(1, 2)),)
        return ((key, value),)

    def _scales(self, k_scale: Scale, v_scale: Scale) -> dict[str, float]:
        """The given scales as `run` takes them."""
        out = {}
        for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
            if given is None:
                continue
            if isinstance(given, torch.Tensor) or self.spec.kv_scale != "float":
                wanted = "a host float" if self.spec.kv_scale == "float" else "None, as the spec announces no scale"
                raise InvalidInputError(name, wanted, type(given).__name__, "announce kv_scale='float'")
            out[name] = float(given)
        product = self.spec.softmax_scale * out.get("k_scale", 1.0)
        if out and self.spec.softcap is None and product < SMALLEST_SCALE:
            raise InvalidInputError("k_scale", f"at least {SMALLEST_SCALE} times the inverse of scale", k_scale)
        return out


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [n, H, D] itself, whatever its strides, if the kernels can load it; else a copy."""
    steps = (rows.data_ptr(), *(step * rows.itemsize for step in rows.stride()[:2]))
    fits = rows.stride(2) == 1 and all(step % _ALIGNMENT == 0 for step in steps)
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _is_direct(out: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether kernels can write to `out`: they know no strides of it."""
    return out.is_contiguous() and out.dtype == query.dtype and out.data_ptr() % _ALIGNMENT == 0


class FlashInferBackend(AttentionBackend):
    """Decodes by FlashInfer's decode wrapper, the rest by its prefill wrapper (fa3 kernels on Hopper, fa2 elsewhere).

    Not for torch.compile: `run` reads what `plan` left on the wrapper. Its kernels are compiled at first use, which
    takes nvcc and minutes, unless a package of compiled ones is installed.
    """

    name = "FLASHINFER"
    builder = FlashInferBuilder
    impl = FlashInferImpl

    @classmethod
    def availability(cls) -> Availability:
        return _availability()

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=("cuda",),
            min_capability=(8, 0),
            dtypes=(torch.float16, torch.bfloat16),
            kv_cache_dtypes=("auto", "fp8_e4m3", "fp8_e5m2"),
            kv_scales=("none", "float"),
            head_dims=IntRange(values=(64, 128, 256)),
            latent_dims=IntRange(values=(512,)),
            rope_dims=IntRange(values=(64,)),
            block_sizes=IntRange(),
            default_block_size=DEFAULT_BLOCK_SIZE,
            cache_layouts=("NHD", "HND"),
            attn_types=tuple(AttentionType),
            non_causal=True,
            masks=("sliding_window",),
            softcap=True,
            lse=True,
            rounded_lse=True,
            rounded_states=True,
            graph_level=GraphLevel.UNIFORM_SINGLE_TOKEN_DECODE,
        )

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        out = super().rejections(spec)
        if spec.sliding_window is not None and not spec.causal:
            hint = "its window has a left side only; drop the window or use another backend"
            out.append(Rejection("sliding_window", spec.sliding_window, "causal attention only", hint))
        if spec.softmax_scale < SMALLEST_SCALE:
            hint = "it masks with -5e4 before it scales, which a smaller or negative scale would let through"
            out.append(Rejection("scale", spec.softmax_scale, f"at least {SMALLEST_SCALE}", hint))
        if spec.kv_cache_dtype.startswith("fp8") and spec.head_dim == 64:
            hint = "its fp8 loads do not work for rows of 64 bytes; use kv_cache_dtype='auto'"
            out.append(Rejection("kv_cache_dtype", spec.kv_cache_dtype, "auto with head_dim=64", hint))
        return out if spec.latent_dim is None else [*out, *_latent_rejections(spec)]


def _latent_rejections(spec: AttentionSpec) -> list[Rejection]:
    """What its wrapper of latent rows has no argument for, or plans on the host for one step."""
    captured = spec.graph_level.name if spec.graph_level > GraphLevel.NEVER else None
    asked = (
        ("sliding_window", spec.sliding_window, "none", "its latent kernels have no windows"),
        ("softcap", spec.softcap, "none", "its latent kernels have no soft cap"),
        ("graph_level", captured, GraphLevel.NEVER.name, "its latent schedule is made on the host, of exact lengths"),
    )
    return [
        Rejection(name, got, f"{has} with latent_dim", f"{why}; use TRITON")
        for name, got, has, why in asked
        if got is not None
    ]


@cache
def _availability() -> Availability:
    install = f"pip install '{RELEASES.requirement}'"
    if find_spec("flashinfer") is None:
        return Availability(ok=False, reason="flashinfer is not installed", hint=install)
    found = release_of(RELEASES.distribution)
    if found is None:
        reason = f"flashinfer can be imported, but no distribution {RELEASES.distribution} says which version it is"
        return Availability(ok=False, reason=reason, hint=install)
    if reason := RELEASES.refusal(found):
        return Availability(ok=False, version=found, reason=reason, hint=install)
    if other := _other_release(found):
        reason = f"{other} is not of flashinfer-python {found}, which then fails to import"
        hint = f"pip install {other.split()[0]}=={found}, or uninstall it"
        return Availability(ok=False, version=found, reason=reason, hint=hint)
    return Availability(ok=True, version=f"{found} (serves {RELEASES})")


def _other_release(found: str) -> str | None:
    """A package of compiled kernels, with its version, that keeps flashinfer `found` from being imported."""
    if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK") or precedence(found) >= precedence(_IGNORES_OTHERS):
        return None
    for name in _COMPILED:
        release = release_of(name)
        if release is not None and release.partition("+")[0] != found:
            return f"{name} {release}"
    return None
