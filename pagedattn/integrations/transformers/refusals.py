"""What cannot be right over a paged cache, told from a model's class and config before any weight is read."""

from __future__ import annotations

import inspect
from typing import Any

from ...errors import InvalidInputError, UnsupportedError
from .attention import import_transformers

_PAGED_LAYERS = {"full_attention", "sliding_attention"}
_OTHER_LAYERS = {
    "chunked_attention": "chunked attention: what a token may see ends at a chunk, which attention is never told",
    "linear_attention": "linear attention keeps a state per sequence, not keys and values",
    "conv": "convolutions keep a state per sequence, not keys and values",
    "mamba": "state space layers keep a state per sequence, not keys and values",
    "hybrid": "a state space or a convolution beside attention keeps a state per sequence",
}
_KNOWN_LENGTHS = ("dynamic", "longrope")


def refuse(model_class: Any, config: Any, max_model_len: int | None = None) -> None:
    """Raise UnsupportedError with every reason why this model cannot run over a paged cache.

    Args:
        model_class, config: of transformers.
        max_model_len: longest sequence that will be run; None is the model's own limit.
    """
    text = config.get_text_config()  # of a multimodal model, which runs without its other inputs
    try:
        reasons = [*_of_architecture(model_class, config), *_of_layers(text), *_of_rope(text, max_model_len)]
    except RuntimeError as error:  # of transformers, for what per_layer_config says of single layers
        reasons = [f"its config differs from layer to layer in what is read of it as a whole ({error})"]
    if reasons:
        raise UnsupportedError(
            f"{model_class.__name__} ({config.model_type}) cannot run over the paged cache: {'; '.join(reasons)}. "
            "Run it with transformers itself"
        )


def _of_architecture(model_class: Any, whole: Any) -> list[str]:
    reasons, config = [], whole.get_text_config()
    if getattr(whole, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder, whose cross attention is not paged here")
    if getattr(config, "relative_attention_num_buckets", None):
        reasons.append("it adds a bias by relative position to attention scores (relative_attention_num_buckets)")
    if not _calls_interface(model_class):
        reasons.append("it has no attention interface (it does not call attention through ALL_ATTENTION_FUNCTIONS)")
    if getattr(model_class, "_is_stateful", False):
        reasons.append("it is stateful: some layers keep a state per sequence, not keys and values")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        reasons.append("it has ALiBi, which transformers keeps in the mask")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) in (
        True,
        "all",
    ):
        reasons.append("it attends both ways")
    if getattr(whole, "output_attentions", False):
        reasons.append("output_attentions is set, and paged attention keeps no weights")
    return reasons


def _calls_interface(model_class: Any) -> bool:
    """Whether attention goes through ALL_ATTENTION_FUNCTIONS; not every family that does so sets the flag for it."""
    return model_class._supports_attention_backend or model_class._can_set_attn_implementation()


def _of_layers(config: Any) -> list[str]:
    kinds = sorted(set(getattr(config, "layer_types", None) or []) - _PAGED_LAYERS)
    reasons = [f"layer_types has {kind} ({_OTHER_LAYERS.get(kind, 'not known here')})" for kind in kinds]
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        reasons.append(f"its last {shared} layers use the keys of earlier ones (num_kv_shared_layers)")
    return reasons


def _of_rope(config: Any, max_model_len: int | None) -> list[str]:
    """Kinds whose frequencies follow the longest position of the batch: sequences would depend on each other."""
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None) or 0
    longest = limit if max_model_len is None else max_model_len
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = one.get("rope_type", "default")
        known = one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        known = known if kind == "longrope" and known else limit
        if kind in _KNOWN_LENGTHS and longest > known:
            return [
                f"its {kind} positions change for all sequences of a batch once one is longer than {known} tokens; "
                f"set max_model_len={known} or less"
            ]
    return []


def check_model(model: Any) -> None:
    """Raise InvalidInputError for what is no model of transformers."""
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise InvalidInputError(
            "model", "a PreTrainedModel", type(model).__name__, "give the model that is inside, or load one"
        )


def takes_positions(body: Any) -> bool:
    """Whether a module's forward has position_ids."""
    return "position_ids" in inspect.signature(body.forward).parameters


def check_signature(body: Any) -> None:
    """The decoder must take the position of each token: in a packed row it is not the token's index."""
    if not takes_positions(body):
        raise UnsupportedError(f"{type(body).__name__} takes no position_ids, so that sequences cannot share a row")
