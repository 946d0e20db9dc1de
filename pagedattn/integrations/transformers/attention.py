"""The attention function that transformers calls, and what it asks for per layer.

Everything the function needs comes with the forward, as the keyword `paged_step`; nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ... import Attention, MLAAttention
from ...errors import UnsupportedError
from .masks import describe_mask

# One name, without the words that transformers treats specially in it ("flash", "sdpa", "flex", a slash).
NAME = "pagedattn"
PROBE_NAME = "pagedattn_probe"  # also describes masks, which serving leaves out
PAIR_NAME = "pagedattn_pair"  # describes them over the two tokens of a probe alone

# What models hand on to attention without meaning attention by it, and what is read here.
_OUTPUTS = {"output_hidden_states", "output_router_logits"}
_IGNORED = {"cache_position", "position_ids", "return_dict", "use_cache", *_OUTPUTS}
_KNOWN = {"is_causal", "sliding_window", "softcap", *_IGNORED}


class MissingStepError(UnsupportedError):
    """Attention was called without the keyword `paged_step`."""


class AttentionCall(NamedTuple):
    """What one layer asks of attention, all of it from the call itself and nothing from the config.

    A tuple, whose fields torch.compile compares one by one, so that a symbolic size becomes a guard; a dataclass it
    compares as a constant or not at all.

    `sliding_window` counts the token itself (transformers keeps q - k < W). Sinks come with the call.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool


class Attends(Protocol):
    """What `paged_step` is: takes one layer's call."""

    def attend(
        self,
        module: torch.nn.Module,
        call: AttentionCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [B, Hq, S, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] to [B, S, Hq, Dv]; B is 1 in a packed row."""
        ...


def register() -> None:
    """Make `attn_implementation="pagedattn"` known to transformers. May be called again.

    No mask function goes with the name, so that transformers builds no mask at all.

    Raises:
        UnsupportedError: transformers 5 is not installed.
    """
    transformers = import_transformers()
    for name in (NAME, PROBE_NAME, PAIR_NAME):
        transformers.AttentionInterface.register(name, attention_forward)
    transformers.AttentionMaskInterface.register(PROBE_NAME, describe_mask)
    transformers.AttentionMaskInterface.register(PAIR_NAME, partial(describe_mask, positions=2))


def import_transformers() -> Any:
    """The package, or UnsupportedError where it is missing or older than version 5."""
    remedy = 'install it: pip install "pagedattn[hf]"'
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(f"running a Hugging Face model needs transformers >= 5 ({error}); {remedy}") from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise UnsupportedError(f"transformers >= 5 is needed, {transformers.__version__} is installed; {remedy}")
    return transformers


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [B, Hq, S, D], key and value [B, Hkv, S, D], rotated, not repeated.

    Only the new keys and values come; what else a sequence has lies in its cache.

    Raises:
        UnsupportedError: the call wants what a paged layer cannot give, or comes from outside a packed forward.
    """
    where = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', None)}"
    step: Attends | None = options.pop("paged_step", None)
    if type(getattr(module, "layer_idx", None)) is not int:
        raise UnsupportedError(
            f"{where} has no layer_idx and so no place in the KV cache (a tower for images or sound?): over a paged "
            "cache a model runs as a text model; leave other inputs out, or call enable(model), which leaves towers to "
            "transformers"
        )
    if step is None:
        raise MissingStepError(
            f"{where} got no paged step: call pagedattn.integrations.transformers.enable(model), and then the model "
            "itself and not a part of it, or use PackedModel"
        )
    sinks = options.pop("s_aux", None)
    call = _read_call(module, where, query, key, value, scaling, dropout, sinks, options)
    return step.attend(module, call, query, key, value, attention_mask, sinks), None


def _read_call(
    module: torch.nn.Module,
    where: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    sinks: torch.Tensor | None,
    options: Mapping[str, Any],
) -> AttentionCall:
    if module.training or dropout:
        raise UnsupportedError(f"{where} is in training, or wants dropout; call model.eval(): the cache is inference")
    if getattr(module, "is_causal", True) is False or options.get("is_causal", True) in (False, 0):
        raise UnsupportedError(f"{where} attends both ways (is_causal is False); only causal decoders are paged")
    if query.requires_grad:
        raise UnsupportedError(
            f"{where} is to be differentiated; use torch.no_grad(): no gradient flows through a cache"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedError(f"{where} has {query.shape[2]} queries and {key.shape[2]} keys: cross attention?")
    unknown = [
        name for name, given in options.items() if name not in _KNOWN and given is not None and given is not False
    ]
    if unknown:
        raise UnsupportedError(
            f"{where} gives its attention {', '.join(sorted(unknown))}, which no paged layer honours"
        )
    window = options.get("sliding_window")
    return AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        head_dim_v=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        sliding_window=window if window is not None and window > 0 else None,
        softcap=options.get("softcap") or None,
        has_sinks=sinks is not None,
    )


Layers = Mapping[int, tuple[AttentionCall, Attention | MLAAttention]]


def layer_of(
    layers: Layers,
    module: torch.nn.Module,
    call: AttentionCall,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Attention | MLAAttention:
    """The attention that was made for the layer that calls, and with its sinks.

    Raises:
        UnsupportedError: the layer asks for something else than when it was probed, or comes with a mask.
    """
    learnt, layer = layers.get(call.layer, (None, None))
    known = layer.sinks if isinstance(layer, Attention) else None
    if layer is None or call != learnt or sinks is not known:
        raise UnsupportedError(f"{type(module).__name__} of layer {call.layer} asks for {call}, it used to: {learnt}")
    if mask is not None:
        raise UnsupportedError(f"layer {call.layer} was given a mask, which a packed step has no place for")
    return layer
