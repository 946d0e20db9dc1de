"""pagedattn.Attention in plain PyTorch, without an engine: a prompt, then token after token, over a paged cache."""

from __future__ import annotations

import torch
from torch import nn

import pagedattn

HEADS, KV_HEADS, DIM, WIDTH = 8, 2, 64, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.attention = pagedattn.Attention(HEADS, DIM, KV_HEADS, device=DEVICE)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x, cache, metadata):  # type: ignore[no-untyped-def]
        q, k, v = self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        return self.out(self.attention(q, k, v, cache, metadata))


@torch.no_grad()
def main(prompt: int = 20, more: int = 15) -> float:
    """The largest difference between attending step by step over the cache and attending to everything at once."""
    model = SelfAttention().to(DEVICE)
    size = model.attention.selection.block_size
    cache = pagedattn.PagedKVCache(1, num_blocks=8, block_size=size, num_kv_heads=KV_HEADS, head_dim=DIM, device=DEVICE)
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32, device=DEVICE)  # where this sequence's blocks are
    x, from_lengths = torch.randn(prompt + more, WIDTH, device=DEVICE), pagedattn.CommonAttentionMetadata.from_lengths
    parts = [model(x[:prompt], cache.layer(0), from_lengths([prompt], [prompt], table, block_size=size))]
    for at in range(prompt, len(x)):  # one new token, at + 1 in all
        parts.append(model(x[at : at + 1], cache.layer(0), from_lengths([1], [at + 1], table, block_size=size)))
    at_once = model(x, None, from_lengths([len(x)], [len(x)], device=DEVICE))
    return float((torch.cat(parts) - at_once).abs().max())


if __name__ == "__main__":
    print(f"over the cache, step by step, against all at once: differs by {main():.1e}")
