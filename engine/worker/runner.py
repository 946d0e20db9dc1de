"""ModelRunner: a decoder on one device, its KV cache, and the execution of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from pagedattn import LayerCache, PagedKVCache, plan_step
from pagedattn.errors import CapacityError, EngineDeadError, InvalidInputError, UnsupportedError

from ..config import EngineConfig
from ..kv_group import KVGroup, groups_of_layers
from ..models.detokenizer import Detokenizer, detokenizer_of
from ..models.factory import make_model
from ..models.folder import ModelFolder
from ..models.text_part import placeholder_tokens
from ..models.tokenizer import Tokenizer
from ..models.tp_group import TPGroup
from ..runner_protocol import StepObserver
from ..sampling.sampler import AsyncTokens, BatchState, Sampler
from ..sampling.token_counts import TokenCounts
from ..scheduler_output import SampledToken, SchedulerOutput
from .block_copier import BlockCopier
from .decode_graphs import DecodeGraphs, default_sizes
from .device_batch import BatchSender
from .host_batch import HostBatch, HostBatchBuilder
from .kv_memory import BlockBytes, NumBlocks, size_kv_blocks, swap_config
from .persistent_batch import PersistentBatch
from .range_check import RangeCheck


class ModelRunner:
    """Loads a model folder and runs steps. Keeps no progress: a step that raised can be run again as it was.

    Attributes:
        model_config: the shape of the model.
        tokenizer: of the folder, None where it has none.
        placeholder_tokens: ids that stand for images, video or sound, which this engine does not read.
        max_model_len: longest sequence in tokens.
        num_kv_blocks: blocks of the cache, the null block included.
        swap_config: host memory for blocks of preempted requests.
        kv_groups: block size and window per KV group, and the number of blocks of the second cache, where there is one.
        prefers_overlap: whether the device works while the host does something else.
        eos_token_ids: of the generation config, else the config, else the tokenizer.
        observer: called after each eager step until it wants no more; None for none.

    Raises:
        WeightsError, SecurityError, UnsupportedError: a model folder that cannot be loaded.
        CapacityError: weights or cache do not fit the device.
    """

    def __init__(self, config: EngineConfig, ranks: TPGroup | None = None) -> None:
        """Load the model, or one rank's share of it, and measure how large its cache can be.

        Args:
            ranks: those that run the same steps as this one, each with its share of the model.
        """
        folder = ModelFolder(config.model)
        self.folder = folder
        self.device = _device(config.device)
        self.placeholder_tokens = placeholder_tokens(folder.require_json("config.json"))
        self.model = make_model(config, folder, self.device, ranks)
        self.model_config = self.model.config
        self.max_model_len = config.longest_sequence(self.model_config.max_position_embeddings)
        self.prefers_overlap = self.device.type == "cuda"
        self.vocab_size = self.model_config.vocab_size
        self.tokenizer = Tokenizer.from_folder(folder)
        self.eos_token_ids = self.model_config.eos_token_ids
        if not self.eos_token_ids and self.tokenizer is not None:
            self.eos_token_ids = self.tokenizer.eos_token_ids
        self._specs = self.model.kv_cache_specs(config.tokens_per_block)
        layout = PagedKVCache.layout_of(self._specs)
        self.kv_groups = _groups_of(layout, self.max_model_len)
        self._attentions = self.model.attention_layers()
        self._state = PersistentBatch(self.kv_groups, config.max_num_seqs, self.max_model_len, self.device)
        self._builder = HostBatchBuilder(self.kv_groups, self._state)
        self._inputs = BatchSender(self._state, self.device)
        self._sampler = Sampler(self.vocab_size, self.device)
        self._counts = TokenCounts(config.max_num_seqs, self.vocab_size, self.device)
        if self.device.type == "cuda":  # what is left is the cache's, so that a step would find no room
            self._counts.reserve()
        self._graphs = self._make_graphs(config)
        self.observer: StepObserver | None = None
        self._allocate(config, layout, ranks)
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture(self._layers)
        if any(layer.spec.format.takes_scales for layer in self._attentions):
            self.observer = RangeCheck(self._attentions)  # only now: what measures memory are no prompts

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """The buffers of captured steps, if the configuration and the device want any."""
        sizes = config.graph_sizes
        if config.enforce_eager or not self.model.capturable or (sizes is None and self.device.type != "cuda"):
            return None
        sizes = default_sizes(config.max_num_seqs) if sizes is None else sizes
        with torch.inference_mode():
            return DecodeGraphs(self.model, self._state, sizes, self.max_model_len, self.device)

    def make_detokenizer(self) -> Detokenizer:
        """A detokenizer for one request; UnsupportedError for a folder without a tokenizer."""
        return detokenizer_of(self.tokenizer, self.folder)

    def describe(self) -> str:
        """Which attention backend every kind of layer has, and why."""
        return "\n".join(dict.fromkeys(layer.selection.describe() for layer in self._attentions))

    def execute(self, step: SchedulerOutput) -> list[SampledToken | None]:
        """Run one step: block copies, forward, and a token for every row that `samples`, None for the others.

        Raises:
            CapacityError: out of device memory; the cache and the engine are intact.
            EngineDeadError: the device failed and no further step can run.
        """
        return self.launch(step).read()

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Start a step and wait for nothing. Steps run one after another, each on what those before it wrote.

        A token that is PLACEHOLDER_TOKEN to its request is the one that the request's step before has drawn.

        Raises:
            CapacityError, EngineDeadError: as `execute`.
        """
        try:
            return LaunchedStep(step, self.launch_batch(self._builder.pack(step)))
        except BaseException:
            self._builder.forget()
            raise

    @torch.inference_mode()
    def launch_batch(self, packed: HostBatch) -> AsyncTokens | None:
        """Start a packed step: the tokens of its sampled rows, None where there are none.

        Raises:
            CapacityError, EngineDeadError: as `execute`.
        """
        with typed_faults(len(packed.tokens)):
            return self._launch(packed)

    def _launch(self, packed: HostBatch) -> AsyncTokens | None:
        self._mover.move(packed.moves)
        if not len(packed.rows):
            return None
        if self._graphs is not None and self._graphs.serves(packed):
            logits, drawn, rows = self._graphs.run(packed)
        else:
            inputs = self._inputs.send(packed)
            metadata = plan_step(self._attentions, inputs.common_by_group)
            hidden = self.model(inputs.input_ids, inputs.positions, self._layers, metadata)
            if self.observer is not None and not self.observer.saw_step(self.cache, inputs.common_by_group):
                self.observer = None
            if not len(packed.sampled):
                return None
            drawn, rows = None, inputs.rows
            logits = self.model.logits(hidden if packed.only_decodes else hidden.index_select(0, inputs.sampled))
        state = BatchState(rows, self._state.params, self._counts)
        tokens = self._sampler.sample_async(logits, state, packed.sampling, drawn=drawn)
        if tokens.tokens is not drawn:
            self._state.last_tokens.index_put_((rows.state_rows,), tokens.tokens.to(torch.int32))
        return tokens

    def _allocate(self, config: EngineConfig, layout: PagedKVCache, ranks: TPGroup | None) -> None:
        """Make the cache as large as memory allows, which a run with a cache of one block finds out.

        On every rank it is as large as on the one that has least.
        """
        self._clean_cache = config.clean_cache
        recent, groups = layout.recent, groups_of_layers(self.kv_groups)
        block_bytes = BlockBytes(len(layout.slabs) * layout.bytes_per_block, 0 if recent is None else recent.nbytes)
        self._make_cache(NumBlocks(1, None if recent is None else 1), 0)
        blocks = size_kv_blocks(
            *(config, self.device, block_bytes, groups, self.max_model_len, self.execute), self._graph_bytes
        )
        if ranks is not None:
            smallest = None if blocks.recent is None else ranks.smallest(blocks.recent)
            blocks = NumBlocks(ranks.smallest(blocks.cache), smallest)
        self.num_kv_blocks = blocks.cache
        if recent is not None:
            self.kv_groups[-1] = replace(self.kv_groups[-1], recent_blocks=blocks.recent)
        self.swap_config = swap_config(config, self.device, block_bytes.cache, groups, self.model.num_parameters)
        self._make_cache(blocks, self.swap_config.num_blocks)

    def _graph_bytes(self) -> int:
        """What captured steps will take, found out with the cache that there is."""
        with torch.inference_mode():
            return 0 if self._graphs is None else self._graphs.measure(self._layers)

    def _make_cache(self, blocks: NumBlocks, num_host_blocks: int) -> None:
        self.cache = PagedKVCache.from_specs(self._specs, blocks.cache, device=self.device, recent_blocks=blocks.recent)
        self._mover = BlockCopier(self.cache, num_host_blocks, self._clean_cache)
        self._layers: Sequence[LayerCache] = [self.cache.layer(index) for index in range(self.cache.num_layers)]


