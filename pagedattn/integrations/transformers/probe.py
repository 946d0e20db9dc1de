"""Learns what a loaded model asks of attention by running it on two tokens, and proves that its rows are independent.

Configs say different things in different families (a window that only some layers use, a scale that is no square
root); the call of each layer says what is meant. In the probe a token attends to itself alone, so whatever a token
still learns of its neighbour comes from a layer that a paged cache knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...errors import PagedAttnError, UnsupportedError, describe_error
from .attention import NAME, PAIR_NAME, PROBE_NAME, Attends, AttentionCall
from .latent_rows import expand_rows
from .masks import CausalMask, MaskNote
from .modalities import set_attention

# Rounding of one row may depend on the rows beside it; what another token leaks is far larger.
_ROUNDING = {8: 1e-6, 4: 1e-3, 2: 6e-2}


class LatentSizes(NamedTuple):
    """Of a latent row, and of a head that is expanded from it beside its rotated part."""

    latent: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """What one layer asks for, its sinks, and the mask that transformers has for it; `latent` where it keeps rows."""

    call: AttentionCall
    sinks: torch.Tensor | None
    mask: CausalMask | None
    latent: LatentSizes | None = None

    @property
    def window(self) -> int | None:
        """Tokens that the layer attends to, its own included. Some models say so in the mask only."""
        if self.call.sliding_window is not None or self.mask is None:
            return self.call.sliding_window
        return self.mask.window


@dataclass(slots=True)
class Recorder:
    """Stands in for a paged step: every token attends to itself. Keeps calls and queries [2, Hq, D] by layer."""

    layers: dict[int, ProbedLayer] = field(default_factory=dict)
    queries: list[torch.Tensor] = field(default_factory=list)

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
        if call.layer in self.layers:
            raise UnsupportedError(f"layer {call.layer} calls attention twice: cross attention, or a second branch?")
        if mask is not None and not hasattr(mask, "mask"):
            raise UnsupportedError(f"layer {call.layer} has a mask that transformers' mask functions did not make")
        noted = mask.mask if isinstance(mask, MaskNote) else None
        self.layers[call.layer] = ProbedLayer(call, sinks, noted)
        self.queries.append(query[0].transpose(0, 1))
        return value.repeat_interleave(call.num_heads // call.num_kv_heads, 1).transpose(1, 2).contiguous()


def probe(
    model: Any, split: Callable[[torch.Tensor, torch.Tensor, Recorder], torch.Tensor] | None = None
) -> list[ProbedLayer]:
    """Every layer's demands, in order.

    Args:
        model: a causal language model of transformers, loaded. Its attention implementation is "pagedattn" afterwards.
        split: input ids [2] and positions [2] to logits [2, vocab] by the way that serves steps, which counts positions
            from 0; None: the model's own way.

    Raises:
        UnsupportedError: a layer does not call attention, or asks for what is not paged; tokens learn of each other
            elsewhere than in attention, or do not follow the positions given; its code fails.
    """
    device, name = model.device, type(model).__name__
    text = model.config.get_text_config()
    first, second, third = (torch.tensor(i, device=device) % text.vocab_size for i in (11, 23, 37))
    expand_rows(model)
    one, other, pair = Recorder(), Recorder(), torch.stack((first, second))
    set_attention(model, PROBE_NAME)
    try:
        logits = run_whole(model, pair, torch.tensor((0, 1), device=device), one)
    finally:
        set_attention(model, NAME)
    layers = [one.layers[index] for index in sorted(one.layers)]
    _check_layers(name, layers, text.num_hidden_layers)
    tokens, positions = torch.stack((second, third)), torch.tensor((1, 7), device=device)
    if split is None:
        again = run_whole(model, tokens, positions, other)
    else:
        with _saying_why(name):
            again = split(tokens, positions, other)
    if {index: layer.call for index, layer in other.layers.items()} != {
        layer.call.layer: layer.call for layer in layers
    }:
        raise UnsupportedError(f"{name} does not call attention in the same way in every forward")
    for layer, (a, b) in enumerate(zip(one.queries, other.queries, strict=True)):
        if not alike(a[1], b[0]):
            raise UnsupportedError(
                f"{name} cannot share a row between sequences: a token's query in layer {layer} depends on the token "
                "before it, or on its place in the row, and not on its position_ids alone"
            )
    if not alike(logits[1], again[0]):
        raise UnsupportedError(f"{name} has logits that are no function of its decoder's last hidden state alone")
    if split is not None and not alike(run_whole(model, pair, None, Recorder()), logits):
        raise UnsupportedError(
            f"{name} does not count positions from 0 (RoBERTa's begin after padding_idx), as packed rows do; run it "
            "with transformers' generate over enable(model), which leaves positions to the model"
        )
    return layers


def packs_rows(model: Any) -> bool:
    """Whether positions that begin anew begin another sequence in a probed model, where there is no mask or cache."""
    recorder, pair = Recorder(), torch.zeros(2, dtype=torch.long, device=model.device)
    set_attention(model, PAIR_NAME)
    try:
        run_whole(model, pair, pair, recorder)
    finally:
        set_attention(model, NAME)
    return any(layer.mask is not None and layer.mask.window == 1 for layer in recorder.layers.values())


def run_whole(model: Any, input_ids: torch.Tensor, positions: torch.Tensor | None, step: Attends) -> torch.Tensor:
    """Input ids [2] and positions [2] (None: the model's own) to logits [2, vocab], by the model's own forward."""
    name, given = type(model).__name__, {} if positions is None else {"position_ids": positions[None]}
    with _saying_why(name):
        out = model(input_ids=input_ids[None], use_cache=False, paged_step=step, **given)
    if getattr(out, "logits", None) is None:
        raise UnsupportedError(f"{name} gives no logits; load it with a language model head (AutoModelForCausalLM)")
    return out.logits[0]


@contextmanager
def _saying_why(name: str) -> Iterator[None]:
    """A model's own code may want more of a mask, or of its config, than is there while it is probed."""
    try:
        yield
    except (PagedAttnError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{name} fails on two tokens over the attention interface ({describe_error(error)}); run it with "
            "transformers itself"
        ) from error


def _check_layers(name: str, layers: list[ProbedLayer], count: int) -> None:
    called = [layer.call.layer for layer in layers]
    if called != list(range(count)):
        raise UnsupportedError(
            f"{name} has {count} layers, but its attention interface was called by {called or 'none'}: the others keep "
            "another state than keys and values, or attend on their own"
        )
    for layer in layers:
        asked, mask = layer.call.sliding_window, layer.mask
        if mask is None:
            raise UnsupportedError(f"{name} builds no mask for layer {layer.call.layer}, so its meaning is not known")
        if asked is not None and not mask.agrees_with(asked):
            raise UnsupportedError(
                f"{name} gives layer {layer.call.layer} a window of {asked}, and a mask of {mask.window or 'none'}"
            )


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal up to rounding; NaN is never alike."""
    limit = _ROUNDING[one.element_size()] * float(one.abs().max())
    return bool((one - other).abs().max() <= limit)
