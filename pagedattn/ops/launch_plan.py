"""LaunchPlan: the kernels that serve a step, as `attention_plan` chose them, and what they use on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ..kernels.decode import cascade
from ..kernels.decode.plan import DecodeConfig
from ..kernels.decode_sm90 import plan as sm90_decode
from ..kernels.decode_sm90.plan import HopperDecodeConfig
from ..kernels.inputs import AttentionInputs
from ..kernels.prefill.plan import AttentionConfig
from ..kernels.prefill_sm90 import plan as sm90
from ..kernels.prefill_sm90.tile_schedule import fill_tile_schedule, has_splits
from ..kernels.shape import AttentionShape, BatchBounds, shape_of

Family = Literal["decode", "decode_sm90", "prefill", "prefill_sm90"]


class Span(NamedTuple):
    """Sequences first..last of a step, of at most max_query_len new tokens each, which one kernel serves."""

    kernel: Family
    first: int
    last: int
    max_query_len: int


class KernelLaunch(NamedTuple):
    """A launch of a kernel."""

    span: Span
    config: DecodeConfig | HopperDecodeConfig | AttentionConfig | sm90.TileSchedulerParams


class RepeatedPlan(Protocol):
    """What a layer asks of a plan by which its calls are made again (`pagedattn.layers.replay`)."""

    calls: dict[object, Any]

    @property
    def executions(self) -> tuple[int, ...]: ...

    @property
    def num_launches(self) -> int: ...


@dataclass(slots=True, eq=False)
class LaunchPlan:
    """The launches of a step, and what they use on the device: calls that share a plan must not run at the same time.

    portable_because: why sequences of many tokens go to the portable prefill kernel; "" where they do not.
    workspace: int32, counters and partial results, None where no launch splits keys.
    tile_schedule: int32, of the Hopper prefill kernel; counters in it come back to zero.
    copy_turns: in how many turns, each of as many KV heads, that kernel attends to a copy of the prompts' keys and
        values in 16 bits; 0 where it reads the cache.
    passes: over the keys of prompts of which a copy has no room for one head; each has a copy of its own.
    prefix: the launch over a prefix that the first launch's sequences share, which goes before and is added to; None
        where each attends to all of its keys alone.
    executed: how often calls were made by it, by which a caller sees that its own was.
    calls: what a layer keeps of a call, to make it again for other layers (`pagedattn.layers.replay`).
    """

    shape: AttentionShape
    bounds: BatchBounds
    launches: tuple[KernelLaunch, ...]
    portable_because: str
    workspace_size: int = 0  # int32 elements that the launches need
    workspace: torch.Tensor | None = None
    tile_schedule: torch.Tensor | None = None
    copy_turns: int = 0
    passes: tuple[KeyPass, ...] = ()
    prefix: LaunchPlan | None = None
    cascade: cascade.CascadeMetadata | None = None
    executed: int = 0
    calls: dict[object, Any] = field(default_factory=dict, repr=False)

    @property
    def executions(self) -> tuple[int, ...]:
        """`executed`, of each plan that has launches of a call."""
        return (self.executed,)

    @property
    def num_launches(self) -> int:
        """Of kernels, by each call; 0 where they are not all that a call does."""
        if self.passes:
            return 0
        copies = max(2 * self.copy_turns - 1, 0)  # a turn is a copy and what attends to it
        sums = max(self.copy_turns, 1) if self.splits_prompts else 0
        return len(self.launches) + copies + sums + (0 if self.prefix is None else self.prefix.num_launches)

    @property
    def splits_prompts(self) -> bool:
        """Whether tiles of the Hopper prefill kernel may be splits, whose partial states another launch adds up."""
        return self.tile_schedule is not None and has_splits(self.tile_schedule)

    @property
    def accumulates(self) -> bool:
        """Whether its kernels add to what outputs hold (`ops.paged_attention(accumulate=True)`)."""
        kernels = ("decode", "decode_sm90", "prefill")
        return self.prefix is None and all(launch.span.kernel in kernels for launch in self.launches)

    @property
    def shared_prefix(self) -> tuple[torch.Tensor | None, int]:
        """What is known of a prefix that decodes attend to once: a tensor (None where nothing is), keys at most."""
        return (None, 0) if self.cascade is None else (self.cascade.tensor, self.cascade.max_length)

    def serves(self, inputs: AttentionInputs) -> bool:
        """Whether a call can be made by this plan: one of another shape, or with strides that a kernel cannot follow,
        takes a plan of its own."""
        if not self.shape.covers(shape_of(inputs)) or self.bounds.num_seqs != len(inputs.seq_lens):
            return False
        launches = self.launches + (() if self.prefix is None else self.prefix.launches)
        kernels = {launch.span.kernel for launch in launches}
        if "decode_sm90" in kernels and not sm90_decode.has_words(inputs):
            return False
        why_not = sm90.why_not_queries if self.copy_turns or self.passes else sm90.why_not_tensors
        return not ("prefill_sm90" in kernels and why_not(inputs))

    def allocate(self, device: torch.device, block_table: torch.Tensor | None, prefix_len: int = 0) -> None:
        """Make what `update` fills: the tile schedule, and the metadata of a shared prefix of now `prefix_len` keys."""
        for span, config in self.launches:
            if isinstance(config, sm90.TileSchedulerParams) and not self.passes:
                shape = sm90.schedule_shape(config, self.bounds.part(*span[1:]))
                self.tile_schedule = torch.empty(shape, dtype=torch.int32, device=device)
        for one in self.passes:
            one.allocate(device)
        if self.prefix is not None and block_table is not None:
            longest, count = self.prefix.bounds.max_seq_len, self.launches[0].span.last
            self.cascade = cascade.CascadeMetadata.of(longest, prefix_len, count, block_table)
            self.prefix.allocate(device, None)

    def update(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor | None) -> None:
        """Fill what depends on the step's lengths, on the device: a CUDA graph may record it."""
        for span, config in self.launches:
            if not isinstance(config, sm90.TileSchedulerParams):
                continue
            starts, lens = query_start_loc[span.first :], seq_lens[span.first :]
            if self.tile_schedule is not None:
                fill_tile_schedule(config, self.tile_schedule, starts, lens)
            for one in self.passes:
                one.update(starts, lens)
        if self.cascade is not None and self.shape.block_size is not None and block_table is not None:
            self.cascade.fill(query_start_loc, seq_lens, block_table, self.shape.block_size)
            if self.prefix is not None:
                self.prefix.update(*self.cascade.of_prefix, None)

    def describe(self) -> str:
        """Which kernels run, by how many programs, and why the portable prefill kernel where it does."""
        if not self.launches:
            return "nothing to do"
        first, *rest = map(self._describe, self.launches)
        if self.prefix is not None and self.cascade is not None:
            how = self.prefix._how(self.prefix.launches[0])
            first += f", shared prefix of {self.cascade.length} keys attended once ({how})"
        return ", ".join((first, *rest))

    def _describe(self, launch: KernelLaunch) -> str:
        family, count = launch.span.kernel.split("_")[0], launch.span.last - launch.span.first
        return f"{family} kernel: {count} sequences ({self._how(launch)})"

    def _how(self, launch: KernelLaunch) -> str:
        config = launch.config
        if isinstance(config, HopperDecodeConfig):
            return f"for Hopper, {config.programs} programs, tiles of {config.tuning.tile} keys"
        if isinstance(config, DecodeConfig):
            return f"{config.programs} programs, tiles of {config.tuning.block_n} keys"
        if launch.span.kernel == "prefill":
            return f"the portable one: {self.portable_because}"
        how = ", split-KV" if self.splits_prompts else ""
        turns = f", in {self.copy_turns} turns" if self.copy_turns > 1 else ""
        turns = f", in {len(self.passes)} passes over their keys" if self.passes else turns
        copied = f", keys and values dequantised before{turns}" if self.copy_turns or self.passes else ""
        return f"for Hopper{how}{copied}"


