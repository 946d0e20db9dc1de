"""torch.compile over a model with the layer: one graph, which new lengths and block tables do not compile again."""

from __future__ import annotations

import torch
from attention_layer import DEVICE, DIM, KV_HEADS, WIDTH, SelfAttention

import pagedattn

STEPS = ([20, 9], [20, 9]), ([1, 1], [21, 10]), ([1, 1], [22, 11]), ([5, 1], [27, 12])  # new tokens, and all tokens


@torch.no_grad()
def main(backend: str = "inductor") -> float:
    """The largest difference between the compiled model and the same model run as it is."""
    torch.manual_seed(0)
    model = SelfAttention().to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    size = model.attention.selection.block_size
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32, device=DEVICE)
    one, two = (pagedattn.PagedKVCache(1, 5, size, KV_HEADS, DIM, device=DEVICE).layer(0) for _ in range(2))
    worst = 0.0
    for new, lens in STEPS:
        common = pagedattn.CommonAttentionMetadata.from_lengths(new, lens, table, block_size=size)
        # Planned outside of what is compiled: planning is the step's host work, and the same for all layers.
        step = pagedattn.plan_step([model.attention], common)
        x = torch.randn(sum(new), WIDTH, device=DEVICE)
        worst = max(worst, float((compiled(x, one, step) - model(x, two, step)).abs().max()))
    return worst


if __name__ == "__main__":
    print(f"compiled and eager differ by at most {main():.1e}")
