"""Run in a copy of the library that has grown by the toy format and the toy mask: prints JSON of what passed.

Kernels are interpreted, so that it takes no GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from pagedattn import Attention, BlockPool, CommonAttentionMetadata, Mask, PagedKVCache, ops
from pagedattn.kernels.decode import cascade
from pagedattn.testing.case import Case
from pagedattn.testing.conformance import conformance

GROWN: dict[str, dict[str, Any]] = {
    "format": {"kv_cache_dtype": "toy"},
    "mask": {"mask": Mask(**{"causal": True, "chunk": 12})},
    "both": {"kv_cache_dtype": "toy", "mask": Mask(**{"causal": True, "chunk": 24})},
}
CASES = [
    Case(note="ragged"),
    Case(query_lens=(1, 1, 1), seq_lens=(5, 90, 33), note="decodes"),
    Case(query_lens=(1, 1, 0, 7), seq_lens=(16, 47, 0, 39), heads=(8, 2), head_dim=48, head_dim_v=24, note="odd dims"),
    Case(query_lens=(3, 20), seq_lens=(40, 64), layout="HND", softcap=9.0, sinks=0.5, note="HND and features"),
    Case(query_lens=(1, 5, 9), seq_lens=(20, 40, 60), share_blocks=True, block_size=8, note="shared blocks"),
    Case(query_lens=(1,) * 3, seq_lens=(40, 50, 60), shared_prefix=32, write=False, note="shared prefix"),
    Case(query_lens=(2, 1), seq_lens=(700, 300), dtype=torch.float16, note="many keys"),
    Case(query_lens=(3, 1), seq_lens=(9, 40), fused_qkv=True, padding_rows=2, block_size=1, note="blocks of one"),
]
HEADS, DIM, SIZE, LENGTH = 2, 32, 4, 14


def served(every: bool) -> dict[str, Any]:
    """Of each backend and thing grown, or of both things at once: cases passed, and what failed or was refused."""
    found = {}
    for backend in ("TORCH", "TRITON"):
        for name, grown in GROWN.items() if every else [("both", GROWN["both"])]:
            report = conformance(backend, device="cpu", cases=[case.but(**grown) for case in CASES])
            found[f"{backend}, {name}"] = [len(report.passed), {**report.failed, **report.refused}]
    return found


def stores(backend: str) -> dict[str, bool]:
    """Whether attention over blocks that were copied, swapped, shared or forked is what it was over the first ones."""
    torch.manual_seed(0)
    layer = Attention(4, DIM, HEADS, kv_cache_dtype="toy", block_size=SIZE, backend=backend)
    cache = PagedKVCache(1, 24, SIZE, HEADS, DIM, kv_cache_dtype="toy")
    pool = BlockPool(24)
    key, value, query = torch.randn(LENGTH, HEADS, DIM), torch.randn(LENGTH, HEADS, DIM), torch.randn(1, 4, DIM)
    blocks = pool.allocate(4)

    def attend(table: list[int], rows: tuple[Any, Any] = (None, None), length: int = LENGTH) -> torch.Tensor:
        new = 1 if rows[0] is None else len(rows[0])
        common = CommonAttentionMetadata.from_lengths([new], [length], torch.tensor([table]).int(), block_size=SIZE)
        q = query.expand(new, -1, -1).contiguous()
        return layer(q, *rows, cache.layer(0), layer.build(common))[-1]

    attend(blocks, (key, value))
    before = attend(blocks)
    cache.seal_blocks(blocks[:3])
    want, found = attend(blocks), {}
    found["sealing changes what is read"] = not torch.equal(before, want) and torch.allclose(before, want, atol=0.3)
    copied = pool.allocate(4)
    cache.copy_blocks(list(zip(blocks, copied, strict=True)))
    found["copied"] = torch.equal(attend(copied), want)
    host = torch.zeros(1, 4, cache.bytes_per_block, dtype=torch.uint8)
    away, back = pool.allocate(4), torch.arange(4)
    ops.swap_blocks(cache.slabs[0], host[0], torch.stack((torch.tensor(blocks), back), 1))
    ops.swap_blocks(host[0], cache.slabs[0], torch.stack((back, torch.tensor(away)), 1))
    found["swapped"] = torch.equal(attend(away), want)
    node, contents = None, [bytes([at]) for at in range(3)]
    for block, content in zip(blocks, contents, strict=False):
        node = pool.commit(block, node, content)
    node, hits = None, []
    for content in contents:
        node = pool.find(node, content)
        assert node is not None
        hits.append(pool.block_of(node))
    pool.touch(hits)
    hit = [*hits, *pool.allocate(1)]
    attend(hit, (key[12:], value[12:]))
    found["prefix hit"] = hits == blocks[:3] and torch.equal(attend(hit), want)
    fork, pairs = pool.fork(blocks, has_open_block=True)
    cache.copy_blocks(pairs)
    attend(fork, (key[:1], value[:1]), LENGTH + 1)
    found["fork leaves the first as it was"] = torch.equal(attend(blocks), want)
    found["fork reads what it wrote"] = not torch.equal(attend(fork, length=LENGTH + 1), want)
    return found


if __name__ == "__main__":
    import interpreter

    import pagedattn

    interpreter.make_fast()
    cascade.SAVED_BYTES = -(1 << 62)  # a shared prefix is attended once, however little that saves
    result = {"library": pagedattn.__file__, "served": served("--grid" in sys.argv)}
    result |= {backend: stores(backend) for backend in ("TORCH", "TRITON")}
    json.dump(result, sys.stdout)
