"""The contents of KV blocks, identified exactly.

The KV of a block depends on every token before it, so contents form a tree: a node is (parent node, token bytes of one
block, extra), and blocks hang on nodes. A hash only chooses the bucket to look in; equality of tokens, extra and parent
identity decides, so colliding hashes cost time and never give a wrong hit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import xxhash

Extra = tuple[Hashable, ...]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One exact content: the tokens of one full block after all the tokens of its ancestors.

    It lives while a block hangs on it, a copy is retained elsewhere, or a child of it lives. Only the pool writes its
    fields.
    """

    uid: int
    parent: PrefixNode | None = field(repr=False)
    tokens: bytes
    extra: Extra
    alive: bool = False
    digest: int = 0
    num_children: int = 0
    num_copies: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)  # KV cache group -> blocks that hold the content


class PrefixTree:
    """The living contents. There is never more than one living node of a content."""

    def __init__(self, digest: Callable[[bytes], int] | None = None) -> None:
        """No contents yet; `digest` as of `BlockPool`."""
        self._digest = digest or partial(xxhash.xxh3_64_intdigest, seed=int.from_bytes(os.urandom(8), "little"))
        self._buckets: dict[int, list[PrefixNode]] = {}
        self._last_uid = 0

    def find(self, parent: PrefixNode | None, tokens: bytes, extra: Extra = ()) -> PrefixNode | None:
        """The living node of this content, or None. A dead `parent` has no living children.

        Args:
            parent: the node of the block before; None for the first block of a sequence.
            tokens: the block's token ids as int32 little-endian bytes.
            extra: what else the KV depends on (salt, adapter), as tagged tuples such as `(("salt", s),)`; compared by
                `==`. In the key of a first block it separates everything below.
        """
        for node in self._buckets.get(self._digest_of(parent, tokens, extra), ()):
            if node.parent is parent and node.tokens == tokens and node.extra == extra:
                return node
        return None

    def resolve(self, node: PrefixNode | None) -> tuple[PrefixNode | None, list[PrefixNode]]:
        """The deepest living equal of `node` or of its ancestors, and the dead ones below it, uppermost last."""
        dead: list[PrefixNode] = []
        while node is not None and not node.alive:
            dead.append(node)
            node = node.parent
        while dead and (equal := self.find(node, dead[-1].tokens, dead[-1].extra)) is not None:
            node = equal
            dead.pop()
        return node, dead

    def new(self, parent: PrefixNode | None, tokens: bytes, extra: Extra) -> PrefixNode:
        """A node that is not alive yet."""
        self._last_uid += 1
        return PrefixNode(self._last_uid, parent, tokens, extra)

    def enter(self, node: PrefixNode, parent: PrefixNode | None) -> PrefixNode:
        """Make a new or dead node alive under a living parent."""
        node.parent, node.alive = parent, True
        node.digest = self._digest_of(parent, node.tokens, node.extra)
        self._buckets.setdefault(node.digest, []).append(node)
        if parent is not None:
            parent.num_children += 1
        return node

    def prune(self, node: PrefixNode | None) -> None:
        """Take the node out if nothing keeps it alive, then its parent if that was the last child, and so on."""
        while node is not None and not (node.blocks or node.num_children or node.num_copies):
            bucket = self._buckets[node.digest]
            bucket.remove(node)
            if not bucket:
                del self._buckets[node.digest]
            node.alive = False
            node = node.parent
            if node is not None:
                node.num_children -= 1

    def _digest_of(self, parent: PrefixNode | None, tokens: bytes, extra: Extra) -> int:
        data = tokens + (parent.uid if parent is not None else 0).to_bytes(8, "little")
        return self._digest(data + hash(extra).to_bytes(8, "little", signed=True) if extra else data)
