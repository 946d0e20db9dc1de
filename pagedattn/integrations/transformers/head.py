"""A model's own code from hidden states to logits: its language model head with all that goes with it.

Families cap, scale or project logits after the head, each in the forward of its causal language model. That forward
runs here with the decoder taken out, so that logits are computed for the rows that are sampled and for no others.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError
from .refusals import takes_positions


class _Given(nn.Module):
    """Stands where the decoder was: its hidden states are those it is given for embeddings."""

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor, **_options: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)


class _GivenOutput:
    """A decoder's output with hidden states and nothing else, whatever fields the family has."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def decoder_of(model: Any) -> Any:
    """The decoder under a causal language model's head.

    Raises:
        UnsupportedError: the model does not say which it is.
    """
    inside = {id(module) for module in model.modules()} - {id(model)}
    candidates = model.get_decoder(), model.base_model, getattr(model, "model", None)
    bodies = [one for one in candidates if id(one) in inside]
    if not bodies:
        raise UnsupportedError(f"{type(model).__name__} has no decoder of its own under a language model head")
    # ModernBERT's get_decoder gives its head.
    return next((one for one in bodies if takes_positions(one)), bodies[0])


def without_decoder(model: Any, body: Any) -> Any:
    """A copy of `model` that shares everything with it but `body`: `inputs_embeds` are taken for its output."""
    path = next(name for name, module in model.named_modules() if module is body).split(".")
    head = parent = _shallow(model)
    for name in path[:-1]:
        parent._modules[name] = parent = _shallow(parent._modules[name])
    parent._modules[path[-1]] = _Given()
    return head


def _shallow(module: Any) -> Any:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
