"""ParallelRunner: the engine's runner where several ranks hold the model. It computes nothing itself."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from pagedattn.errors import (
    CapacityError,
    EngineDeadError,
    InvalidInputError,
    SecurityError,
    UnsupportedError,
    WeightsError,
)

from ..config import EngineConfig
from ..kv_group import KVGroup, SwapConfig
from ..models.detokenizer import Detokenizer, detokenizer_of
from ..models.folder import ModelFolder
from ..models.kv_scales import load_kv_scales
from ..models.latent_sharding import check_shares
from ..models.text_part import placeholder_tokens
from ..models.tokenizer import Tokenizer
from ..scheduler_output import SampledToken, SchedulerOutput
from ..worker.host_batch import HostBatchBuilder
from ..worker.persistent_batch import PersistentBatch
from .channel import Kind
from .launcher import Workers
from .step_wire import decode_tokens, encode_step
from .watch import Limits, RankFailed, WorkerMonitor

# Seconds without a sign of life that a rank has at least while it loads: importing libraries may hold the interpreter
# for long. No setting of its own, as heartbeat_timeout raises it too.
_SILENCE_AT_START = 120.0
_AS_IT_WAS = (CapacityError, SecurityError, UnsupportedError, WeightsError)


class ParallelRunner:
    """Runs every step on all ranks. Errors of a rank end the engine: the others may be waiting for it anywhere.

    Attributes: as `ModelRunner`, as the ranks report them.

    Raises:
        UnsupportedError: the model cannot be sharded over this number of ranks, or there are not enough GPUs.
        InvalidInputError, WeightsError, SecurityError, CapacityError: as `ModelRunner`, with the rank.
        EngineDeadError: a rank died at start.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self.folder = ModelFolder(config.model)
        shape = check_shares(config, self.folder)
        load_kv_scales(config, self.folder, shape)  # each rank does it too: here no process has to be started for it
        devices = _devices(config.device, size)
        self.prefers_overlap = devices[0] != "cpu"
        self.placeholder_tokens = placeholder_tokens(self.folder.require_json("config.json"))
        self.tokenizer = Tokenizer.from_folder(self.folder)
        self._limits = Limits(config.heartbeat_timeout, config.step_timeout)
        self._start_limits = Limits(*map(max, self._limits, (_SILENCE_AT_START, config.start_timeout)))
        self._in_doubt = False
        self._workers = Workers(size)
        try:
            self._watch = WorkerMonitor(self._workers)
            self._start(config, devices)
        except BaseException:
            self._workers.kill()
            raise

    def make_detokenizer(self) -> Detokenizer:
        """A detokenizer for one request; UnsupportedError for a folder without a tokenizer."""
        return detokenizer_of(self.tokenizer, self.folder)

    def describe(self) -> str:
        """Which attention backend every kind of layer has, and why; the same on every rank."""
        return self._description

    def execute(self, step: SchedulerOutput) -> list[SampledToken | None]:
        """Run one step on all ranks; as `ModelRunner.execute`.

        An interrupt leaves a step that the ranks still run; they run it before any other, and its answer is dropped.

        Raises:
            EngineDeadError: a rank is lost, with its number and the cause; no rank is left.
        """
        return self.launch(step).read()

    def launch(self, step: SchedulerOutput) -> SentStep:
        """Begin a step on all ranks; as `ModelRunner.launch`.

        Raises:
            EngineDeadError: as `execute`.
        """
        if self._in_doubt:  # an interrupt may have kept the step before from being sent
            self._builder.forget()
        self._in_doubt = True
        number = self._watch.send(Kind.STEP, [encode_step(self._builder.pack(step))], self._limits)
        self._in_doubt = False
        return SentStep(step, number, self._watch, self._limits)

    def close(self) -> None:
        """End all ranks; nothing runs afterwards."""
        self._workers.stop()
        if self._watch.dead is None:
            self._watch.dead = RankFailed("the engine was closed", 0)

    def _start(self, config: EngineConfig, devices: list[str]) -> None:
        """Have every rank load, and take over what they found out."""
        threads = max(1, torch.get_num_threads() // len(devices))
        common = {"size": len(devices), "meeting_file": self._workers.meeting_file, "threads": threads}
        bodies = [
            json.dumps({"rank": rank, **common, "config": asdict(replace(config, device=device))}).encode()
            for rank, device in enumerate(devices)
        ]
        try:
            number = self._watch.send(Kind.START, bodies, self._start_limits)
            answers = self._watch.answers(number, len(devices), self._start_limits)
        except RankFailed as error:
            raise _as_it_was(error) from error.__cause__
        self._workers.have_met()
        facts = [json.loads(answer) for answer in answers]
        # What a block costs differs a little: the last rank may have fewer rows of the LM head.
        swap_configs = [fact.pop("swap_config") for fact in facts]
        first = facts[0]
        if any(other != first for other in facts) or len({blocks for blocks, *_ in swap_configs}) > 1:
            raise EngineDeadError("the ranks disagree about the model: please report it")
        self.swap_config = SwapConfig(*swap_configs[0])
        self.num_kv_blocks: int = first["num_kv_blocks"]
        self.kv_groups = [KVGroup(*group) for group in first["kv_groups"]]
        self.vocab_size: int = first["vocab_size"]
        self.max_model_len: int = first["max_model_len"]
        self.eos_token_ids: list[int] = first["eos_token_ids"]
        self._description: str = first["description"]
        # What the ranks have of the requests, in whose steps they take part alike.
        state = PersistentBatch(self.kv_groups, config.max_num_seqs, self.max_model_len, torch.device("meta"))
        self._builder = HostBatchBuilder(self.kv_groups, state)


class SentStep:
    """A step that the ranks have, or will have before any other."""

    def __init__(self, step: SchedulerOutput, number: int, watch: WorkerMonitor, limits: Limits) -> None:
        self._step, self._number, self._watch, self._limits = step, number, watch, limits

    def read(self) -> list[SampledToken | None]:
        """Wait for its tokens; as `ParallelRunner.execute`."""
        (answer,) = self._watch.answers(self._number, 1, self._limits)
        return decode_tokens(answer, self._step)


def _as_it_was(error: RankFailed) -> Exception:
    """What a rank raised at start, in the class in which a model of one rank raises it."""
    failure = error.failure
    if failure is None:
        return error
    if failure["fields"]:
        return InvalidInputError(*failure["fields"])
    kind = next((kind for kind in _AS_IT_WAS if kind.__name__ in failure["kinds"]), None)
    return error if kind is None else kind(f"rank {error.rank}: {failure['text']}")


def _devices(name: str | None, size: int) -> list[str]:
    """The device of each rank. The driver itself never touches a GPU."""
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise InvalidInputError("device", "cpu, cuda, or the first of the GPUs to use, cuda:0", repr(name)) from error
    if device.type == "cpu":
        return ["cpu"] * size
    first = device.index or 0
    if device.type != "cuda" or not dist.is_nccl_available():
        raise UnsupportedError(f"tensor parallelism runs on cuda with NCCL, or on the cpu; got {device}")
    if first + size > gpus:
        raise UnsupportedError(f"tensor_parallel_size={size} from cuda:{first} on needs more than the {gpus} GPUs here")
    return [f"cuda:{first + rank}" for rank in range(size)]
