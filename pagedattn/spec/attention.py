"""AttentionSpec: everything that selection may depend on, as one frozen, hashable dataclass of values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

import numpy as np
import torch

from ..errors import InvalidInputError
from ..formats.base import CacheFormat
from ..formats.registry import NAMES, format_of
from .mask import Mask

KV_CACHE_DTYPES = NAMES
KV_SCALES = ("none", "float", "tensor", "head")
CACHE_LAYOUTS = ("NHD", "HND")
# What to pass where a latent layer has no scale: it cannot be told from the width of a row.
LATENT_SCALE = "pass (nope_dim + rope_dim) ** -0.5, times the square of yarn's mscale where the model has one"
_ANY_MASK = Mask()  # as the attention type says
Scale = float | torch.Tensor | None  # of a stored fp8 cache: a host float, [1] or [Hkv] float32, or None for 1


class AttentionType(str, Enum):
    """Which tokens attend to which keys.

    DECODER: causal over the cache. ENCODER_ONLY and ENCODER: bidirectional over the given keys, no cache.
    CROSS: over the encoder's keys, cached once, with lengths of their own.
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"


class GraphLevel(IntEnum):
    """What a CUDA graph may capture: nothing, one-token decodes, equal query lengths, any batch."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """KV sharded over `world` ranks in runs of `interleave` tokens; this process is `rank`."""

    world: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        _at_least(1, "context_parallel.world", self.world)
        _at_least(1, "context_parallel.interleave", self.interleave)
        if not 0 <= self.rank < self.world:
            raise InvalidInputError("context_parallel.rank", f"in [0, {self.world})", self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The only input of backend selection.

    Scale, window, soft cap and causality are values here, because some backends plan with them. Sinks, ALiBi slopes and
    scale tensors come with each call; the spec only announces them, and one it did not announce is an error.

    `mask` says which keys a query sees; where it leaves causality open, the attention type decides. `softcap=c` turns a
    logit x into c * tanh(x / c), before the mask.

    `latent_dim` says that attention is latent (MLA) and absorbed: one cached row of head_dim elements per token, latent
    and rotated part, is the key of every head, and its first latent_dim elements are the value. The scale is always
    given then: that of the expanded head, which a row does not tell.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    head_dim_v: int | None = None
    latent_dim: int | None = None
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"
    capability: tuple[int, int] | None = None
    kv_cache_dtype: str = "auto"
    kv_scale: str = "none"
    block_size: int | None = None
    cache_layout: str = "NHD"
    attn_type: AttentionType = AttentionType.DECODER
    scale: float | None = None
    mask: Mask = _ANY_MASK
    softcap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    needs_lse: bool = False
    context_parallel: ContextParallel | None = None
    deterministic: bool = False
    compile: bool = False
    graph_level: GraphLevel = GraphLevel.NEVER
    clean_cache: bool = False

    def __post_init__(self) -> None:
        default = object.__setattr__
        for name in ("num_heads", "head_dim", "num_kv_heads", "head_dim_v", "latent_dim", "block_size"):
            if isinstance(getattr(self, name), np.integer):
                default(self, name, int(getattr(self, name)))
        for name in ("num_heads", "head_dim"):
            _at_least(1, name, getattr(self, name))
        for name, kind in (("attn_type", AttentionType), ("graph_level", GraphLevel)):
            default(self, name, _member(kind, name, getattr(self, name)))
        if self.latent_dim is not None:
            self._default_latent(self.latent_dim)
        default(self, "num_kv_heads", self.num_heads if self.num_kv_heads is None else self.num_kv_heads)
        default(self, "head_dim_v", self.head_dim if self.head_dim_v is None else self.head_dim_v)
        for name in ("scale", "softcap"):
            if isinstance(getattr(self, name), str | bool):  # which float() would take
                raise InvalidInputError(name, "a number, or None", repr(getattr(self, name)))
        default(self, "scale", self.head_dim**-0.5 if self.scale is None else float(self.scale))
        if self.mask.causal is None:
            default(self, "mask", self.mask.replace(causal=self.attn_type is AttentionType.DECODER))
        default(self, "softcap", None if not self.softcap else float(self.softcap))
        default(self, "kv_cache_dtype", format_of(self.kv_cache_dtype).name)
        if self.block_size is None and self.uses_cache and self.format.whole_blocks:
            default(self, "block_size", self.format.default_block_size)
        self._check()
        if self.latent_dim is not None and self.uses_cache:
            self.format.key.planes(self.head_dim, self.dtype)  # raises where the format has no rows of this size
            self.format.value.planes(self.latent_dim, self.dtype)

    def _default_latent(self, latent_dim: int) -> None:
        """One KV head, and values that are the latent part; raises InvalidInputError for anything else."""
        _at_least(1, "latent_dim", latent_dim)
        if latent_dim > self.head_dim:
            raise InvalidInputError("latent_dim", f"in 1..{self.head_dim}, as part of head_dim", latent_dim)
        for name, only in (("num_kv_heads", 1), ("head_dim_v", latent_dim)):
            if getattr(self, name) not in (None, only):
                raise InvalidInputError(name, f"{only} where latent_dim={latent_dim}, or None", getattr(self, name))
            object.__setattr__(self, name, only)
        if self.scale is None:
            raise InvalidInputError("scale", "given for latent attention (MLA)", "None", LATENT_SCALE)

    def _check(self) -> None:
        for name in ("num_kv_heads", "head_dim_v"):
            _at_least(1, name, getattr(self, name))
        if self.block_size is not None:
            _at_least(1, "block_size", self.block_size)
            if self.uses_cache:
                self.format.check_block_size(self.block_size)
        if self.num_heads % self.kv_heads:
            raise InvalidInputError("num_heads", f"a multiple of num_kv_heads={self.kv_heads}", self.num_heads)
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise InvalidInputError("softcap", "positive and finite, or None for no cap", self.softcap)
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidInputError("dtype", "a torch.dtype", repr(self.dtype))
        if not math.isfinite(self.softmax_scale):
            raise InvalidInputError("scale", "finite", self.scale)
        for name, known in (
            ("kv_scale", KV_SCALES),
            ("cache_layout", CACHE_LAYOUTS),
        ):
            if getattr(self, name) not in known:
                raise InvalidInputError(name, f"one of {', '.join(known)}", repr(getattr(self, name)))
        if self.kv_scale != "none" and self.uses_cache and not self.format.takes_scales:
            expected = f"'none' for kv_cache_dtype={self.kv_cache_dtype!r}, as scales are given for fp8 caches only"
            raise InvalidInputError("kv_scale", expected, repr(self.kv_scale), "take kv_cache_dtype='fp8'")

    @property
    def kv_heads(self) -> int:
        """Number of KV heads, `num_heads` where none was given."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Head dimension of the values and of the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def softmax_scale(self) -> float:
        """What a query-key product is multiplied with, head_dim ** -0.5 where none was given."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rope_dim(self) -> int:
        """Elements of a latent row behind the latent part, the rotated ones; 0 where attention is not latent."""
        return 0 if self.latent_dim is None else self.head_dim - self.latent_dim

    @property
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        """Whether no query sees a key behind it."""
        return bool(self.mask.causal)

    @property
    def sliding_window(self) -> int | None:
        """Keys that the mask keeps, None where it keeps all."""
        return self.mask.sliding_window

    @property
    def uses_cache(self) -> bool:
        """Whether this attention type reads a paged cache at all."""
        return self.attn_type in (AttentionType.DECODER, AttentionType.CROSS)

    @property
    def format(self) -> CacheFormat:
        """How the cache stores keys and values."""
        return format_of(self.kv_cache_dtype)

    @property
    def has_recent(self) -> bool:
        """Whether attention is over two caches: one of full blocks, and one of the model's dtype for open blocks.
        Attention over full blocks alone is to those before a query's own (`Mask.earlier_blocks`)."""
        return self.uses_cache and self.format.whole_blocks and self.mask.earlier_blocks is None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the keys that are read: codes of a cache, or packed rows."""
        return self.format.key.planes(self.head_dim, self.dtype)[0].dtype if self.uses_cache else self.dtype

    def replace(self, **changes: object) -> AttentionSpec:
        """A copy with other values, those of the mask by their own names (a window learnt at the first call, say);
        defaults follow what they derive from."""
        of_mask = {name: changes.pop(name) for name in Mask.__dataclass_fields__ if name in changes}
        if of_mask:
            changes["mask"] = self.mask.replace(**of_mask)
        derived = {
            "scale": ("head_dim", self.head_dim**-0.5),
            "head_dim_v": ("head_dim", self.head_dim),
            "num_kv_heads": ("num_heads", self.num_heads),
        }
        if "attn_type" in changes and self.causal == (self.attn_type is AttentionType.DECODER):
            changes.setdefault("mask", self.mask.replace(causal=None))
        for name, (source, default) in derived.items():
            if source in changes and getattr(self, name) == default:
                changes.setdefault(name, None)
        return replace(self, **changes)  # type: ignore[arg-type]


def _member(kind: type[Enum], name: str, value: object) -> Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{kind.__name__}.{one.name}" for one in kind)
        raise InvalidInputError(name, f"one of {known}", repr(value)) from None


def _at_least(low: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidInputError(name, f"an integer of at least {low}", repr(value))
