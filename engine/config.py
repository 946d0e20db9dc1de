"""The settings of one engine, checked once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pagedattn import KVCacheDtype, KVScales
from pagedattn.errors import InvalidInputError

_DTYPES = ("auto", "float16", "bfloat16", "float32", "float64")
_PREEMPTIONS = ("auto", "recompute", "swap")
_LOAD_FORMATS = ("auto", "safetensors", "dummy")
_MODEL_IMPLS = ("auto", "native", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        model: folder with config.json, safetensors and (optionally) a tokenizer.
        dtype: of weights and activations; "auto" takes the checkpoint's.
        max_model_len: longest sequence in tokens, prompt included; None takes the model's.
        max_num_seqs: most requests that run (hold blocks) at a time; never above max_num_batched_tokens.
        max_num_batched_tokens: token budget of one step.
        block_size: tokens per KV block; a group of fewer bytes per token gets a multiple. None is 16, of formats with
            larger blocks ("int4", TurboQuant) 32.
        num_kv_blocks: blocks of the KV cache; None measures what memory allows.
        gpu_memory_utilization: share of the device's memory that the engine may use.
        enable_prefix_caching: share blocks between requests with equal beginnings.
        enforce_eager: no CUDA graphs.
        graph_sizes: batch sizes that steps of decodes are captured for; larger batches run eagerly. None takes sizes up
            to max_num_seqs or 512 on a GPU, and none elsewhere.
        overlap: launch each step before the tokens of the last are read. None does so on a GPU: elsewhere there is
            nothing to overlap, and tokens would come a step later.
        freeze_gc: leave what exists when the engine starts out of garbage collection as long as the engine lives, since
            collecting it stalls steps. None does so on a GPU.
        tensor_parallel_size: processes that share the model, each on a GPU of its own from `device` on (or on the CPU).
        step_timeout: seconds after which a step of several processes counts as hung although all of them live.
        heartbeat_timeout: seconds without a sign of life, of which each of several processes gives two a second, after
            which it counts as hung; 120 at least while they load. One that ends or fails is noticed at once, whatever
            this is.
        start_timeout: seconds that several processes may take to load the model and to size the cache; step_timeout
            where that is more.
        backend: attention backend by name; None chooses.
        kv_cache_dtype: format of the KV cache: "auto" is the model's dtype, "int8" a byte per element and a scale of
            each token and head, "k8v4" the same of keys and half a byte of values, "int4" half a byte of both, but for
            blocks that are not full, which a second cache has, "turboquant4" half a byte per element
            ("turboquant_k4v3", "turboquant_k3v4", "turboquant3" and "turboquant2" less), "fp8" ("fp8_e4m3") and
            "fp8_e5m2" a byte per element, with the scales of kv_scales, else the checkpoint's, else 1.
            "int8:window=128" keeps the last tokens in the model's dtype, in the second cache of "int4", and with
            ":first=4" behind it the first ones; TurboQuant keeps 64 unless a window is said ("turboquant4:window=0").
            "int8:skip=0,-1", or a `KVCacheDtype`, keeps the first and the last layer in the model's dtype, and
            "key=int8,value=rotated_int4" names what K and V are stored as.
        latent: models of latent attention (MLA) keep one row per token and layer; True refuses a model that cannot.
            False keeps keys and values of every head, and so does None with another kv_cache_dtype than "auto", "fp8"
            and "fp8_ds_mla", or with kv_scales.
        kv_scales: a file of `pagedattn calibrate`, from which an fp8 cache gets a scale for each layer and KV head.
        model_impl: "native" is the engine's own decoder, "transformers" runs any causal decoder of transformers through
            its own modules (slower); "auto" takes the first where it can run the model.
        load_format: "auto" and "safetensors" read the folder, "dummy" draws random weights.
        seed: of dummy weights and of requests without a seed of their own.
        device: None takes CUDA where there is one, else the CPU.
        max_prefill_share: most of the token budget that one prompt takes in one step, in (0, 1].
        max_waiting: most requests of `add_request` that may wait; None is no limit.
        log_interval: seconds between log lines (INFO) about queues, cache and speed; None logs none.
        clean_cache: zero blocks when they are handed out. Some backends (flash-attn 3) are chosen only then.
        preemption: what becomes of a request whose blocks are needed for an older one: "recompute" computes it again,
            "swap" copies its blocks to host memory and back while there is swap space, "auto" does what costs less.
        swap_space: bytes of (pinned) host memory for swapped blocks, of each process; None takes 4 GiB where "auto" may
            swap on a GPU, or "swap" is asked for.
        prefix_space: bytes of (pinned) host memory, of each process, for blocks of the prefix cache that the device has
            no room for any more: a prompt that begins as an earlier one reads them back. Preempted requests go first.
        chat_template_timeout: seconds that the model's chat template may take for the messages of one request.
        chat_template_memory: bytes of address space for the process that renders it, 256 MiB at least.

    Raises:
        InvalidInputError: a value of the wrong type or range.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    graph_sizes: Sequence[int] | None = None
    overlap: bool | None = None
    freeze_gc: bool | None = None
    tensor_parallel_size: int = 1
    step_timeout: float = 300.0
    heartbeat_timeout: float = 60.0
    start_timeout: float = 3600.0
    backend: str | None = None
    kv_cache_dtype: str | KVCacheDtype = "auto"
    latent: bool | None = None
    kv_scales: str | None = None
    model_impl: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    device: str | None = None
    max_prefill_share: float = 0.5
    max_waiting: int | None = None
    log_interval: float | None = 10.0
    clean_cache: bool = False
    preemption: str = "auto"
    swap_space: int | None = None
    prefix_space: int = 0
    chat_template_timeout: float = 3.0
    chat_template_memory: int = 1 << 30

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike):
            raise InvalidInputError("model", "the path of a folder", repr(self.model))
        object.__setattr__(self, "model", os.fspath(self.model))
        stored = KVCacheDtype.of_model(self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", str(stored))
        if self.kv_scales is not None:
            object.__setattr__(self, "kv_scales", _checked_scales(self.kv_scales, stored, self.latent))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "device", None if self.device is None else str(self.device))
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidInputError(name, f"an integer of at least {low}", repr(value))
        stored.block_size(self.block_size)
        for name in ("enable_prefix_caching", "enforce_eager", "overlap", "freeze_gc", "clean_cache", "latent"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPTIONAL):
                raise InvalidInputError(name, "a bool", repr(value))
        for name in ("gpu_memory_utilization", "max_prefill_share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise InvalidInputError(name, "a number in (0, 1]", repr(value))
        if self.graph_sizes is not None:
            object.__setattr__(self, "graph_sizes", _checked_sizes(self.graph_sizes))
        if self.log_interval is not None and not _is_positive(self.log_interval):
            raise InvalidInputError("log_interval", "a positive number of seconds, or None", repr(self.log_interval))
        _check_choice("dtype", self.dtype, _DTYPES)
        _check_choice("model_impl", self.model_impl, _MODEL_IMPLS)
        _check_choice("load_format", self.load_format, _LOAD_FORMATS)
        _check_choice("preemption", self.preemption, _PREEMPTIONS)
        for name in ("step_timeout", "start_timeout", "chat_template_timeout"):
            if not _is_positive(value := getattr(self, name)):
                raise InvalidInputError(name, "a positive number of seconds", repr(value))
        if not _is_positive(self.heartbeat_timeout) or self.heartbeat_timeout < 1:
            raise InvalidInputError("heartbeat_timeout", "at least 1 second", repr(self.heartbeat_timeout))

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or where that is None, what `kv_cache_dtype` says."""
        return KVCacheDtype.of(self.kv_cache_dtype).block_size(self.block_size)

    def longest_sequence(self, positions: int) -> int:
        """`max_model_len`, or what a model with `positions` positions allows; InvalidInputError where that is less."""
        if self.max_model_len is not None and self.max_model_len > positions:
            expected = f"at most the model's max_position_embeddings ({positions})"
            raise InvalidInputError("max_model_len", expected, self.max_model_len)
        return self.max_model_len or positions

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, object]) -> EngineConfig:
        """A config from keyword arguments; an unknown one raises InvalidInputError with the nearest known name."""
        known = [field.name for field in fields(cls) if field.name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else ""
                raise InvalidInputError("option", f"one of {', '.join(known)}", repr(name), remedy)
        return cls(model=model, **options)  # type: ignore[arg-type]


_LOWEST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "num_kv_blocks": 2,
    "tensor_parallel_size": 1,
    "seed": 0,
    "max_waiting": 1,
    "swap_space": 0,
    "prefix_space": 0,
    "chat_template_memory": 1 << 28,
}
_OPTIONAL = (
    "max_model_len",
    "block_size",
    "num_kv_blocks",
    "max_waiting",
    "overlap",
    "freeze_gc",
    "swap_space",
    "latent",
)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _checked_sizes(sizes: object) -> tuple[int, ...]:
    whole = isinstance(sizes, list | tuple | range) and all(type(size) is int and size > 0 for size in sizes)
    if not whole or not sizes:
        raise InvalidInputError("graph_sizes", "positive integers, one at least", repr(sizes), "or enforce_eager=True")
    return tuple(sizes)  # type: ignore[arg-type]


def _checked_scales(path: object, stored: KVCacheDtype, latent: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise InvalidInputError("kv_scales", "the path of a file, or None", repr(path))
    KVScales.check_format(stored.name, os.fspath(path))
    if latent is True:
        expected = "None with latent=True, as they are of keys and values of every head"
        raise InvalidInputError("kv_scales", expected, repr(os.fspath(path)), "leave latent out")
    return os.fspath(path)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        raise InvalidInputError(name, f"one of {', '.join(allowed)}", repr(value), f"try {near[0]}" if near else "")
