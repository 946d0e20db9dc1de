"""ModelRunner: a decoder on one device, its KV cache, and the execution of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedattn import LayerCache, PagedKVCache, plan_step
from pagedattn.errors import CapacityError, EngineDeadError, InvalidInputError, UnsupportedError

from .block_mover import BlockMover
from .config import EngineConfig
from .detokenizer import Detokenizer
from .kv_memory import size_kv_blocks, swap_room
from .model_factory import make_model
from .paths import ModelFolder
from .sampler import Sampler
from .step import KVGroup, SampledToken, Step
from .step_inputs import InputPacker
from .tokenizer import Tokenizer


class ModelRunner:
    """Loads a model folder and runs steps. Keeps no progress: a step that raised can be run again as it was.

    Attributes:
        model_config: the shape of the model.
        tokenizer: of the folder, None where it has none.
        max_model_len: longest sequence in tokens.
        num_kv_blocks: blocks of the cache, the null block included.
        swap_room: host memory for blocks of preempted requests.
        kv_groups: block size and window per KV group.
        eos_token_ids: of the generation config, else the config, else the tokenizer.

    Raises:
        WeightsError, SecurityError, UnsupportedError: a model folder that cannot be loaded.
        CapacityError: weights or cache do not fit the device.
    """

    def __init__(self, config: EngineConfig) -> None:
        folder = ModelFolder(config.model)
        self.folder = folder
        self.device = _device(config.device)
        self.model = make_model(config, folder, self.device)
        self.model_config = self.model.config
        self.max_model_len = config.longest_sequence(self.model_config.max_position_embeddings)
        self.vocab_size = self.model_config.vocab_size
        self.tokenizer = Tokenizer.from_folder(folder)
        self.eos_token_ids = self.model_config.eos_token_ids
        if not self.eos_token_ids and self.tokenizer is not None:
            self.eos_token_ids = self.tokenizer.eos_token_ids
        self._specs = self.model.kv_cache_specs(config.block_size)
        layout = PagedKVCache.from_specs(self._specs, 1, device="meta")
        self.kv_groups = [KVGroup(group.spec.block_size, group.spec.window()) for group in layout.groups]
        self._attentions = self.model.attention_layers()
        self._inputs = InputPacker(self.kv_groups, self.device)
        self._sampler = Sampler(self.vocab_size, self.device)
        self._allocate(config, layout.nbytes)

    def make_detokenizer(self) -> Detokenizer:
        """A detokenizer for one request; UnsupportedError for a folder without a tokenizer."""
        if self.tokenizer is None:
            raise UnsupportedError(f"{self.folder.root} has no tokenizer.json; use token ids")
        return Detokenizer(self.tokenizer)

    def describe(self) -> str:
        """Which attention backend every kind of layer has, and why."""
        return "\n".join(dict.fromkeys(layer.selection.describe() for layer in self._attentions))

    @torch.inference_mode()
    def execute(self, step: Step) -> list[SampledToken | None]:
        """Run one step: block copies, forward, and a token for every row that `samples`, None for the others.

        Raises:
            CapacityError: out of device memory; the cache and the engine are intact.
            EngineDeadError: the device failed and no further step can run.
        """
        try:
            return self._execute(step)
        except torch.OutOfMemoryError as error:
            remedy = "lower max_num_batched_tokens or gpu_memory_utilization"
            raise CapacityError(f"a step of {step.num_tokens} tokens ran out of memory; {remedy}: {error}") from error
        except torch.AcceleratorError as error:
            raise EngineDeadError(f"the device failed: {error}") from error

    def _execute(self, step: Step) -> list[SampledToken | None]:
        self._mover.move(step)
        if not step.scheduled:
            return []
        inputs = self._inputs.pack(step)
        metadata = plan_step(self._attentions, inputs.commons)
        hidden = self.model(inputs.input_ids, inputs.positions, self._layers, metadata)
        sampling = [item.request for item in step.scheduled if item.samples]
        if not sampling:
            return [None] * len(step.scheduled)
        logits = self.model.logits(hidden.index_select(0, inputs.sampled_rows))
        tokens = iter(self._sampler.sample(logits, sampling))
        return [next(tokens) if item.samples else None for item in step.scheduled]

    def _allocate(self, config: EngineConfig, block_bytes: int) -> None:
        """Make the cache as large as memory allows, which a run with a cache of one block finds out."""
        self._clean_cache = config.clean_cache
        self._make_cache(1, 0)
        self.num_kv_blocks = size_kv_blocks(
            config, self.device, block_bytes, self.kv_groups, self.max_model_len, self.execute
        )
        self.swap_room = swap_room(config, self.device, block_bytes, self.kv_groups, self.model.num_parameters)
        self._make_cache(self.num_kv_blocks, self.swap_room.num_blocks)

    def _make_cache(self, num_blocks: int, num_host_blocks: int) -> None:
        self.cache = PagedKVCache.from_specs(self._specs, num_blocks, device=self.device)
        self._mover = BlockMover(self.cache, num_host_blocks, self._clean_cache)
        self._layers: Sequence[LayerCache] = [self.cache.layer(index) for index in range(self.cache.num_layers)]


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InvalidInputError("device", "a device that torch knows, such as cpu or cuda:0", repr(name)) from error
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise UnsupportedError(f"device {device} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)
