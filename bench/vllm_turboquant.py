"""vLLM's decode over its TurboQuant cache, called as its backend TURBOQUANT does in a step of decodes."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch

from pagedattn import LayerCache
from pagedattn.errors import UnsupportedError
from pagedattn.formats.hadamard.rotation import hadamard

from .problem import DEVICE, Paged, Problem, stored_rows
from .run import OwnCache, Run
from .table import Case

# Of our formats, vLLM's of as many bits. `int4` has none: its own of 4 bits has a step of each token where int4's keys
# have one of each channel, and is the nearest.
PRESETS = {
    "int4": "turboquant_4bit_nc",
    "turboquant4": "turboquant_4bit_nc",
    "turboquant_k3v4": "turboquant_k3v4_nc",
    "turboquant3": "turboquant_3bit_nc",
}
_BLOCK_SIZES, _DTYPES = (16, 32, 64, 128), ("float16", "bfloat16")
_FORMATS = "vllm.model_executor.layers.quantization.turboquant"
_SPLITS = 32  # of each sequence's keys: `tq_max_kv_splits_for_cuda_graph` of vLLM's configuration, by default
_STORED_AT_ONCE = 1 << 14  # tokens, as many as a step of prompts has; their rows are float32 on the way
# The root mean square error that rows of normal elements may have, of their length, by bits of a code: half more than
# that of the levels of least error (9.7 and 18.6 %) and of even steps over 128 elements (10.4 and 22 %). Rows of other
# tokens or heads have 140 %, codes read at a wrong place about as much.
_MOST_ERROR = {4: 0.15, 3: 0.3}


def turboquant(problem: Problem) -> Run:
    """`triton_turboquant_decode_attention` over the rows of the 16-bit caches, in the same blocks, as vLLM stores them.

    A layer's call is what vLLM's is: the query in float32 times the rotation, both launches of the decode into buffers
    of all layers, and the copy into the layer's output. Its backend plans nothing in a step.

    Raises:
        UnsupportedError: vLLM is not here, or does not serve the case.
        ArithmeticError: what it stored is not the rows.
    """
    case, preset = problem.case, _preset(problem.case)
    calls, plain = _library(), problem.paged(kv_cache_dtype="auto")
    stored = _Stored(calls, calls.config.from_cache_dtype(preset, case.dim), plain, case)
    _check_rows(stored, plain, case)
    common, size, layout = plain.common, (len(case.work.seq_lens), case.heads), stored.layout
    buffers = {
        "mid_o_buf": torch.empty(*size, _SPLITS, case.dim + 1, device=DEVICE),
        "output_buf": torch.empty(*size, case.dim, dtype=case.torch_dtype, device=DEVICE),
        "lse_buf": torch.empty(size, device=DEVICE),
    }

    def attend(layer: int) -> torch.Tensor:
        query = problem.queries[layer]
        out = calls.decode(
            query=query,
            kv_cache=stored.caches[layer],
            block_table=common.block_table,
            seq_lens=common.seq_lens,
            Pi=stored.rotation,
            PiT=stored.rotation,
            centroids=stored.centroids,
            scale=case.scale,
            mse_bits=layout.key_mse_bits,
            key_packed_size=layout.key_packed_size,
            value_quant_bits=layout.effective_value_quant_bits,
            norm_correction=layout.norm_correction,
            max_num_kv_splits=_SPLITS,
            **buffers,
        )
        return torch.empty_like(query).copy_(out)

    own = OwnCache(stored.rows, case.kv_heads * layout.slot_size)
    kernel = f"triton_turboquant_decode_attention, {preset}"
    return Run(lambda: None, None, attend, lambda: kernel, case.block_size, preset, own_cache=own)


class _Library(NamedTuple):
    store: Any
    decode: Any
    config: Any  # TurboQuantConfig: which bytes of a slot are what
    get_centroids: Any  # of a head dim and a number of bits: the levels of a unit row's elements, in order


class _Stored:
    """The caches of all layers, uint8 [P, S, Hkv, bytes of a slot]: a token's key and value under a head are one slot.

    A slot has the key's codes, packed from the lowest bit on, its length; the value's codes, its step and its least
    element. A code of a key is the index of a centroid, and the row of these is scaled to the key's length.
    """

    def __init__(self, calls: _Library, layout: Any, plain: Paged, case: Case) -> None:
        self.layout, self._dim, self._table = layout, case.dim, plain.common.block_table
        self.rotation = hadamard(torch.eye(case.dim)).mul(case.dim**-0.5).to(DEVICE)  # symmetric
        self.centroids = calls.get_centroids(case.dim, layout.centroid_bits).to(DEVICE, torch.float32)
        self.midpoints = (self.centroids[:-1] + self.centroids[1:]) / 2
        self.caches = [self._store(calls, plain.layer(i)) for i in range(plain.caches.num_layers)]

    def _store(self, calls: _Library, given: LayerCache) -> torch.Tensor:
        """A layer's rows by vLLM's kernel."""
        layout, (blocks, size, heads, _) = self.layout, given.key.shape
        cache = torch.zeros(blocks, size, heads, layout.slot_size_aligned, dtype=torch.uint8, device=DEVICE)
        for some in torch.arange(blocks, device=DEVICE).split(_STORED_AT_ONCE // size):
            slots = (some[:, None] * size + torch.arange(size, device=DEVICE)).flatten()
            rows = (x[some].flatten(0, 1) for x in (given.key, given.value))
            calls.store(
                *(*rows, cache, slots, self.rotation, self.midpoints),
                mse_bits=layout.key_mse_bits,
                key_packed_size=layout.key_packed_size,
                value_quant_bits=layout.effective_value_quant_bits,
            )
        return cache

    def rows(self, seq: int, head: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that layer 0's slots of a sequence's first tokens stand for, each float64 [keys, 1, D]."""
        cache, layout = self.caches[0], self.layout
        blocks = self._table[seq, : -(-keys // cache.shape[1])].long()
        slots = cache[blocks, :, head].flatten(0, 1)[:keys]
        key, value = slots[:, : layout.key_packed_size], slots[:, layout.key_packed_size : layout.slot_size]
        unit = self.centroids.double()[self._codes(key, layout.key_mse_bits)]
        unit = hadamard(unit / unit.norm(dim=1, keepdim=True)) * self._dim**-0.5
        (length,), (step, least) = _factors(key[:, -2:]), _factors(value[:, -4:])
        levels = self._codes(value, layout.effective_value_quant_bits).double()
        return (unit * length)[:, None], (levels * step + least)[:, None]

    def _codes(self, packed: torch.Tensor, bits: int) -> torch.Tensor:
        """int64 [n, D] of rows [n, bytes] that begin with them."""
        every = torch.arange(8, device=packed.device, dtype=torch.uint8)
        single = (packed[:, : self._dim * bits // 8, None] >> every & 1).flatten(1).unflatten(1, (self._dim, bits))
        return (single.long() << every[:bits]).sum(-1)


def _factors(part: torch.Tensor) -> torch.Tensor:
    """What stands behind the codes, float16 in bytes [n, 2 k], as float64 [k, n, 1]."""
    return part.contiguous().view(torch.float16).double().T[..., None]


def _preset(case: Case) -> str:
    """vLLM's name of the cache format."""
    work, power_of_two = case.work, case.dim & (case.dim - 1) == 0
    needs = (
        (case.kv_cache_dtype in PRESETS, f"it is measured beside caches of {', '.join(PRESETS)} only"),
        ({*work.query_lens} == {1}, "its decode takes one new token of each sequence"),
        (not (case.window or case.softcap or case.sinks), "it has no windows, soft caps and sinks"),
        (power_of_two, f"its rotation takes heads of a power of two, not of {case.dim}"),
        (case.block_size in _BLOCK_SIZES, f"its blocks are of {_BLOCK_SIZES} tokens, not of {case.block_size}"),
        (case.dtype in _DTYPES, f"its queries are {' or '.join(_DTYPES)}, not {case.dtype}"),
    )
    for served, why in needs:
        if not served:
            raise UnsupportedError(why)
    return PRESETS[case.kv_cache_dtype]


def _library() -> _Library:
    try:
        ops = [import_module(f"vllm.v1.attention.ops.triton_turboquant_{name}") for name in ("store", "decode")]
        formats = [import_module(f"{_FORMATS}.{name}") for name in ("config", "centroids")]
    except ImportError as error:
        hint = "pip install vllm==0.24.0"
        raise UnsupportedError(f"it needs vLLM with its TurboQuant kernels; {hint} ({error})") from error
    return _Library(
        ops[0].triton_turboquant_store,
        ops[1].triton_turboquant_decode_attention,
        formats[0].TurboQuantConfig,
        formats[1].get_centroids,
    )


def _check_rows(stored: _Stored, plain: Paged, case: Case) -> None:
    """Rows of the last sequence and head, as they are stored, beside those that they were."""
    seq, head, layout = len(case.work.seq_lens) - 1, case.kv_heads - 1, stored.layout
    keys = case.work.seq_lens[seq]
    blocks = plain.common.block_table[seq, : -(-keys // case.block_size)].long()
    sides = zip(
        ("keys", "values"),
        (layout.key_mse_bits, layout.effective_value_quant_bits),
        stored.rows(seq, head, keys),
        stored_rows(case, plain.layer(0), blocks, head, keys),
        strict=True,
    )
    for name, bits, found, want in sides:
        error = float((found - want).norm() / want.norm())
        if not error <= _MOST_ERROR[bits]:
            raise ArithmeticError(f"stored {name} differ from the rows by {error:.0%} of these")
