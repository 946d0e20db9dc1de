"""What a new cache format and a new mask change in files that are there: (file, text, what replaces it)."""

FORMAT = [
    (
        "formats/registry.py",
        "from .native.format import NATIVE\n",
        "from .native.format import NATIVE\nfrom .toy.format import TOY\n",
    ),
    (
        "formats/registry.py",
        "(NATIVE, E4M3, E5M2, INT8, K8V4, INT4, *TURBOQUANT)",
        "(NATIVE, E4M3, E5M2, INT8, K8V4, INT4, *TURBOQUANT, TOY)",
    ),
]
# A query sees the keys of its own chunk (Llama 4's chunked attention).
MASK = [
    ("spec/mask.py", '*("from_block", "to_block")', '*("from_block", "to_block", "chunk")'),
    (
        "spec/mask.py",
        "    to_block: int | None = None\n\n    def __post",
        "    to_block: int | None = None\n    chunk: int | None = None\n\n    def __post",
    ),
    (
        "spec/mask.py",
        "        return keep\n",
        "        if self.chunk is not None:\n            keep = keep & (key // self.chunk == query // self.chunk)\n"
        "        return keep\n",
    ),
    (
        "spec/mask.py",
        "        if self.own_block is None:\n            return low\n",
        "        low = low if self.chunk is None else max(low, position // self.chunk * self.chunk)\n"
        "        if self.own_block is None:\n            return low\n",
    ),
    ("kernels/masking.py", "*mask[5:6]))", "*mask[5:6], *mask[7:8]))"),
    (
        "kernels/masking.py",
        "    return keep\n",
        "    CHUNK: tl.constexpr = length_of(MASK, 7)\n    if CHUNK > 0:\n"
        "        keep = keep & (q_pos // CHUNK == k_pos // CHUNK)\n    return keep\n",
    ),
    (
        "kernels/masking.py",
        "    return low\n",
        "    CHUNK: tl.constexpr = length_of(MASK, 7)\n    if CHUNK > 0:\n"
        "        low = tl.maximum(low, position // CHUNK * CHUNK)\n    return low\n",
    ),
]
