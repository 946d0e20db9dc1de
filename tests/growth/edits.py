"""What a new cache format and a new mask change in files that are there: (file, text, what replaces it)."""

FORMAT = [
    (
        "formats/registry.py",
        "from .native.format import NATIVE\n",
        "from .native.format import NATIVE\nfrom .toy.format import TOY\n",
    ),
    (
        "formats/registry.py",
        "(NATIVE, E4M3, E5M2, INT8, K8V4, *TURBOQUANT)",
        "(NATIVE, E4M3, E5M2, INT8, K8V4, *TURBOQUANT, TOY)",
    ),
]
# A query sees the keys of its own chunk (Llama 4's chunked attention).
MASK = [
    ("spec/mask.py", '= ("sliding_window",)', '= ("sliding_window", "chunk")'),
    (
        "spec/mask.py",
        "    mask_mod: MaskMod | None = None\n\n    def __post",
        "    mask_mod: MaskMod | None = None\n    chunk: int | None = None\n\n    def __post",
    ),
    ("spec/mask.py", "self.sliding_window or 0)", "self.sliding_window or 0, self.chunk or 0)"),
    (
        "spec/mask.py",
        "causal, window = constants\n        return cls(bool(causal), window or None)",
        "causal, window, chunk = constants\n        return cls(bool(causal), window or None, None, chunk or None)",
    ),
    (
        "spec/mask.py",
        "        return keep\n",
        "        if self.chunk is not None:\n            keep = keep & (key // self.chunk == query // self.chunk)\n"
        "        return keep\n",
    ),
    (
        "spec/mask.py",
        "        return 0 if self.sliding_window is None else max(position - self.sliding_window + 1, 0)\n",
        "        of_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk\n"
        "        return max(of_chunk, 0 if self.sliding_window is None else position - self.sliding_window + 1)\n",
    ),
    ("kernels/masking.py", "return mask[1] == 0", "return mask[1] == 0 and mask[2] == 0"),
    (
        "kernels/masking.py",
        "    return keep\n",
        "    if MASK[2] > 0:\n        keep = keep & (q_pos // MASK[2] == k_pos // MASK[2])\n    return keep\n",
    ),
    (
        "kernels/masking.py",
        "    return low\n",
        "    if MASK[2] > 0:\n        low = tl.maximum(low, position // MASK[2] * MASK[2])\n    return low\n",
    ),
]
