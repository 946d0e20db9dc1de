"""The sum of partial states of prefill on Hopper, from a schedule as the scheduler fills it."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill_sm90 import plan as sm90
from pagedattn.kernels.prefill_sm90 import reduce_splits, tile_rows
from pagedattn.kernels.prefill_sm90.plan import TileSchedulerParams, head_parts
from pagedattn.kernels.prefill_sm90.tile_schedule import fill_tile_schedule
from pagedattn.kernels.shape import BatchBounds
from pagedattn.runtime.workspace import COUNTERS, new_workspace

head_of, token_of = tile_rows.head_of.fn, tile_rows.token_of.fn


def stored(outputs: torch.Tensor) -> torch.Tensor:
    """Outputs [64, D] as `split_kv.publish` leaves them: eight columns of all rows, then the next; of rows first those
    of even eights."""
    return outputs.reshape(4, 2, 8, -1, 8).permute(3, 1, 0, 2, 4).reshape(-1)


def drawn(parts: int, width: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States of 64 rows, and what they come to: outputs [64, width] and lse [64]."""
    m, sums = torch.randn(parts, 64, generator=draw) * 9, torch.rand(parts, 64, generator=draw) + 0.5
    outputs = torch.randn(parts, 64, width, generator=draw)
    for nth, rows in ((0, slice(0, None, 5)), (slice(None), 9)):  # some rows saw none of these keys, one nothing at all
        m[nth, rows], sums[nth, rows], outputs[nth, rows] = -torch.inf, 0, 0
    states = torch.stack([torch.cat((m[i], sums[i], stored(outputs[i]))) for i in range(parts)])
    top = m.amax(0).double()
    weight = torch.exp2(m - torch.where(top == -torch.inf, 0, top))
    total = (weight * sums).sum(0)
    united = (weight[..., None] * outputs).sum(0) / torch.where(total == 0, 1, total)[:, None]
    return states, united, math.log(2) * (top + total.log2())


def call(
    query_lens: list[int], heads: tuple[int, int], dim: int, scale: float, dtype: torch.dtype, device: torch.device
) -> AttentionInputs:
    """What the launch reads of a call; rows before the first sequence's and behind the last one's are nobody's."""
    tokens, (query_heads, kv_heads) = sum(query_lens) + 8, heads
    given = dict.fromkeys(AttentionInputs._fields)
    given |= {
        "query": torch.empty(tokens, query_heads, dim, dtype=torch.float16, device=device),
        "key": torch.empty(1, 16, kv_heads, dim, device=device),
        "value": torch.empty(1, 16, kv_heads, dim, device=device),
        "max_query_len": max(query_lens),
        "v_scale": torch.linspace(0.5, 2, kv_heads, device=device) if scale != 1 else None,
        "out": torch.full((tokens, query_heads, dim), 7.0, dtype=dtype, device=device),
        "lse": torch.full((tokens, query_heads), 7.0, device=device),
        "out_scale": scale,
    }
    return AttentionInputs(**given)  # type: ignore[arg-type]


def filled(
    params: TileSchedulerParams, query_lens: list[int], seq_lens: list[int], device: torch.device
) -> torch.Tensor:
    """A schedule; queries start at row 3."""
    bounds = BatchBounds(sum(query_lens), len(query_lens), 0, max(query_lens), max(seq_lens))
    schedule = torch.empty(sm90.schedule_shape(params, bounds), dtype=torch.int32, device=device)
    starts = (torch.tensor([0, *query_lens]).cumsum(0) + 3).to(torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    fill_tile_schedule(params, schedule, starts.to(device), lens)
    return schedule


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "heads", "dim", "scale", "dtype"),
    [
        ([20, 1, 70], [4000, 1000, 3000], (8, 2), 128, 1.0, torch.float16),
        ([5, 9], [9000, 0], (7, 1), 64, 2.5, torch.float16),  # a head of nobody in each tile
        ([5, 40], [3000, 9000], (10, 2), 128, 1.0, torch.float16),  # eight tokens of a head at a time
        ([40], [2000], (4, 4), 80, 1.0, torch.float32),  # 64 and 16 columns
        ([17], [2000], (2, 1), 256, 1.0, torch.float16),
    ],
)
def test_sum_of_states(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    dim: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    group = heads[0] // heads[1]
    longest = max(query_lens)
    params = TileSchedulerParams(heads[1], group, dim, (1, 0), 1 << 20, 132, max_query_len=longest, whole_groups=True)
    schedule, pack = filled(params, query_lens, seq_lens, device), params.pack
    entries = [entry for entry in schedule[2 : 2 + schedule[1, 0]].tolist() if entry[8] > 1 and entry[7] == 0]
    assert entries, "no block is split"
    inputs, workspace = call(query_lens, heads, dim, scale, dtype, device), new_workspace(params.workspace, device)
    states = workspace[3 * COUNTERS :].view(-1, sm90.partial_size(dim))
    states.fill_(0x7FC00000)  # NaN, where no state is
    out, lse = inputs.out.double().cpu(), torch.full((len(inputs.out), heads[0]), 7.0, dtype=torch.float64)
    draw, own = torch.Generator().manual_seed(dim), min(pack, group)
    for token, tokens, *_, parts, origin in (entry[:10] for entry in entries):
        for head in range(params.heads):
            factor = 1 if inputs.v_scale is None else scale * inputs.v_scale[head // -(-group // pack)].item()
            for half in range(2):
                rows = [
                    row
                    for row in range(64 * half, 64 * half + 64)
                    if token_of(row, pack) < tokens and head_of(row, pack) < own
                ]
                if not rows:
                    continue
                left, united, of_rows = drawn(parts, sum(head_parts(dim)), draw)
                first = 2 * (origin * params.heads + head * parts) + half
                states[first : first + 2 * parts : 2] = left.view(torch.int32).to(device)
                for row in rows:
                    at = token + token_of(row, pack), head * own + head_of(row, pack)
                    out[at], lse[at] = united[row % 64, :dim] * factor, of_rows[row % 64]
    reduce_splits.launch(inputs, schedule, pack, workspace)
    rtol = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(inputs.out.cpu().double(), out, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(inputs.lse.cpu().double(), lse, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
