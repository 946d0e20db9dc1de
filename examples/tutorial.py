"""Paging, prefix sharing, copy on write and backend selection, drawn as text: `python examples/tutorial.py`.

`--plot FILE` draws the pool after each step into a picture too (needs matplotlib).
"""

from __future__ import annotations

import argparse
from array import array
from pathlib import Path

import torch

import pagedattn
from pagedattn import BlockPool, CommonAttentionMetadata, PagedKVCache

SIZE, BLOCKS, HEADS, KV_HEADS, DIM = 4, 12, 4, 2, 16


class Sequence:
    """Tokens, and the blocks that hold their keys and values."""

    def __init__(self, name: str, tokens: str) -> None:
        self.name, self.tokens = name, tokens
        self.blocks: list[int] = []
        self.cached = 0  # tokens whose keys and values were there already


class Pool:
    """A BlockPool with sequences in it, and pictures of both."""

    def __init__(self) -> None:
        self.blocks = BlockPool(BLOCKS)
        self.sequences: list[Sequence] = []
        self.frames: list[tuple[str, list[str]]] = []

    def add(self, sequence: Sequence) -> None:
        """Take over every full block that is known with the same content, and allocate the rest."""
        node = None
        for start in range(0, (len(sequence.tokens) - 1) // SIZE * SIZE, SIZE):  # one token at least is computed
            node = self.blocks.find(node, _key(sequence.tokens[start : start + SIZE]))
            block = None if node is None else self.blocks.block_of(node)
            if block is None:
                break
            self.blocks.touch([block])
            sequence.blocks.append(block)
        sequence.cached = len(sequence.blocks) * SIZE
        sequence.blocks += self.blocks.allocate(-(-len(sequence.tokens) // SIZE) - len(sequence.blocks))
        self.sequences.append(sequence)

    def commit(self, sequence: Sequence) -> None:
        """Once they are computed, full blocks can be found by others."""
        node = None
        for index in range(len(sequence.tokens) // SIZE):
            text = sequence.tokens[index * SIZE : (index + 1) * SIZE]
            node = self.blocks.commit(sequence.blocks[index], node, _key(text))

    def draw(self, title: str) -> None:
        """Every block, its tokens and its holders; and every sequence's table."""
        held: dict[int, str] = {block: " " * SIZE for block in range(BLOCKS)}
        owners: dict[int, str] = {block: "" for block in range(BLOCKS)}
        for one in self.sequences:
            for index, block in enumerate(one.blocks):
                held[block] = one.tokens[index * SIZE : (index + 1) * SIZE].ljust(SIZE, ".")
                owners[block] += one.name
        owners[0] = "null"
        print(f"\n{title}\n")
        print(("  block   " + " ".join(f"{block:^{SIZE + 2}}" for block in range(BLOCKS))).rstrip())
        print("  tokens  " + " ".join(f"|{held[block]}|" for block in range(BLOCKS)))
        print(("  held by " + " ".join(f"{owners[block] or '-':^{SIZE + 2}}" for block in range(BLOCKS))).rstrip())
        for one in self.sequences:
            print(f"  table of {one.name}: {one.blocks}, {len(one.tokens)} tokens: {one.tokens!r}")
        self.frames.append((title, [owners[block] for block in range(BLOCKS)]))


def _key(text: str) -> bytes:
    return array("i", map(ord, text)).tobytes()


def paging(pool: Pool) -> None:
    a, b = Sequence("A", "The cat sat."), Sequence("B", "A dog")
    pool.add(a)
    pool.add(b)
    pool.draw("1. Two prompts. Blocks hold 4 tokens, lie anywhere, and only the last one of a sequence has room.")
    b.tokens += " ran"
    b.blocks += pool.blocks.allocate(1)
    table = torch.tensor([b.blocks], dtype=torch.int32)
    step = CommonAttentionMetadata.from_lengths([4], [len(b.tokens)], table, block_size=SIZE)
    pool.draw("2. B grows by 4 tokens: 3 fill its open block, 1 opens another. Nothing is moved, nothing was reserved.")
    print(f"  slots of the 4 new tokens (block * {SIZE} + offset): {step.slot_mapping.tolist()}")
    pool.commit(a)


def sharing(pool: Pool) -> tuple[Sequence, Sequence]:
    a, c = pool.sequences[0], Sequence("C", "The cat ate.")
    pool.add(c)
    pool.draw("3. C begins as A does. Its first 8 tokens are found by content and taken over: 4 are left to compute.")
    return a, c


def attend(a: Sequence, c: Sequence) -> float:
    """Attention of C over A's blocks and its own, against attention of C alone; the largest difference."""
    torch.manual_seed(0)
    keys, values = (torch.randn(128, KV_HEADS, DIM) for _ in range(2))  # what a model makes of each character
    query = torch.randn(len(c.tokens), HEADS, DIM)
    layer = pagedattn.Attention(HEADS, DIM, KV_HEADS, block_size=SIZE)
    cache = PagedKVCache(1, BLOCKS, SIZE, KV_HEADS, DIM).layer(0)
    for one, first in ((a, 0), (c, c.cached)):  # A computes all of its tokens, C only what A has not
        ids = torch.tensor(list(map(ord, one.tokens)))[first:]
        table = torch.tensor([one.blocks], dtype=torch.int32)
        step = CommonAttentionMetadata.from_lengths([len(ids)], [len(one.tokens)], table, block_size=SIZE)
        out = layer(query[first : first + len(ids)], keys[ids], values[ids], cache, step)
    ids = torch.tensor(list(map(ord, c.tokens)))
    alone = layer(query, keys[ids], values[ids], None, CommonAttentionMetadata.from_lengths([len(ids)], [len(ids)]))
    worst = float((out - alone[c.cached :]).abs().max())
    print(f"  computing 4 of C's 12 tokens gives what computing all 12 gives: differs by {worst:.0e}")
    return worst


def copy_on_write(pool: Pool) -> None:
    b, d = pool.sequences[1], Sequence("D", "")
    d.tokens = b.tokens
    d.blocks, copies = pool.blocks.fork(b.blocks, has_open_block=len(b.tokens) % SIZE > 0)
    pool.sequences.append(d)
    pool.draw(
        "4. D is another answer to B's prompt: full blocks are shared, the open one is copied before either writes."
    )
    print(f"  (source, destination) for cache.copy_blocks: {copies}")
    for one in (pool.sequences[0], b):
        pool.blocks.free(one.blocks)
        pool.sequences.remove(one)
    pool.draw(
        "5. A and B end. What C and D hold stays; A's last block is free, but found by content until it is needed."
    )
    print(f"  free: {pool.blocks.num_free} blocks, {pool.blocks.num_cached} of them with content")


def selection() -> None:
    print("\n6. Who computes it? Every backend says what it serves, and selection says why the others do not.\n")
    for text, options in {
        "a usual layer": {},
        "with a window and sinks": {"mask": pagedattn.Mask(sliding_window=128), "has_sinks": True},
    }.items():
        spec = pagedattn.AttentionSpec(num_heads=8, head_dim=64, num_kv_heads=2, **options)
        lines = pagedattn.select_backend(spec).describe().splitlines()
        print(f"  {text}: " + "\n    ".join(line if len(line) < 110 else f"{line[:107]}..." for line in lines))


def plot(frames: list[tuple[str, list[str]]], file: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, axes = plt.subplots(len(frames), 1, figsize=(8, len(frames)), layout="constrained")
    for axis, (title, owners) in zip(axes, frames, strict=True):
        for block, owner in enumerate(owners):
            face = {"": "white", "null": "lightgrey"}.get(owner, "orange" if len(owner) > 1 else "lightblue")
            axis.add_patch(Rectangle((block, 0), 1, 1, facecolor=face, edgecolor="black"))
            axis.text(block + 0.5, 0.5, owner, ha="center", va="center")
        axis.set(xlim=(0, len(owners)), ylim=(0, 1), xticks=[], yticks=[])
        axis.set_title(title, fontsize=6, loc="left")
    figure.savefig(file)
    print(f"\n{file}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Paging, prefix sharing, copy on write and backend selection.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the pool into FILE, with matplotlib")
    args = parser.parse_args(argv)
    pool = Pool()
    paging(pool)
    attend(*sharing(pool))
    copy_on_write(pool)
    selection()
    if args.plot is not None:
        plot(pool.frames, args.plot)


if __name__ == "__main__":
    main()
