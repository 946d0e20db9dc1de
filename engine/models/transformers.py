"""A model folder run through its own transformers modules; config and weights are read as safely as the engine's own.

transformers gets parsed values and tensors, never the folder: it would follow names in it, take pickled weights,
adapters of other repositories, or kernels that a config names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pagedattn import (
    Attention,
    FullAttentionSpec,
    LayerCache,
    MLAAttention,
    MLASpec,
    SlidingWindowSpec,
    StepMetadata,
)
from pagedattn.errors import CapacityError, InvalidInputError, SecurityError, UnsupportedError, WeightsError

from ..config import EngineConfig
from .config import read_dtype, read_eos_token_ids, refuse_quantised_weights
from .folder import ModelFolder
from .kv_scales import load_kv_scales, set_kv_scales
from .latent_sharding import check_logits, keep_heads, logits_of
from .loader import read_tensors
from .sharding import columns_of, gather_columns
from .text_part import text_config
from .tp_group import TPGroup

if TYPE_CHECKING:
    from pagedattn.integrations.transformers import PackedModel

# Keys of a config.json that choose code and not numbers.
_CODE_KEYS = ("attn_implementation", "experts_implementation", "fusion_config", "transformers_weights")


@dataclass(frozen=True, slots=True)
class TransformersShape:
    """What the engine reads of a config of transformers."""

    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype  # what `dtype="auto"` means
    eos_token_ids: tuple[int, ...]


class TransformersModel:
    """A `PackedModel` behind the interface of the engine's own decoder."""

    may_wait: ClassVar[bool] = True  # a model's own code may do anything between its layers
    logits_dtype: torch.dtype = torch.float32

    def __init__(self, config: TransformersShape, packed: PackedModel, ranks: TPGroup | None = None) -> None:
        """ranks: those that hold heads of the same model."""
        self.config = config
        self._packed, self._ranks = packed, ranks

    @property
    def name(self) -> str:
        """The class of transformers."""
        return type(self._packed.model).__name__

    @property
    def capturable(self) -> bool:
        """Whether its kernels depend on shapes alone: what transformers says of models that torch.compile takes whole.

        Ranks run eagerly: what they exchange goes through hooks of modules that no graph has been tried with.
        """
        return self._ranks is None and bool(getattr(self._packed.model, "_can_compile_fullgraph", False))

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and cache."""
        return self._packed.dtype

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache] | None,
        metadata: StepMetadata,
    ) -> torch.Tensor:
        """input_ids and positions [T] to hidden states [T, hidden_size]; the new keys and values go to `caches`."""
        return self._packed(input_ids, positions, caches, metadata)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [n, hidden_size] to float32 [n, vocab_size], in `out` where that is given."""
        logits = self._packed.logits(hidden)
        if self._ranks is not None:  # each rank has all of them, but maybe not to the last bit, and samples for itself
            count = logits.shape[1]
            first, end = columns_of(count, self._ranks.rank, self._ranks.size)
            logits = gather_columns(logits[:, first:end].float(), count, self._ranks)
        return logits.float() if out is None else out.copy_(logits)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, of experts that rest too."""
        return sum(parameter.numel() for parameter in self._packed.model.parameters())

    def attention_layers(self) -> list[Attention | MLAAttention]:
        """The attention of every layer, in order."""
        return self._packed.attention_layers()

    def kv_cache_specs(self, block_size: int) -> list[FullAttentionSpec | SlidingWindowSpec | MLASpec]:
        """What every layer keeps per token, for blocks of `block_size` tokens."""
        return self._packed.kv_cache_specs(block_size)


def load_transformers_model(
    config: EngineConfig, folder: ModelFolder, device: torch.device, ranks: TPGroup | None = None
) -> TransformersModel:
    """Build the folder's model with transformers and load its weights; of a latent one, a rank's heads.

    Raises:
        UnsupportedError: transformers is missing, does not know the model, or it cannot be right over a paged cache.
        SecurityError: the folder asks for code of its own.
        WeightsError: tensors are missing, unexpected or of another shape.
        CapacityError: the device cannot hold the weights.
    """
    from pagedattn.integrations.transformers import PackedModel, import_transformers, refuse

    raw = _read_config(folder)
    transformers = import_transformers()
    hf_config, model_class = _classes(transformers, raw)
    positions = getattr(hf_config, "max_position_embeddings", None) or config.max_model_len
    refuse(model_class, hf_config, positions and config.longest_sequence(positions))
    if positions is None:
        raise InvalidInputError("max_model_len", "given for a model whose config has no max_position_embeddings", None)
    generation = folder.read_json("generation_config.json") or {}
    eos = read_eos_token_ids(generation) or read_eos_token_ids(raw)
    shape = TransformersShape(hf_config.vocab_size, positions, read_dtype(raw), eos)
    dtype = shape.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    scales = load_kv_scales(config, folder)
    if dtype == torch.float64:
        hf_config._experts_implementation = "eager"  # grouped matrix products have no float64
    with _quiet(transformers):
        if config.load_format == "dummy":
            # Ranks cut whole models down to their heads, which a device might not hold.
            made_on = device if ranks is None else torch.device("cpu")
            model = _randomised(model_class, hf_config, dtype, config.seed, made_on)
        else:
            model = _loaded(model_class, hf_config, dtype, folder)
    model = _placed(model, device, ranks)
    packed = PackedModel(
        model,
        block_size=config.tokens_per_block,
        backend=config.backend,
        max_model_len=config.max_model_len,
        clean_cache=config.clean_cache,
        kv_cache_dtype=config.kv_cache_dtype,
        latent=config.latent if scales is None else False,  # which are of keys and values of every head
    )
    layers = [layer for layer in packed.attention_layers() if isinstance(layer, Attention)]
    if scales is not None:
        size = 1 if ranks is None else ranks.size
        scales.check_shapes([(one.spec.kv_heads * size, one.spec.head_dim, one.spec.value_dim) for one in layers])
    set_kv_scales(config, folder, layers, scales, None if ranks is None else _kv_heads(layers, ranks))
    return TransformersModel(shape, packed, ranks)


def _placed(model: Any, device: torch.device, ranks: TPGroup | None) -> Any:
    """The model on its device, cut down to a rank's heads before."""
    whole = None
    if ranks is not None:
        whole = logits_of(model.eval())
        keep_heads(model, ranks)
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the weights do not fit on {device}: {error}") from None
    if whole is not None:
        check_logits(model, whole)
    return model


