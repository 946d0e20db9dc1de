"""The text part of a model whose class also takes images: its config, and its weights among those of the towers.

Without images it is one of the decoders that run here: Qwen-VL turns parts of a head by time, height and width, which
are one and the same position for text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedattn.errors import InvalidInputError, UnsupportedError

_TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.", "image_newline")
_OF_THE_WHOLE = ("auto_map", "quantization_config", "eos_token_id", "dtype", "torch_dtype")
_PREFIXES = ("model.language_model.", "language_model.model.")
_INPUTS = {"image": "an image", "video": "a video", "audio": "sound"}


@dataclass(frozen=True, slots=True)
class _Multimodal:
    """A released class, the decoder that its text part is (None: as the config says), and what a config may leave out:
    the token that stands for each other input, and keys of the text part.
    """

    architecture: str
    placeholders: Mapping[str, int]
    text_type: str | None = None
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_QWEN_INPUTS = {"image": 151655, "video": 151656}
_QWEN2_VL = {"num_key_value_heads": 8, "rope_theta": 1e6, "max_window_layers": 80}
_DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_LLAMA, "intermediate_size": 11008, "max_position_embeddings": 2048}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "intermediate_size": 14336, "max_position_embeddings": 131072}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
}
_MULTIMODAL: Mapping[str, _Multimodal] = {
    "gemma3": _Multimodal("Gemma3ForConditionalGeneration", {"image": 262144}, "gemma3_text", tied=True),
    "llava": _Multimodal("LlavaForConditionalGeneration", {"image": 32000}),
    "llava_next": _Multimodal("LlavaNextForConditionalGeneration", {"image": 32000}),
    "mistral3": _Multimodal("Mistral3ForConditionalGeneration", {"image": 10}),
    "qwen2_vl": _Multimodal("Qwen2VLForConditionalGeneration", _QWEN_INPUTS, "qwen2", defaults=_QWEN2_VL),
    "qwen2_5_vl": _Multimodal("Qwen2_5_VLForConditionalGeneration", _QWEN_INPUTS, "qwen2", defaults=_QWEN2_VL),
    "qwen3_vl": _Multimodal("Qwen3VLForConditionalGeneration", _QWEN_INPUTS, "qwen3", defaults={"rope_theta": 5e5}),
}


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of a class whose text part runs here."""
    model_type = raw.get("model_type")
    return isinstance(model_type, str) and model_type in _MULTIMODAL


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part as that of a decoder of its own; a config of another model as it is.

    Raises:
        UnsupportedError: another class than the one that generates, or a text part that does not run here.
        InvalidInputError: text_config is no JSON object.
    """
    if not is_multimodal(raw):
        return raw
    kind = _MULTIMODAL[raw["model_type"]]
    named = raw.get("architectures")
    if named and kind.architecture not in named:
        raise UnsupportedError(f"architectures {named} is not supported; of {raw['model_type']}: {kind.architecture}")
    inner = raw.get("text_config")
    if inner is None:  # Qwen2-VL has one config for all
        inner = {key: value for key, value in raw.items() if key != "vision_config"}
    if not isinstance(inner, dict):
        raise InvalidInputError("text_config in config.json", "a JSON object", repr(inner))
    model_type = kind.text_type or inner.get("model_type", "llama")
    if model_type not in _DECODERS:
        raise UnsupportedError(f"text_config of model_type {model_type!r} is not supported: {', '.join(_DECODERS)}")
    architecture, defaults = _DECODERS[model_type]
    whole = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    tied = raw.get("tie_word_embeddings", inner.get("tie_word_embeddings", kind.tied))
    own = {"model_type": model_type, "architectures": [architecture], "tie_word_embeddings": tied}
    return _without_axes({**defaults, **kind.defaults, **inner, **whole, **own})


def placeholder_tokens(raw: Mapping[str, Any]) -> dict[int, str]:
    """The token ids that stand for other inputs of a model, and what each stands for; none for a text model.

    Raises:
        InvalidInputError: an id in config.json is no integer.
    """
    found = {}
    defaults = _MULTIMODAL[raw["model_type"]].placeholders if is_multimodal(raw) else {}
    for what, phrase in _INPUTS.items():
        key = next((key for key in (f"{what}_token_id", f"{what}_token_index") if raw.get(key) is not None), None)
        token = defaults.get(what) if key is None else raw[key]
        if token is None:
            continue
        if type(token) is not int:
            raise InvalidInputError(f"{key} in config.json", "an integer", repr(token))
        found[token] = phrase
    return found


def text_name(name: str) -> str | None:
    """The name that a tensor of such a checkpoint has in the text part's own; None where it is of another part."""
    if name.removeprefix("model.").startswith(_TOWERS):
        return None
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _without_axes(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of one axis, where a token has the same one on all."""
    rope = config.pop("rope_scaling", None) or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config
    if rope.get("type") == "mrope" or rope.get("rope_type") == "mrope":
        rope = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "default"}
    rope = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {**config, "rope_parameters": rope}