@dataclass(slots=True, eq=False)
class KeyPass:
    """Blocks first..last of each of some prompts, to which `plan` attends alone. What passes leave is merged.

    seq_lens: [B] int32, keys from the first of these blocks on, of all later blocks too: positions stay what they are
        beside keys.
    """

    first: int
    last: int
    plan: LaunchPlan
    seq_lens: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> None:
        self.seq_lens = torch.empty(self.plan.bounds.num_seqs, dtype=torch.int32, device=device)
        self.plan.allocate(device, None)

    def update(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """As of LaunchPlan, with the lengths of the prompts."""
        if self.seq_lens is not None:
            torch.sub(seq_lens, self.first * (self.plan.shape.block_size or 0), out=self.seq_lens).clamp_(min=0)
            self.plan.update(query_start_loc, self.seq_lens, None)

    def part(self, inputs: AttentionInputs) -> AttentionInputs:
        """The call of the prompts over these blocks. A sink joins the denominator once, with the first ones."""
        table, lens = inputs.block_table, self.seq_lens
        if table is None or lens is None:
            raise ValueError("passes are over a block table, of a plan that is allocated")
        plan, sinks = self.plan, None if self.first else inputs.sinks
        own = {"block_table": table[:, self.first : self.last], "seq_lens": lens, "sinks": sinks}
        return inputs._replace(**own, mask=plan.shape.mask, max_seq_len=plan.bounds.max_seq_len)
