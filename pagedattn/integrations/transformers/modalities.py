"""Models with towers for images or sound run as text models: what they are given besides text is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from .attention import NAME, PAIR_NAME, PROBE_NAME

_TEXT = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache_position", "use_cache"),
    *("labels", "logits_to_keep", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
}
_KINDS_OF_TOKENS = {"token_type_ids", "mm_token_type_ids"}  # 0 is text


def refuse_other_inputs(model: Any, names: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for arguments of a multimodal model's forward that bring images, video or sound.

    Args:
        names: parameters that the forward names.
        given: its arguments.
    """
    if model.config.get_text_config() is model.config:
        return
    for name in names:
        value = given.get(name)
        if value is None or name in _TEXT:
            continue
        if name in _KINDS_OF_TOKENS and isinstance(value, torch.Tensor) and not bool(value.any()):
            continue
        if isinstance(value, torch.Tensor) or (isinstance(value, list | tuple | dict) and value):
            inside = f" ({', '.join(map(str, value))})" if isinstance(value, dict) else ""
            raise UnsupportedError(
                f"{name}{inside} is given: over a paged cache {type(model).__name__} runs as a text model, since "
                "images, video and sound have masks and positions of their own; leave it out, or disable(model) first"
            )


def attention_of(model: Any) -> dict[str, str]:
    """The attention implementation of a model and of its parts, as `set_attn_implementation` takes it."""
    config: Any = model.config
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    named = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **named}


def set_attention(model: Any, name: str) -> None:
    """Let a model and its text part attend by `name`; towers keep the attention that they have, unless it is paged."""
    config, wanted = model.config, {**attention_of(model), "": name}
    for part in config.sub_configs:
        own = getattr(config, part, None)
        if own is config.get_text_config():
            wanted[part] = name
        elif wanted.get(part) in (NAME, PROBE_NAME, PAIR_NAME):  # the whole was loaded by that name
            wanted[part] = _default_attention(model, own)
    model.set_attn_implementation(wanted)


def _default_attention(model: Any, part: Any) -> str:
    """What transformers chooses for the module with this config where the user does not."""
    module = next((module for module in model.modules() if getattr(module, "config", None) is part), None)
    return "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