def _kv_heads(layers: Sequence[Attention], ranks: TPGroup) -> slice | None:
    """Which of the model's KV heads a rank has, where keys and values of every head are kept."""
    count = layers[0].spec.kv_heads if layers else 0
    return slice(ranks.rank * count, (ranks.rank + 1) * count) if count else None


def _read_config(folder: ModelFolder) -> dict[str, Any]:
    raw = text_config(folder.require_json("config.json"))
    if raw.get("auto_map"):
        raise SecurityError("config.json has `auto_map`, which imports code of the model folder; remove it to load")
    refuse_quantised_weights(raw)
    raw.pop("quantization_config", None)  # over which transformers would stumble
    return {key: value for key, value in raw.items() if not key.startswith("_") and key not in _CODE_KEYS}


def _classes(transformers: Any, raw: Mapping[str, Any]) -> tuple[Any, Any]:
    """The config and the causal language model class of transformers for a parsed config.json."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(f"transformers {transformers.__version__} does not know model_type {model_type!r}")
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(raw))
    except Exception as error:  # each config class checks in its own way
        raise InvalidInputError("config.json", f"one that transformers reads as {model_type}", error) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"transformers has no causal language model for model_type {model_type!r}")
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = found[0] if isinstance(found, tuple) else found
    named = raw.get("architectures")
    if named and model_class.__name__ not in named:
        raise UnsupportedError(f"architectures {named} is not supported; for {model_type} it is {model_class.__name__}")
    return config, model_class


def _randomised(model_class: Any, config: Any, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """Random weights, drawn on the device: a host takes minutes for 30 GB."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        try:
            return model_class._from_config(config, dtype=dtype)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"the weights do not fit on {device}: {error}") from None


def _loaded(model_class: Any, config: Any, dtype: torch.dtype, folder: ModelFolder) -> Any:
    tensors = read_tensors(folder)
    try:
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise WeightsError(f"the checkpoint in {folder.root} does not fit {model_class.__name__}: {error}") from error
    faults = {what: sorted(map(str, report[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}
    found = [f"{what}: {', '.join(keys[:8])}" for what, keys in faults.items() if keys]
    if found:
        raise WeightsError(f"tensors of the checkpoint in {folder.root} do not fit {model_class.__name__}, {found}")
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' own reports and bars: what is wrong with a checkpoint is raised here."""
    logging_ = transformers.utils.logging
    level, bar = logging_.get_verbosity(), logging_.is_progress_bar_enabled()
    logging_.set_verbosity_error()
    logging_.disable_progress_bar()
    try:
        yield
    finally:
        logging_.set_verbosity(level)
        if bar:
            logging_.enable_progress_bar()
