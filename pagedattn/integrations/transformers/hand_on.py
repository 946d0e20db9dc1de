"""Keywords of a forward for attention whose decoder layer takes them and does not hand them on (StableLM, Nemotron)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from .attention import MissingStepError
from .probe import ProbedLayer, Recorder, probe


def probe_handing_on(
    model: Any, split: Callable[[torch.Tensor, torch.Tensor, Recorder], torch.Tensor] | None = None
) -> tuple[list[ProbedLayer], list[Any]]:
    """As `probe`, and the handles of hooks that the model's layers need to hand the step on; most need none.

    Raises:
        UnsupportedError: as `probe`; nothing is left hooked.
    """
    try:
        return probe(model, split), []
    except MissingStepError:
        handles = _hook_layers(model)
    try:
        return probe(model, split), handles
    except Exception as error:
        for handle in handles:
            handle.remove()
        if not isinstance(error, MissingStepError):
            raise
        raise UnsupportedError(
            f"{type(model).__name__} does not hand the keywords of its forward on to attention, by which that learns "
            "where keys and values lie; run it with transformers itself"
        ) from error


class _HandOn:
    """Gives the step of one decoder layer's call to the attention in it, and forgets it with the call."""

    def __init__(self) -> None:
        self._step: Any = None

    def hook(self, layer: torch.nn.Module, attentions: list[torch.nn.Module]) -> list[Any]:
        """The handles that take the hooks away."""
        return [
            layer.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._end, always_call=True),
            *(one.register_forward_pre_hook(self._give, with_kwargs=True) for one in attentions),
        ]

    def _begin(self, _layer: Any, _args: Any, given: dict[str, Any]) -> None:
        self._step = given.get("paged_step")

    def _give(self, _attention: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "paged_step": self._step}

    def _end(self, *_call: Any) -> None:
        self._step = None


def _hook_layers(model: Any) -> list[Any]:
    """Hook every module right above attention, which is a module with a layer_idx."""
    handles = []
    for layer in model.modules():
        attentions = [child for child in layer.children() if isinstance(getattr(child, "layer_idx", None), int)]
        if attentions and not isinstance(layer, torch.nn.ModuleList):
            handles += _HandOn().hook(layer, attentions)
    return handles
