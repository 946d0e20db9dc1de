"""Which models keep latent rows: those whose layers, on two tokens, expand rows as `MLAAttention` does.

No class is known by name. The model runs once as it is and once with rows in place of keys and values; what the second
run makes of them by the layer's weight must be the keys and values of the first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...errors import UnsupportedError
from .attention import AttentionCall
from .latent_rows import expand_rows, keep_rows, latent_modules, up_projection
from .probe import LatentSizes, ProbedLayer, Recorder, alike, run_whole

_log = logging.getLogger("pagedattn")
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value, output


def find_latent(model: Any, learnt: list[ProbedLayer], asked: bool = False) -> list[ProbedLayer]:
    """The probed layers, with the sizes of their rows where the model keeps latent ones from now on (`keep_rows`).

    All layers do or none: what is not exactly latent attention stays expanded, and a warning says why.

    Raises:
        UnsupportedError: rows are `asked` for, and the model cannot keep them; says why.
    """
    name, signs = type(model).__name__, ("kv_a_proj_with_mqa", "expand_kv")
    if not any(hasattr(module, sign) for module in model.modules() for sign in signs):
        if asked:
            raise _cannot(name, "it has no latent attention")
        return learnt
    try:
        return _found(model, learnt)
    except UnsupportedError as error:
        expand_rows(model)
        if asked:
            raise _cannot(name, str(error)) from error
        _log.warning("%s keeps expanded keys and values, not latent rows: %s", name, error)
        return learnt


def _cannot(model: str, reason: str) -> UnsupportedError:
    remedy = "leave latent out, which keeps keys and values of every head instead"
    return UnsupportedError(f"latent=True, but {model} cannot keep latent rows: {reason}; {remedy}")


def _found(model: Any, learnt: list[ProbedLayer]) -> list[ProbedLayer]:
    if next(latent_modules(model), None) is None:
        raise UnsupportedError("it has no expand_kv, which a newer release of transformers may bring")
    for layer in learnt:
        if layer.window is not None or layer.sinks is not None:
            raise UnsupportedError(f"layer {layer.call.layer} has a sliding window or sinks")
    for module in latent_modules(model):
        linear = up_projection(module)
        hooked = any(vars(linear).get(name) for name in ("_forward_hooks", "_forward_pre_hooks", "forward"))
        if type(linear.weight) is not torch.nn.Parameter or linear.bias is not None or hooked:
            raise UnsupportedError(f"kv_b_proj of {type(module).__name__} does more than multiply with a matrix")
    ids = torch.tensor((11, 23), device=model.device) % model.config.get_text_config().vocab_size
    expanded = _Expanded()
    run_whole(model, ids, None, expanded)
    rows = _Rows(expanded.parts, model.dtype)
    keep_rows(model)
    run_whole(model, ids, None, rows)
    if sorted(rows.found) != [layer.call.layer for layer in learnt]:
        raise UnsupportedError("some layers are not called while they keep rows")
    found = (rows.found[layer.call.layer] for layer in learnt)
    return [replace(layer, call=call, latent=sizes) for layer, (call, sizes) in zip(learnt, found, strict=True)]


class _Expanded(Recorder):
    """A recorder that keeps what each layer hands to its attention, and gets from it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, _Parts] = {}

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
        out = super().attend(module, call, query, key, value, mask, sinks)
        self.parts[call.layer] = query, key, value, out
        return out


@dataclass(slots=True)
class _Rows:
    """Holds rows to the parts of the expanded run, and gives its outputs: no layer gets other states than there, where
    a router might choose other experts."""

    expanded: Mapping[int, _Parts]
    dtype: torch.dtype
    found: dict[int, tuple[AttentionCall, LatentSizes]] = field(default_factory=dict)

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
        *wanted, out = self.expanded[call.layer]
        weight, latent, rope, width = up_projection(module).weight, key.shape[-1], value.shape[-1], out.shape[-1]
        sizes = LatentSizes(latent, rope, call.head_dim - rope, width)
        rows = call.num_heads * (sizes.nope + width), latent
        if weight.dtype != self.dtype or weight.shape != rows or {key.shape[1], value.shape[1]} != {1}:
            raise UnsupportedError(f"layer {call.layer} has a kv_b_proj of {weight.dtype} {list(weight.shape)}")
        made = torch.einsum("btl,hdl->bhtd", key[:, 0], weight.unflatten(0, (call.num_heads, -1)))
        made_key = torch.cat((made[..., : sizes.nope], value.expand(-1, call.num_heads, -1, -1)), -1)
        parts = {"queries": query, "keys": made_key, "values": made[..., sizes.nope :]}
        for (name, one), other in zip(parts.items(), wanted, strict=True):
            if one.shape != other.shape or not alike(one, other):
                raise UnsupportedError(f"layer {call.layer} has other {name} than its latent rows and kv_b_proj make")
        self.found[call.layer] = call, sizes
        return out
