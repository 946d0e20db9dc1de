"""Forks, swaps and prefixes at every position of a block, and prompts of thousands of tokens, over two caches."""

from __future__ import annotations

import pytest
import torch
from recent_sequences import KEY, QUERY, SIZE, VALUE, Sequence1, Sequences, by_definition, normal

from pagedattn import Attention, CommonAttentionMetadata, Mask, PagedKVCache
from pagedattn.formats.registry import format_of
from pagedattn.testing.oracle import attention_oracle

STORED = ("int4", "turboquant4:window=20")
LENGTHS = range(65, 65 + SIZE)  # the last block has each number of tokens, a full one's too
LATER = (1, 40)  # tokens of the next step, and of one that fills blocks


def goes_on(sequence: Sequence1, stored: str) -> None:
    """What comes next is as if nothing had happened."""
    start = sequence.length
    out = torch.cat([sequence.append(count) for count in LATER])
    torch.testing.assert_close(out.double(), by_definition(stored)[start : sequence.length], rtol=0, atol=5e-6)


@pytest.mark.parametrize("stored", STORED)
def test_forks(stored: str) -> None:
    """Either goes on with tokens of its own, in steps that take turns."""
    assert {length % SIZE for length in LENGTHS} == {*range(SIZE)}
    for length in LENGTHS:
        first = Sequences("TORCH", stored).new()
        first.append(length)
        second = first.fork()
        shared = length // SIZE
        assert first.blocks[:shared] == second.blocks[:shared]
        assert not {*first.blocks[shared:]} & {*second.blocks[shared:]}
        others = tuple(torch.cat((x[:length], normal(41, *x.shape[1:], seed=5))) for x in (QUERY, KEY, VALUE))
        changed = second.append(41, others)  # type: ignore[arg-type]
        goes_on(first, stored)
        assert not torch.allclose(changed.double(), by_definition(stored)[length : length + 41], atol=1e-2)
        third = Sequences("TORCH", stored).new()
        third.append(length)
        third = third.fork()
        goes_on(third, stored)


@pytest.mark.parametrize("stored", STORED)
def test_swaps(stored: str) -> None:
    """What is read of either cache goes to host memory and comes back to other blocks."""
    for length in LENGTHS:
        sequence = Sequences("TORCH", stored).new()
        sequence.append(length)
        owner, first = sequence.owner, sequence.first_read()
        for cache, pool, blocks, begin in (
            (owner.cache, owner.pool, sequence.blocks, 0),
            (owner.recent, owner.recent_pool, sequence.recent, first),
        ):
            held = blocks[begin:]
            host = cache.over(torch.zeros(1, 4, cache.bytes_per_block, dtype=torch.uint8))
            cache.swap_blocks(host, list(zip(held, range(len(held)), strict=True)))
            cache.slabs.fill_(0xFF)
            blocks[:] = [-7] * begin + pool.allocate(len(held))
            assert not {*held} & {*blocks[begin:]}
            host.swap_blocks(cache, list(zip(range(len(held)), blocks[begin:], strict=True)))
        goes_on(sequence, stored)


@pytest.mark.parametrize("stored", STORED)
def test_prefixes(stored: str) -> None:
    """Whole blocks are found, and of a window those before the first new token's in the second cache too."""
    owner, node = Sequences("TORCH", stored, num_blocks=60), None
    first = owner.new()
    first.append(96)
    for at, block in enumerate(first.blocks):
        node = owner.pool.commit(block, node, bytes([at]))
    for length in range(SIZE + 1, 2 * SIZE + 1 + SIZE):
        node, found, other = None, (length - 1) // SIZE, owner.new()
        for at in range(found):
            node = owner.pool.find(node, bytes([at]))
            block = None if node is None else owner.pool.block_of(node)
            assert block is not None
            other.blocks.append(block)
        other.length = found * SIZE
        start = other.first_read()
        other.recent = [-7] * start + first.recent[start:found]
        owner.pool.touch(other.blocks)
        owner.recent_pool.touch(other.recent[start:])
        out = other.append(length - other.length)
        torch.testing.assert_close(out.double(), by_definition(stored)[found * SIZE : length], rtol=0, atol=5e-6)
        goes_on(other, stored)
        owner.pool.free(other.blocks)
        other._release(len(other.recent))
    goes_on(first, stored)


@pytest.mark.parametrize("stored", STORED)
def test_a_chunk_of_4096_tokens(stored: str) -> None:
    """It gives what one call gives, and chunks of 1,000, and a tail of decodes."""
    dim, length = 16, 4133
    query, key, value = (normal(length, 1, dim, seed=seed) for seed in range(3))
    layer = Attention(1, dim, 1, kv_cache_dtype=stored, backend="TORCH", block_size=SIZE)
    ids = 1 + torch.randperm(130, generator=torch.Generator().manual_seed(4)).int()[None]
    found = []
    for counts in ([4096, 30, *[1] * 7], [length], [1000] * 4 + [133]):
        cache, outs, end = PagedKVCache(1, 132, SIZE, 1, dim, kv_cache_dtype=stored, recent_blocks=132), [], 0
        for count in counts:
            start, end = end, end + count
            step = CommonAttentionMetadata.from_lengths([count], [end], ids, block_size=SIZE, recent_table=ids)
            outs.append(layer(query[start:end], key[start:end], value[start:end], cache.layer(0), step))
        assert end == length
        found.append(torch.cat(outs))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=5e-6)
    form, full = format_of(stored), length // SIZE * SIZE
    encoded = [
        side.decode(side.encode(x[:full].unflatten(0, (-1, SIZE))), dim, torch.float64).flatten(0, 1)
        for side, x in ((form.key, key), (form.value, value))
    ]
    for at in (0, 31, 32, 1000, 4064, 4095, 4096, 4127, 4132):
        first = at + 1 - form.native_keys(at, SIZE)
        keys, values = (
            torch.cat((a[:first], b[first : at + 1].double())) for a, b in zip(encoded, (key, value), strict=True)
        )
        wanted, _ = attention_oracle(query[at : at + 1], keys, values, scale=dim**-0.5, mask=Mask(True))
        torch.testing.assert_close(found[0][at : at + 1].double(), wanted, rtol=0, atol=5e-6)
