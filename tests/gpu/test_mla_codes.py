"""Latent attention on a GPU over rows of fp8: any number of tiles, large logits, groups of zeros, states that programs
add up themselves, and the same bits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from test_mla_tiles import LENGTHS, SCALE, S

from pagedattn import ops
from pagedattn.formats.mla_rows import deepseek
from pagedattn.formats.mla_rows.format import decode
from pagedattn.kernels.mla_decode.plan import MLADecodePlan
from pagedattn.runtime.workspace import COUNTERS
from pagedattn.testing import attention_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STORED = {"fp8_e4m3": (torch.float8_e4m3fn, 576), "fp8_ds_mla": (torch.uint8, 656)}


class Step:
    """Decodes over random rows, in blocks in random order; bytes of slots that no sequence has are 0xFF, NaN."""

    def __init__(self, stored: str, lengths: tuple[int, ...], heads: int, tokens: int = 1, **options: Any) -> None:
        spread, of_query = options.get("spread", 1.0), options.get("dtype", torch.bfloat16)
        dtype, width = STORED[stored]
        counts = [-(-max(length, 1) // S) for length in lengths]
        self.lengths, self.tokens = lengths, tokens
        self.cache = torch.full((sum(counts) + 1, S, 1, width), 0xFF, dtype=torch.uint8)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        ids = iter((torch.randperm(sum(counts)) + 1).tolist())
        for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for at in range(count):
                self.table[seq, at] = block = next(ids)
                here = min(max(length - at * S, 0), S)
                rows = (torch.randn(here, 576) * spread).bfloat16()
                codes = deepseek.encode(rows) if dtype == torch.uint8 else rows.to(dtype)
                self.cache[block, :here, 0] = codes.view(torch.uint8)
        self.cache, self.table = self.cache.cuda().view(dtype), self.table.cuda()
        self.query = torch.randn(len(lengths) * tokens, heads, 576, device="cuda").to(of_query)
        self.starts = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32) * tokens
        self.seq_lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)

    def run(self, plan: MLADecodePlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(self.query.shape[:2], device="cuda")
        bounds = {"latent_dim": 512, "max_query_len": self.tokens, "max_seq_len": max(self.lengths), "scale": SCALE}
        call = (self.query, self.cache, self.table, self.starts, self.seq_lens)
        return ops.mla_decode(*call, **bounds, lse=lse, path="triton", plan=plan), lse

    def check(self, of_output: float) -> None:
        """Keys that are multiplied as codes, by more than 16 rows of bfloat16, make logits that are off: each of 36
        instructions, of which `fp8_ds_mla` has 8 for each group, may take off a unit of the 13th bit of the sum. A
        third of that is allowed, as each takes off half of it on average, and not all find a sum as large."""
        out, lse = self.run()
        codes = self.query.shape[1] * self.tokens > 16 and self.query.dtype == torch.bfloat16
        off = codes * 2**-13 * (12 if self.cache.dtype == torch.float8_e4m3fn else 8)
        for seq, length in enumerate(self.lengths):
            here = slice(seq * self.tokens, (seq + 1) * self.tokens)
            if not length:
                assert not out[here].any() and bool((lse[here] == -torch.inf).all())
                continue
            seen = decode(self.cache[self.table[seq].long()], None, torch.float64).flatten(0, 1)[:length]
            want, want_lse = attention_oracle(self.query[here], seen, seen[..., :512], scale=SCALE)
            assert float((out[here].double() - want).norm() / want.norm()) < of_output
            largest = float((self.query[here].flatten(0, 1).double() @ seen[:, 0].T).abs().max()) * SCALE
            torch.testing.assert_close(lse[here].double(), want_lse.double(), rtol=0, atol=1e-3 + off * largest)


@pytest.mark.parametrize(
    ("heads", "tokens", "dtype"),
    [
        (16, 1, torch.bfloat16),
        (64, 1, torch.bfloat16),
        (64, 1, torch.float16),
        (16, 3, torch.bfloat16),
        (12, 2, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", LENGTHS)
def test_any_number_of_tiles(name: str, stored: str, heads: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = tuple(length + tokens - 1 if length else 0 for length in LENGTHS[name])
    if tokens > 1:
        lengths = tuple(length for length in lengths if length)
    Step(stored, lengths, heads, tokens, dtype=dtype).check(3e-3 if heads * tokens <= 16 else 5e-3)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("stored", STORED)
def test_logits_may_be_large(stored: str, heads: int) -> None:
    """Of a deviation of 20: a key has most of the weight, and rows' states are raised often."""
    torch.manual_seed(0)
    step = Step(stored, (300, 2000, 64), heads)
    step.query *= 12
    step.check(3e-2)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_group_of_zeros_beside_large_ones(heads: int) -> None:
    """Its scale is next to nothing, and what was added up before is not lost."""
    torch.manual_seed(0)
    spread = torch.full((576,), 1024.0)
    spread[256:384] = 0.0
    step = Step("fp8_ds_mla", (300, 70), heads, spread=spread)
    step.query *= 2.0**-12
    step.check(8e-3)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("stored", STORED)
def test_the_same_call_has_the_same_bits(stored: str, heads: int) -> None:
    torch.manual_seed(0)
    step = Step(stored, (200, 3000, 70, 5000, 64, 1), heads)
    out, lse = step.run()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        again, lse_again = step.run()
        different += (again != out).sum() + (lse_again != lse).sum()
    assert int(different) == 0


@pytest.mark.parametrize("long", [(), (20_000,), (9_000, 0, 1, 9_000, 5_000)])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("stored", STORED)
def test_programs_add_up_the_states_of_items_that_they_share(
    monkeypatch: pytest.MonkeyPatch, stored: str, heads: int, long: tuple[int, ...]
) -> None:
    """In one launch: of two programs an item, and of any number where few sequences have most of the keys."""
    torch.manual_seed(0)
    module, plans = sys.modules["pagedattn.ops.mla_decode"], []
    made = module.plan_mla_decode
    monkeypatch.setattr(module, "plan_mla_decode", lambda *of: plans.append(made(*of)) or plans[-1])
    step = Step(stored, (*long, *range(1, 1400, 20)), heads)
    step.check(5e-3)
    plan, first = plans[0], step.run(plans[0])
    assert plan.config.merge is None and plan.module == "hopper_fp8"
    states = plan.workspace[plan.config.states_at :].view(-1, 2, plan.config.state)
    states.fill_(-7)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(step.run(plan), first, strict=True))
    left = (states[:, 0] != -7).any(1)  # programs that left a state for another one
    assert int(left.sum()) >= (plan.config.programs // 4 if long else plan.config.parts)
    assert len(plans) == 1 and not plan.workspace[: 3 * COUNTERS].any()
