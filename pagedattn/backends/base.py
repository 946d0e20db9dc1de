"""The contract of a backend: facts as data, a metadata builder run once per step, an implementation run per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from .. import env, ops
from ..call import AttentionCall
from ..errors import CapacityError, InvalidInputError, UnsupportedError
from ..formats.base import LayerCache
from ..formats.mla_rows.format import split
from ..kernels.mla_decode.plan import MLADecodePlan
from ..ops.launch_plan import LaunchPlan, RepeatedPlan
from ..spec import AttentionSpec, GraphLevel, Scale
from ..spec.capabilities import Capabilities, Rejection
from ..step.bounds import check_bounds
from ..step.metadata import CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here at all: the version found, or why not and what to type. One that can run, with a
    reason and a hint, serves less well than it could: who selects it is warned once."""

    ok: bool
    version: str = ""
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that static buffers must hold."""

    max_seqs: int
    max_tokens: int
    max_blocks_per_seq: int


_STATIC = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


@dataclass
class AttentionMetadata:
    """What a builder makes of one step. Backends add fields; integers inside captured metadata are bounds."""

    common: CommonAttentionMetadata
    # What a layer launches, where its attention is these launches and nothing else; None where it is more, or unknown.
    plan: LaunchPlan | None = field(default=None, kw_only=True)
    mla_plan: MLADecodePlan | None = field(default=None, kw_only=True)  # the same of absorbed latent attention

    @property
    def repeated(self) -> RepeatedPlan | None:
        """The plan by whose launches calls are made again, where they are all that attention does."""
        return self.plan

    @property
    def shares_prefix(self) -> bool:
        """Whether the keys that all sequences share are read once. Of captured metadata: of each step that is replayed,
        which may share another prefix than the captured one, or none."""
        return self.plan is not None and self.plan.cascade is not None

    def describe(self) -> str:
        """Which kernel and path will run on this step."""
        plan = self.plan or self.mla_plan
        return type(self).__name__ if plan is None else plan.describe()


class AttentionMetadataBuilder(ABC):
    """Makes metadata once per step for each (KV group, spec); all host work of a backend happens here."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.spec, self.device, self.limits, self.workspace = spec, device, limits, workspace

    @abstractmethod
    def build(
        self, common: CommonAttentionMetadata, into: AttentionMetadata | None = None, capture: bool = False
    ) -> AttentionMetadata:
        """Metadata of a step.

        `capture=True` gives metadata that owns its static buffers, for a CUDA graph to record; `into` is such metadata,
        rewritten in place for a replay and returned.

        Raises:
            UnsupportedError: a batch of this kind cannot be captured here.
            CapacityError: the step is larger than what `into` was captured for.
        """

    def device_update(self, metadata: AttentionMetadata) -> None:
        """The part of `build` that a CUDA graph may capture; nothing by default."""
        return None