class LaunchedStep:
    """A step that the device is working on."""

    def __init__(self, step: SchedulerOutput, drawn: AsyncTokens | None) -> None:
        self._step, self._drawn = step, drawn

    def read(self) -> list[SampledToken | None]:
        """Wait for the tokens: one for every row that `samples`, None for the others."""
        if self._drawn is None:
            return self._step.align(())
        with typed_faults(self._step.num_tokens):
            return self._step.align(self._drawn.read())


@contextmanager
def typed_faults(num_tokens: int) -> Iterator[None]:
    """What torch raises of a device as the errors that the engine knows."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedy = "lower max_num_batched_tokens or gpu_memory_utilization"
        raise CapacityError(f"a step of {num_tokens} tokens ran out of memory; {remedy}: {error}") from error
    except torch.AcceleratorError as error:
        raise EngineDeadError(f"the device failed: {error}") from error


def _groups_of(layout: PagedKVCache, max_model_len: int) -> list[KVGroup]:
    """Those of layers, and behind them that of the second cache, if there is one.

    What is kept there is no more than the longest sequence has: the block of its last token, and those before it.
    """
    groups = [KVGroup(group.spec.block_size, group.spec.window()) for group in layout.groups]
    if layout.recent is None:
        return groups
    size, formats = groups[0].block_size, [spec.format for spec in layout.groups[0].specs]
    most = (max_model_len - 1) // size
    window = min(most, max(form.recent_blocks(size) for form in formats))
    first = min(most - window, max(form.first_blocks(size) for form in formats))
    layers = KVGroup(size, window_blocks=window, first_blocks=first)
    return [layers, replace(layers, recent_blocks=1)]


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
