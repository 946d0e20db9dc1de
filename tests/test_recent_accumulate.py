"""Full blocks that are added to open ones, as a kernel for codes does it, beside states that are merged."""

from __future__ import annotations

import pytest
import torch
from recent_sequences import BACKENDS, HEADS, Sequences, by_definition

from pagedattn.backends.op_backend import OpAttentionImpl


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adding", ["full blocks", "open blocks"])
def test_blocks_added_to_others_give_that_result(backend: str, adding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, where decodes add full blocks to the open ones, and prompts open blocks to the full ones."""
    counts, sinks = (58, *[1] * 8, 40), torch.linspace(-1, 2, HEADS)
    sequence = Sequences(backend, sinks=sinks).new()
    merged = torch.cat([sequence.append(count) for count in counts])
    added, add = [], OpAttentionImpl.accumulate
    monkeypatch.setattr(
        OpAttentionImpl,
        "accumulates",
        lambda self, metadata: (adding == "open blocks") == bool(self.spec.mask.own_block),
    )
    monkeypatch.setattr(OpAttentionImpl, "accumulate", lambda *given: added.append(given) or add(*given))
    for sink, want in ((None, by_definition()[: len(merged)]), (sinks, merged.double())):
        sequence = Sequences(backend, sinks=sink).new()
        out = torch.cat([sequence.append(count) for count in counts])
        torch.testing.assert_close(out.double(), want, rtol=0, atol=5e-6)
    assert len(added) == 20 and float((merged - by_definition()[: len(merged)]).abs().max()) > 0.01