def clone_for_capture(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """`common` with device tensors of its own for a graph to record, and without what would not stay true of a replay:
    lengths on the host, what is shared, and how many sequences decode, unless all do."""
    tensors = {name: getattr(common, name).clone() for name in _STATIC}
    if common.recent_table is not None:
        tensors["recent_table"] = common.recent_table.clone()
    decodes = common.num_decodes if common.num_decodes == common.num_seqs else 0
    unknown = {"query_start_loc_cpu": None, "seq_lens_cpu": None, "shared_prefix_len": 0}
    return common.replace(**tensors, **unknown, num_decodes=decodes)


def check_capture(level: GraphLevel, common: CommonAttentionMetadata) -> None:
    """Raise UnsupportedError where a batch of this kind is above what a backend can capture."""
    if common.max_query_len <= 1:
        kind = GraphLevel.UNIFORM_SINGLE_TOKEN_DECODE
    elif common.num_tokens == common.num_seqs * common.max_query_len:
        kind = GraphLevel.UNIFORM_BATCH
    else:
        kind = GraphLevel.ALWAYS
    if kind > level:
        raise UnsupportedError(
            f"this step needs graph level {kind.name}, the backend states {level.name}; run it eagerly"
        )


def check_matches_spec(spec: AttentionSpec, call: AttentionCall) -> None:
    """Raise InvalidInputError where a call brings what the spec did not announce, or lacks what it did."""
    extras = (("sinks", spec.has_sinks, call.sinks), ("alibi_slopes", spec.has_alibi, call.alibi_slopes))
    for name, announced, given in extras:
        if announced != (given is not None):
            expected = "given, as the spec announces" if announced else "None, as the spec announces none"
            raise InvalidInputError(name, expected, "a tensor" if given is not None else "None")


def copy_into_captured(captured: CommonAttentionMetadata, common: CommonAttentionMetadata) -> None:
    """Copy a step into captured tensors, padded with sequences that have no tokens; nothing where it stands in them.

    Raises:
        CapacityError: the step is larger than what was captured.
        InvalidInputError: it means blocks of another size, or its bounds do not hold (PAGEDATTN_CHECK=1): whatever
            replays it may look at nothing.
    """
    if captured.block_size != common.block_size and None not in (captured.block_size, common.block_size):
        raise InvalidInputError("block_size", f"{captured.block_size}, as of the captured step", common.block_size)
    names = ("num_seqs", "num_tokens", "max_query_len", "max_seq_len")
    room = [(name, getattr(common, name), getattr(captured, name)) for name in names]
    for name, got, most in (*room, ("len(slot_mapping)", len(common.slot_mapping), len(captured.slot_mapping))):
        if got > most:
            raise CapacityError(
                f"{name} is {got}, but the captured metadata holds at most {most}; capture a larger step"
            )
    if common.block_table is captured.block_table:
        return
    if env.check_level():
        check_bounds(common)
    count, width = common.num_seqs, min(common.block_table.shape[1], captured.block_table.shape[1])
    slots = len(common.slot_mapping)
    captured.query_start_loc[: count + 1].copy_(common.query_start_loc[: count + 1], non_blocking=True)
    captured.query_start_loc[count + 1 :].copy_(common.query_start_loc[count : count + 1])
    captured.seq_lens[:count].copy_(common.seq_lens[:count], non_blocking=True)
    captured.seq_lens[count:].zero_()
    captured.block_table[:count, :width].copy_(common.block_table[:count, :width], non_blocking=True)
    captured.block_table[count:].zero_()
    if captured.recent_table is not None and common.recent_table is not None:
        width = min(common.recent_table.shape[1], captured.recent_table.shape[1])
        captured.recent_table[:count, :width].copy_(common.recent_table[:count, :width], non_blocking=True)
        captured.recent_table[count:].zero_()
    captured.slot_mapping[:slots].copy_(common.slot_mapping, non_blocking=True)
    captured.slot_mapping[slots:].fill_(-1)


class AttentionImpl(ABC):
    """Runs one layer's attention. Stateless but for the spec."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def forward(self, call: AttentionCall, metadata: AttentionMetadata) -> torch.Tensor:
        """Attend, writing nothing to the cache; see `AttentionCall` for shapes.

        Returns:
            `call.out`, or a new tensor [T, Hq, Dv]; `call.lse` is filled where it is given.
        """

    def accumulates(self, metadata: AttentionMetadata) -> bool:
        """Whether `accumulate` serves such steps."""
        return False

    def accumulate(self, call: AttentionCall, metadata: AttentionMetadata, prior: torch.Tensor | None = None) -> None:
        """Attend, and add the result to `call.out` and `call.lse`, which hold attention of the rows over other keys.

        prior: float32, contiguous, where that holds the outputs instead, which then go to `call.out`.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it does not accumulate")

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Write the first len(slot_mapping) rows of key [T', Hkv, D] and value [T', Hkv, Dv] to their slots; of latent
        attention rows [T', 1, L + R], and no value."""
        if self.spec.latent_dim is not None:
            parts = split(key[:, 0], self.spec.latent_dim)
            ops.concat_and_cache_mla(*parts, kv_cache.key, slot_mapping, k_scale=k_scale)
            return
        target = None if value is None else kv_cache.value
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        ops.reshape_and_cache(key, value, kv_cache.key, target, slot_mapping, **scales, **kv_cache.stored)

    def seal(self, kv_cache: LayerCache, metadata: AttentionMetadata) -> None:
        """Encode the blocks that the step's rows filled, once these are written. Not for backends: nothing, but where a
        format encodes whole blocks. Planes of `kv_cache` may be of several layers, [L, P, S, Hkv, n]."""
        return None


class AttentionBackend(ABC):
    """Class-level facts; never instantiated."""

    name: str
    builder: type[AttentionMetadataBuilder]
    impl: type[AttentionImpl]

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Whether its library can be imported here."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """What it serves, as data."""

    @classmethod
    def variant(cls, spec: AttentionSpec) -> str:
        """Which of several libraries or kernels behind one name serves `spec`; empty where there is one."""
        return ""

    @classmethod
    def preferred_block_size(cls, spec: AttentionSpec) -> int:
        """The block size it wants of a cache that is yet to be built."""
        own = cls.capabilities().default_block_size
        return max(own, spec.format.default_block_size) if spec.uses_cache else own

    @classmethod
    def is_fastest_for(cls, phase: str, spec: AttentionSpec) -> bool:
        """Whether it was measured to be the fastest of all at just this, whatever the usual order of a phase is."""
        return False

    @classmethod
    def rejections(cls, spec: AttentionSpec) -> list[Rejection]:
        """Every reason why it cannot serve `spec`; none means that it can."""
        state = cls.availability()
        missing = [] if state.ok else [Rejection("availability", cls.name, state.reason, state.hint)]
        return [*missing, *cls.capabilities().rejections(spec)]
