"""KVCacheManager with the bare layer and no LLM: of prompts that begin alike, each computes what is not cached."""

from __future__ import annotations

from array import array

import torch

import pagedattn
from pagedattn.engine import KVCacheManager, KVGroup, Request, SamplingParams

HEADS, KV_HEADS, DIM, BLOCK_SIZE, VOCAB, BLOCKS = 4, 2, 32, 16, 100, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Server:
    """One attention layer, its cache, and who has which block."""

    def __init__(self) -> None:
        self.attention = pagedattn.Attention(HEADS, DIM, KV_HEADS, block_size=BLOCK_SIZE, device=DEVICE)
        self.cache = pagedattn.PagedKVCache(1, BLOCKS, BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=DIM, device=DEVICE)
        self.manager = KVCacheManager(pagedattn.BlockPool(BLOCKS), [KVGroup(BLOCK_SIZE)])
        self.table = pagedattn.BlockTable(max_rows=1, max_blocks=BLOCKS, block_size=BLOCK_SIZE, device=DEVICE)
        heads = HEADS + 2 * KV_HEADS
        self.qkv = torch.randn(VOCAB, heads, DIM, device=DEVICE)  # of each token, whatever its position

    def compute(self, request: Request) -> torch.Tensor:
        """Attend to all of a request's tokens that the cache does not have yet: [new tokens, HEADS, DIM]."""
        hit = self.manager.lookup(request)
        total = len(request.token_ids)
        if not self.manager.start(request, hit, total - hit.num_tokens):
            raise SystemExit("too few blocks: free a request first, or make BLOCKS larger")
        self.table.add_row(0, request.block_ids[0])
        new = torch.tensor(request.token_ids[hit.num_tokens :], device=DEVICE)
        lengths = [len(new)], [total]
        step = pagedattn.CommonAttentionMetadata.from_lengths(*lengths, self.table.commit(), block_size=BLOCK_SIZE)
        query, key, value = self.qkv[new].split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = self.attention(query, key, value, self.cache.layer(0), step)
        request.num_computed_tokens = total
        self.manager.commit(request)  # from here on others find its full blocks
        return out

    def all_at_once(self, tokens: list[int]) -> torch.Tensor:
        """The same without a cache, of every token."""
        query, key, value = self.qkv[tokens].split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        step = pagedattn.CommonAttentionMetadata.from_lengths([len(tokens)], [len(tokens)], device=DEVICE)
        return self.attention(query, key, value, None, step)


@torch.no_grad()
def main() -> list[tuple[int, float]]:
    """Of each prompt, the tokens found in the cache, and the largest difference from computing it all at once."""
    server, found = Server(), []
    beginning = [*range(40)]
    for arrival, end in enumerate(([50, 51, 52], [60, 61], [50, 51, 52, 53])):
        tokens = beginning + end
        prompt = array("i", tokens)
        request = Request(f"prompt {arrival}", prompt, SamplingParams(), arrival=arrival, max_total_tokens=len(prompt))
        out = server.compute(request)
        wanted = server.all_at_once(tokens)[request.num_cached_tokens :]
        found.append((request.num_cached_tokens, float((out - wanted).abs().max())))
        server.manager.free(request)  # its blocks stay findable until they are handed out again
    return found


if __name__ == "__main__":
    for cached, difference in main():
        print(f"{cached} tokens found in the cache, the others attended to: differs by {difference:.1e}")
