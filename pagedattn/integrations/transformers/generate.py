"""enable: a transformers model whose forward and `generate` keep their keys and values in a paged cache.

transformers keeps running the model and its loop; a hook before each forward makes room in the cache and hands the
forward what its attention needs. Nothing is read back from the device on the way, but the first attention mask, and
the positions of a forward that has neither mask nor cache.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import Attention, CommonAttentionMetadata, KVCacheDtype, KVScales
from ...errors import InvalidInputError, UnsupportedError
from .attention import NAME, import_transformers, register
from .batch import BatchStep
from .dense import sequences
from .hand_on import probe_handing_on
from .kv_scales import load_kv_scales, set_kv_scales
from .latent_probe import find_latent
from .latent_rows import expand_rows
from .layers import cache_spec, keeps_rows, make_attention, with_formats
from .modalities import attention_of, refuse_other_inputs
from .probe import packs_rows
from .refusals import check_model, check_signature, refuse
from .rows import MOST_TOKENS, BlockStore

if TYPE_CHECKING:
    from .cache import PagedCache

_ATTRIBUTE = "_paged_attention"
_AHEAD = 1024  # tokens after a prompt for which memory is taken at once; many generations end long before their limit
_PREPARE = "_prepare_cache_for_generation"


def enable(
    model: Any,
    *,
    block_size: int | None = None,
    backend: str | None = None,
    num_blocks: int | None = None,
    kv_cache_dtype: str | KVCacheDtype = "auto",
    kv_scales: str | os.PathLike[str] | KVScales | None = None,
    latent: bool | None = None,
) -> None:
    """Make the model's forward and `generate` run over a paged cache. Again: with other options, and new caches.

    Args:
        model: a causal `PreTrainedModel` in eval mode, weights in place, on one device. It is run on two tokens.
        block_size: tokens per block; None: 16, of formats with larger blocks (`int4`, TurboQuant) 32.
        backend: attention backend by name; None chooses.
        num_blocks: blocks of one pool that all caches of this model share; None gives each cache its own, as it needs.
        kv_cache_dtype: format of the cache, as of `Attention`: "auto", "int8", "k8v4", "int4", "turboquant4", "fp8",
            "fp8_e5m2" or another; with some layers kept in the model's dtype "int8:skip=0,-1", or a `KVCacheDtype`.
            TurboQuant leaves the last 64 tokens as they came unless a window is said ("turboquant4:window=0").
        kv_scales: a file of `pagedattn calibrate` for an fp8 cache, or a loaded one; None: all are 1.
        latent: latent attention (MLA) keeps one row per token and layer, where the model is seen to be that; a warning
            of the logger "pagedattn" says why where it is not. True refuses a model that cannot. False keeps keys and
            values of every head, and so does None with kv_scales, or with another kv_cache_dtype than "auto", "fp8" and
            "fp8_ds_mla", in which no rows are stored.

    Raises:
        InvalidInputError: an unknown format, or scales that are not of this model or format.
        UnsupportedError: transformers is missing, or the model cannot be right over a paged cache, or cannot keep rows
            with latent=True; says why.
    """
    stored = KVCacheDtype.of_model(kv_cache_dtype)
    register_generate()
    check_model(model)
    disable(model)
    refuse_training(model)
    # Positions of a padded batch are transformers' own matter, so that no length need be refused.
    refuse(type(model), model.config, 0)
    check_signature(model)
    _check_one_device(model)
    before = attention_of(model)
    try:
        scales = load_kv_scales(kv_scales, stored.name, model)
        size = stored.block_size(block_size)
        model.__dict__[_ATTRIBUTE] = Paged(model, before, size, backend, num_blocks, stored, scales, latent)
    except Exception:
        expand_rows(model)
        model.set_attn_implementation(before)
        raise


def disable(model: Any) -> None:
    """Give the model back as it was before `enable`; without effect where it is not enabled."""
    paged = model.__dict__.pop(_ATTRIBUTE, None)
    if paged is not None:
        for hook in paged.hooks:
            hook.remove()
        paged.layers.clear()  # which its caches know it by
        expand_rows(model)
        model.set_attn_implementation(paged.before)


def new_cache(model: Any) -> PagedCache:
    """An empty cache, for `past_key_values` of an enabled model's forward or `generate`, over several turns.

    Raises:
        InvalidInputError: the model is not enabled.
    """
    return _paged(model).new_cache()


def register_generate() -> None:
    """Make `attn_implementation="pagedattn"` known; a model loaded so is enabled by its first `generate`."""
    register()
    mixin = import_transformers().GenerationMixin
    original = getattr(mixin, _PREPARE)
    if getattr(original, "paged", False):
        return

    def prepare(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        if self.config._attn_implementation == NAME:
            made = _make_cache(self, generation_config, model_kwargs, batch_size, max_cache_length)
            if made is not None:
                model_kwargs["past_key_values"] = made
                return None
        return original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    prepare.paged = True  # type: ignore[attr-defined]
    setattr(mixin, _PREPARE, prepare)


def refuse_training(model: Any) -> None:
    """Raise UnsupportedError where gradients would be wanted."""
    if model.training:
        raise UnsupportedError(f"{type(model).__name__} is in training; call model.eval(): a paged cache is inference")


class Paged:
    """What an enabled model has: the attention of its layers, and a hook before each forward."""

    def __init__(
        self,
        model: Any,
        before: dict[str, str],
        block_size: int,
        backend: str | None,
        num_blocks: int | None,
        kv_cache_dtype: KVCacheDtype,
        scales: KVScales | None,
        latent: bool | None,
    ) -> None:
        self.before = before
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            learnt, handing_on = probe_handing_on(model)
            self.packs = packs_rows(model)
            if keeps_rows(latent, kv_cache_dtype, scales is not None):
                learnt = find_latent(model, learnt, asked=latent is True)
        options = {"block_size": block_size, "backend": backend}
        stored = with_formats(model, learnt, kv_cache_dtype)
        self.layers = {
            layer.call.layer: (layer.call, make_attention(layer, model, name, **options)) for layer, name in stored
        }
        if scales is not None:
            scaled = {index: layer for index, (_, layer) in self.layers.items() if isinstance(layer, Attention)}
            set_kv_scales(scales, kv_cache_dtype.name, scaled)
        self.windowed = any(layer.window is not None for layer in learnt)
        self.specs = [cache_spec(layer, model.dtype, block_size, name) for layer, name in stored]
        self.placed = model.dtype, model.device
        self.names = list(inspect.signature(model.forward).parameters)
        self.pool = None if num_blocks is None else BlockStore(self.specs, num_blocks, model.device)
        self.hooks = (
            *handing_on,
            model.register_forward_pre_hook(_before_forward, with_kwargs=True),
            model.register_forward_hook(_after_forward, with_kwargs=True),
        )

    def new_cache(self, most_tokens: int = 0) -> PagedCache:
        """An empty cache, with memory for `most_tokens` tokens at first."""
        from .cache import PagedCache

        store = self.pool or BlockStore(self.specs, None, self.placed[1], max(most_tokens, MOST_TOKENS))
        return PagedCache(self.layers, store, self.windowed)

    def before_forward(self, model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[()], Any] | None:
        """The forward's arguments with the step that its attention needs, over the cache that was given or a new one.

        Raises:
            UnsupportedError, InvalidInputError: what cannot be right; `PagedCache.begin` has more.
        """
        if "paged_step" in given:
            return None
        options = {**dict(zip(self.names, args, strict=False)), **given}
        refuse_training(model)
        refuse_other_inputs(model, self.names, options)
        self._check_call(model, options)
        inputs = options.get("input_ids")
        shape = (options["inputs_embeds"] if inputs is None else inputs).shape
        past, use_cache = options.get("past_key_values"), options.get("use_cache")
        if past is None and not (model.config.get_text_config().use_cache if use_cache is None else use_cache):
            positions = self._beginnings(options.get("position_ids"))
            options["paged_step"] = self._without_cache(shape, options.get("attention_mask"), positions)
            return (), options
        if past is None:
            past = options["past_key_values"] = self.new_cache()
        mask = options.get("attention_mask")
        # Where every row has begun, a mask of one new column can only say that it is a token.
        skipped = mask is not None and shape[1] == 1 and mask.is_cuda and past.begun
        seen = None if mask is None or skipped else _on_host(mask)
        options["paged_step"] = past.begin(shape[0], shape[1], seen, unread=skipped)
        return (), options

    def _beginnings(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        """The positions that say where sequences of a row begin, [B, S]; None where none do."""
        if positions is not None and positions.ndim == 3:  # Qwen-VL: time, height, width, and text in front of them
            return positions[0] if len(positions) == 4 else None
        return positions if self.packs else None

    def _without_cache(self, shape: torch.Size, mask: torch.Tensor | None, positions: torch.Tensor | None) -> BatchStep:
        seen = None if mask is None else _on_host(mask)
        where = None if positions is None or mask is not None else positions.cpu().numpy()
        counts, real = sequences(shape[0], shape[1], seen, where, self.windowed)
        common = CommonAttentionMetadata.from_lengths(counts, counts, device=self.placed[1])
        return BatchStep.of_tokens(self.layers, None, common, real)

    def _check_call(self, model: Any, options: dict[str, Any]) -> None:
        from .cache import PagedCache

        name, past, mask = type(model).__name__, options.get("past_key_values"), options.get("attention_mask")
        if (model.dtype, model.device) != self.placed:
            raise UnsupportedError(f"{name} moved from {self.placed} to {(model.dtype, model.device)}; enable it again")
        if options.get("output_attentions"):
            raise UnsupportedError(
                "output_attentions is set, and paged attention keeps no weights; disable(model) first"
            )
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            got = f"{mask.ndim} dimensions" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedError(
                f"attention_mask has {got}: a paged cache takes [B, columns], which says what is padding, and no other"
            )
        now = model.config._attn_implementation
        if now != NAME:
            raise UnsupportedError(
                f"{name} is enabled, but its attn_implementation is now {now!r}, which cannot read a paged cache; call "
                "disable(model) to run it so, or enable(model) again"
            )
        if past is None:
            return
        if not isinstance(past, PagedCache) or not past.belongs_to(self.layers):
            other = "a PagedCache of another model" if isinstance(past, PagedCache) else type(past).__name__
            raise UnsupportedError(f"past_key_values is {other}: give {name} new_cache(model), or none")
        if options.get("use_cache") is False:
            raise UnsupportedError(
                "use_cache=False with a paged cache: every step would store all tokens again; leave one of them out"
            )


@torch.compiler.disable
def _before_forward(
    model: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    # Bound to no object: a copy of a model has its own.
    return _paged(model).before_forward(model, args, options)


@torch.compiler.disable
def _after_forward(_model: Any, _args: tuple[Any, ...], options: dict[str, Any], _output: Any) -> None:
    end = getattr(options.get("past_key_values"), "end", None)
    if end is not None:
        end()


def _paged(model: Any) -> Paged:
    paged = model.__dict__.get(_ATTRIBUTE)
    if paged is None:
        raise InvalidInputError("model", "enabled", type(model).__name__, "call enable(model) first")
    return paged


def _make_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], batch_size: int, max_cache_length: int
) -> PagedCache | None:
    """A paged cache for one `generate`; None where it brings its own, or wants none."""
    if _ATTRIBUTE not in model.__dict__:
        enable(model)
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise UnsupportedError(
            f"cache_implementation={kind!r} asks for another cache; leave it out, or disable(model) first"
        )
    if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
        return None
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    known = mask if mask is not None else positions
    if known is None:  # it is not known how long the prompts are
        return _paged(model).new_cache()
    columns = known.shape[-1]
    longest = min(max_cache_length, columns + _AHEAD)
    beams = generation_config.num_beams or 1
    together = max(beams, generation_config.num_return_sequences or 1)
    rows = batch_size * together
    prompts = [columns] * rows if mask is None else _on_host(mask).sum(1).tolist()
    paged = _paged(model)
    cache = paged.new_cache(rows * (max_cache_length + paged.specs[0].block_size))
    lengths = [longest - columns + prompt for prompt in prompts]
    cache.expect(lengths, prompts, columns, together, copies=rows if beams > 1 else 0)
    return cache


def _check_one_device(model: Any) -> None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedError(f"{type(model).__name__} lies on {', '.join(devices)}; a paged cache lies on one device")


def _on_host(mask: torch.Tensor) -> np.ndarray:
    return (mask != 0).cpu().numpy()
