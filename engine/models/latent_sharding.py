"""One rank's share of a latent (MLA) model of transformers: whole heads of its attention.

Every head reads the same latent rows, so that each rank keeps all of them and attends with heads of its own. The
projections of queries and the one from rows to keys and values lose the rows of other ranks' heads, and the output
projection their columns, after which an all-reduce adds up the parts: one per attention. Everything else of a layer,
its experts among it, is whole on every rank.

No class is known by name. What is cut is held to the whole model: both run on a few tokens, with the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pagedattn.errors import UnsupportedError

from ..config import EngineConfig
from .config import ModelConfig, load_model_config
from .folder import ModelFolder
from .sharding import RowParallelLinear, ShardSpec
from .text_part import text_config
from .tp_group import TPGroup

_TOKENS = 8  # of the run that holds a cut model to the whole one
# Logits of a cut model may be off by this part of the largest: sums are in another order, maybe on another device.
_ROUNDING = {8: 1e-6, 4: 1e-3, 2: 6e-2}


def is_latent(config: EngineConfig, folder: ModelFolder) -> bool:
    """Whether a folder's model is of latent attention, which transformers runs."""
    raw = text_config(folder.require_json("config.json"))
    return config.model_impl != "native" and isinstance(raw.get("kv_lora_rank"), int)


def check_shares(config: EngineConfig, folder: ModelFolder) -> ModelConfig | None:
    """The shape of a model that can be cut into `config.tensor_parallel_size` parts; None where transformers runs it.

    Raises:
        UnsupportedError: it cannot; says which sizes it can be cut into.
    """
    size = config.tensor_parallel_size
    if not is_latent(config, folder):
        shape = load_model_config(folder)
        ShardSpec.of(shape, 0, size)
        return shape
    heads = text_config(folder.require_json("config.json")).get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1 or heads % size:
        possible = [n for n in range(1, heads + 1) if heads % n == 0] if isinstance(heads, int) else []
        raise UnsupportedError(
            f"tensor_parallel_size={size}: {heads} query heads cannot be divided by it; possible: {possible}"
        )
    return None


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    """float64 [n, vocab] on the CPU, of a few tokens by the model's own attention."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.arange(11, 11 + 13 * _TOKENS, 13, device=model.device) % vocab
    return model(input_ids=ids[None], use_cache=False).logits[0].double().cpu()


def keep_heads(model: Any, ranks: TPGroup) -> None:
    """Cut the attention of a model down to this rank's heads, in place.

    Raises:
        UnsupportedError: it has no latent attention, or one of other parts than are known.
    """
    modules = list(_latent_modules(model))
    if not modules:
        raise UnsupportedError(f"{type(model).__name__} has no latent attention that could be cut into heads")
    for module in modules:
        heads = module.config.num_attention_heads
        name = "q_proj" if getattr(module, "q_proj", None) is not None else "q_b_proj"
        parts: Mapping[str, Any] = {one: getattr(module, one, None) for one in (name, "kv_b_proj", "o_proj")}
        for one, linear in parts.items():
            if type(linear) is not nn.Linear or linear.weight.shape[one == "o_proj"] % heads:
                raise UnsupportedError(
                    f"{one} of {type(module).__name__} is no plain linear layer of {heads} heads and cannot be cut"
                )
        for linear in (parts[name], parts["kv_b_proj"]):
            linear.out_features //= ranks.size
            linear.weight = _share(linear.weight, 0, ranks)
            if linear.bias is not None:
                linear.bias = _share(linear.bias, 0, ranks)
        out = parts["o_proj"]
        out.in_features //= ranks.size
        out.weight = _share(out.weight, 1, ranks)
        module.o_proj = RowParallelLinear(out, ranks)
        module.num_heads = heads // ranks.size


def check_logits(model: Any, whole: torch.Tensor) -> None:
    """Hold a cut model to the logits of the whole one.

    Raises:
        UnsupportedError: they are others.
    """
    got = logits_of(model)
    limit = _ROUNDING[model.dtype.itemsize] * float(whole.abs().max())
    if not bool(((got - whole).abs() <= limit).all()):
        raise UnsupportedError(
            f"{type(model).__name__} computes something else once its heads are shared between ranks; run it with "
            "tensor_parallel_size=1"
        )


def _latent_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(type(module), "expand_kv"))


def _share(whole: torch.Tensor, dim: int, ranks: TPGroup) -> nn.Parameter:
    """This rank's part of a weight, without the rest in memory."""
    return nn.Parameter(whole.detach().chunk(ranks.size, dim)[ranks.rank].clone(), requires_grad=False)
