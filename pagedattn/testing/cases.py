"""The cases of the conformance suite: each names the behaviour it is there for by what it changes."""

from __future__ import annotations

from typing import Any

from ..formats.per_layer import KVCacheDtype
from ..spec import AttentionType, Mask
from .case import Case

ENCODER = AttentionType.ENCODER_ONLY
CROSS = AttentionType.CROSS


def _decode(**changes: Any) -> Case:
    return Case(query_lens=(1, 1, 1, 1), seq_lens=(1, 16, 37, 129), **changes)


def _chunks(**changes: Any) -> Case:
    return Case(query_lens=(33, 7, 20), seq_lens=(64, 7, 85), **changes)


def _whole(**changes: Any) -> Case:
    return Case(query_lens=(19, 1, 70), seq_lens=(19, 1, 70), **changes)


_SHAPES = (
    *(Case(head_dim=d) for d in (16, 24, 40, 64, 72, 80, 96, 128, 192, 256, 512)),
    *(_decode(head_dim=d) for d in (16, 72, 96, 128, 192, 256, 512)),
    *(Case(heads=heads, head_dim=16) for heads in ((1, 1), (4, 4), (5, 1), (7, 1), (8, 1), (16, 1), (10, 2), (14, 2))),
    *(_decode(heads=heads, head_dim=16) for heads in ((4, 4), (5, 1), (7, 1), (8, 1), (16, 1), (32, 8))),
    *(Case(block_size=s, head_dim=16) for s in (1, 2, 4, 8, 32, 64, 128, 256)),
    *(_decode(block_size=s, head_dim=16) for s in (1, 4, 8, 32, 128, 256)),
    *(Case(block_size=s, head_dim=16) for s in (3, 5, 48)),
    Case(head_dim=48, head_dim_v=24),
    Case(head_dim=24, head_dim_v=40),
    _decode(head_dim=192, head_dim_v=128),
    Case(layout="HND"),
    _decode(layout="HND"),
    Case(layout="HND", heads=(4, 1)),
)

_LENGTHS = (
    Case(query_lens=(0, 3, 0), seq_lens=(0, 3, 20), note="empty rows between"),
    Case(query_lens=(1,), seq_lens=(1,), note="one token"),
    Case(query_lens=(0, 0), seq_lens=(0, 0), note="nothing at all"),
    Case(query_lens=(1, 1, 0, 0), seq_lens=(9, 40, 0, 0), note="padded decode batch"),
    Case(query_lens=(16, 16), seq_lens=(16, 32), note="exactly full blocks"),
    Case(query_lens=(17, 1), seq_lens=(17, 33), note="one past full blocks"),
    Case(query_lens=(1,) * 40, seq_lens=(1,) * 40, note="many one-token prompts"),
    Case(query_lens=(1,) * 9, seq_lens=tuple(range(1, 280, 31)), note="ragged decodes"),
    Case(query_lens=(1, 1, 40, 5), seq_lens=(30, 66, 64, 5), note="mixed"),
    Case(query_lens=(3, 3, 3), seq_lens=(40, 3, 129), note="multi-token decode"),
    Case(query_lens=(130,), seq_lens=(300,), note="long chunk"),
    Case(query_lens=(5, 9), seq_lens=(2, 9), write=False, note="more queries than keys"),
    Case(query_lens=(2, 1), seq_lens=(0, 9), write=False, note="queries without keys"),
    Case(query_lens=(2,), seq_lens=(0,), write=False, note="no keys at all"),
    Case(query_lens=(1, 1), seq_lens=(1327, 1025), head_dim=16, note="long contexts"),
)

_FEATURES = (
    *(Case(sliding_window=w) for w in (1, 2, 15, 16, 17, 37, 64, 1000)),
    *(_decode(sliding_window=w) for w in (1, 16, 17, 36, 37, 130)),
    *(_chunks(sliding_window=w) for w in (1, 8, 31, 64)),
    *(Case(softcap=c, magnitude=3.0) for c in (1.0, 5.0, 50.0)),
    _decode(softcap=5.0, magnitude=3.0),
    Case(alibi=True),
    _decode(alibi=True),
    _chunks(alibi=True, heads=(7, 1)),
    *(Case(sinks=s) for s in (-2.0, 0.0, 10.0, float("-inf"))),
    *(_decode(sinks=s) for s in (0.0, 5.0)),
    Case(query_lens=(2, 1), seq_lens=(0, 9), write=False, sinks=1.0, note="sinks without keys"),
    Case(sliding_window=5, sinks=0.5, softcap=8.0, magnitude=2.0),
    _decode(sliding_window=20, sinks=0.5, alibi=True),
    _chunks(sliding_window=20, softcap=8.0, alibi=True),
    _decode(sliding_window=20, poison_behind=True),
    _chunks(sliding_window=5, poison_behind=True),
    Case(scale=0.5),
    _decode(scale=-0.3),
    Case(magnitude=30.0, note="huge logits"),
    Case(causal=False),
    _chunks(causal=False),
    _decode(causal=False, sliding_window=9),
    *(_chunks(causal=False, sliding_window=w) for w in (1, 16, 40)),
    Case(causal=False, alibi=True),
    Case(mask=Mask(True, own_block=8), alibi=True, note="own block"),
    _decode(mask=Mask(True, own_block=16), sinks=0.5, note="own block, decodes"),
    _chunks(mask=Mask(True, 5, own_block=32), note="own block, chunks"),
    Case(mask=Mask(True, earlier_blocks=8), note="earlier blocks"),
    _decode(mask=Mask(True, earlier_blocks=16), note="earlier blocks, decodes"),
    _chunks(mask=Mask(True, 40, earlier_blocks=32), sinks=0.5, note="earlier blocks, chunks"),
    _decode(mask=Mask(True, own_block=16, recent_blocks=2), note="own and recent blocks, decodes"),
    _chunks(mask=Mask(True, own_block=8, recent_blocks=1), alibi=True, note="own and recent blocks, chunks"),
    Case(
        query_lens=(1,) * 7,
        seq_lens=(1, 16, 37, 129, 70, 101, 257),
        mask=Mask(True, earlier_blocks=8, recent_blocks=2),
        note="blocks before recent ones, decodes",
    ),
    _chunks(mask=Mask(True, 70, earlier_blocks=16, recent_blocks=1), note="blocks before recent ones, chunks"),
    _decode(mask=Mask(True, earlier_blocks=8, recent_blocks=1, from_block=3), note="but for first blocks, decodes"),
    _chunks(mask=Mask(True, earlier_blocks=8, from_block=3), sinks=0.5, note="but for first blocks, chunks"),
    _decode(mask=Mask(True, earlier_blocks=4, recent_blocks=2, to_block=5), note="first blocks, decodes"),
    _chunks(mask=Mask(True, 40, earlier_blocks=4, to_block=5), note="first blocks, chunks"),
    Case(
        query_lens=(3, 3, 3),
        seq_lens=(40, 3, 129),
        mask=Mask(True, earlier_blocks=4),
        note="earlier blocks, several tokens",
    ),
)

_SHARED: dict[str, Any] = {"query_lens": (1, 1, 1), "seq_lens": (33, 70, 57), "shared_prefix": 32}
_MEMORY = (
    Case(**_SHARED),
    Case(**_SHARED, heads=(7, 1), sliding_window=20),
    Case(**_SHARED, alibi=True),
    Case(**_SHARED, sinks=0.5, softcap=5.0, magnitude=3.0),
    Case(query_lens=(3, 16, 1), seq_lens=(35, 48, 90), shared_prefix=32, note="shared prefix, several tokens"),
    Case(query_lens=(1, 1, 40), seq_lens=(40, 33, 80), shared_prefix=32, note="shared prefix, mixed"),
    Case(query_lens=(1, 1, 0), seq_lens=(40, 33, 0), shared_prefix=32, note="shared prefix, padded"),
    Case(query_lens=(1, 5), seq_lens=(32, 40), shared_prefix=32, write=False, note="nothing but a shared prefix"),
    Case(share_blocks=True, query_lens=(1, 5, 9), seq_lens=(20, 40, 60)),
    Case(share_blocks=True, query_lens=(1, 1, 1, 1), seq_lens=(20, 40, 60, 90)),
    Case(fused_qkv=True),
    Case(fused_qkv=True, padding_rows=3),
    _decode(fused_qkv=True, padding_rows=4),
    Case(padding_rows=5),
    Case(poison=float("inf"), note="infinite poison"),
    _decode(poison=float("inf"), note="infinite poison, decode"),
    Case(write=False, note="nothing to write"),
    Case(lse=False),
    _decode(lse=False),
)

_KINDS = (
    Case(paged=False, seq_lens=(5, 1, 17)),
    Case(paged=False, seq_lens=(5, 1, 17), sliding_window=4),
    Case(paged=False, seq_lens=(40, 3, 17), query_lens=(7, 3, 17), heads=(5, 1), note="dense with context"),
    *(_whole(paged=False, attn_type=ENCODER, sliding_window=w) for w in (None, 1, 9)),
    Case(paged=False, attn_type=AttentionType.ENCODER, query_lens=(33, 64), seq_lens=(33, 64), head_dim=72),
    Case(attn_type=CROSS, query_lens=(5, 1, 9), seq_lens=(30, 17, 3), write=False),
    Case(attn_type=CROSS, query_lens=(1, 1), seq_lens=(64, 1), write=False),
    Case(paged=False, attn_type=CROSS, query_lens=(4, 6), seq_lens=(21, 2)),
)

_E4M3: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
_E5M2: dict[str, Any] = {"kv_cache_dtype": "fp8_e5m2"}
_INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}
_K8V4: dict[str, Any] = {"kv_cache_dtype": "k8v4"}
_INT4: dict[str, Any] = {"kv_cache_dtype": "int4", "block_size": 32}
_TURBO4: dict[str, Any] = {"kv_cache_dtype": "turboquant4"}
_TURBO_K4V3: dict[str, Any] = {"kv_cache_dtype": "turboquant_k4v3"}
_TURBO_K3V4: dict[str, Any] = {"kv_cache_dtype": "turboquant_k3v4"}
_TURBO3: dict[str, Any] = {"kv_cache_dtype": "turboquant3"}
_TURBO2: dict[str, Any] = {"kv_cache_dtype": "turboquant2"}


def _windowed(name: str, window: int, first: int = 0) -> dict[str, Any]:
    return {"kv_cache_dtype": KVCacheDtype(name, window=window, first=first).of_one_layer()}


_STORED = (
    *(Case(**_E4M3, kv_scale=kind) for kind in ("none", "float", "tensor", "head")),
    *(_decode(**_E5M2, kv_scale=kind) for kind in ("none", "float", "tensor", "head")),
    *(_decode(**_E4M3, kv_scale=kind, heads=(8, 4), head_dim=64) for kind in ("float", "head")),
    _chunks(**_E4M3, kv_scale="head", softcap=5.0, sliding_window=20),
    _decode(**_E4M3, kv_scale="tensor", layout="HND", head_dim=72),
    *(Case(**_E4M3, kv_scale="head", head_dim=d) for d in (16, 96, 128)),
    Case(**_E4M3, kv_scale="float", head_dim=48, head_dim_v=24),
    Case(**_E4M3, kv_scale="tensor", magnitude=30.0, scale=0.01, note="saturated fp8"),
    Case(**_INT8),
    Case(**_INT8, scales_by_slot=True),
    Case(**_INT8, head_dim=72, head_dim_v=40, layout="HND", softcap=9.0),
    _decode(**_INT8, heads=(8, 4), head_dim=64),
    _decode(**_INT8, layout="HND", sliding_window=20),
    _chunks(**_INT8, alibi=True, sinks=0.5, heads=(5, 1)),
    Case(**_INT8, block_size=1, query_lens=(3, 1), seq_lens=(9, 40)),
    Case(**_K8V4),
    _decode(**_K8V4, scales_by_slot=True),
    Case(**_K8V4, head_dim=40, head_dim_v=72, layout="HND", softcap=9.0),
    _decode(**_K8V4, heads=(8, 4), head_dim=64, block_size=4),
    _chunks(**_K8V4, sinks=0.5, sliding_window=20, head_dim=24, head_dim_v=7),
    Case(**_TURBO4),
    _decode(**_TURBO4, scales_by_slot=True),
    Case(**_TURBO4, head_dim=40, head_dim_v=72, layout="HND", softcap=9.0),
    _decode(**_TURBO4, heads=(8, 4), head_dim=64, block_size=4),
    _chunks(**_TURBO4, sinks=0.5, sliding_window=20, head_dim=24, head_dim_v=7),
    Case(**_TURBO4, share_blocks=True, query_lens=(1, 5, 9), seq_lens=(20, 40, 60)),
    Case(**_TURBO4, **_SHARED),
    Case(**_TURBO_K4V3, head_dim=128),
    _decode(**_TURBO_K3V4, layout="HND", head_dim=96, alibi=True),
    Case(**_TURBO3, head_dim=33, head_dim_v=80, block_size=1, query_lens=(3, 1), seq_lens=(9, 40)),
    _decode(**_TURBO3, heads=(8, 4), head_dim=64, sinks=0.5),
    Case(**_TURBO2, head_dim=72, head_dim_v=40, layout="HND"),
    _decode(**_TURBO2, sliding_window=20, heads=(5, 1)),
    Case(**_E5M2, kv_scale="head", share_blocks=True, query_lens=(1, 5, 9), seq_lens=(20, 40, 60)),
    Case(**_INT4),
    Case(**_INT4, head_dim=40, head_dim_v=72, layout="HND", softcap=9.0, query_lens=(33, 1, 7), seq_lens=(64, 33, 71)),
    _decode(**_INT4, heads=(8, 4), head_dim=64),
    _decode(**_INT4, sliding_window=40, poison_behind=True, alibi=True),
    _chunks(**_INT4),
    _chunks(**_INT4, sinks=0.5, sliding_window=20, head_dim=24, head_dim_v=7),
    Case(**{**_INT4, "block_size": 96}, query_lens=(130, 1), seq_lens=(300, 97), head_dim=16),
    Case(**_INT4, query_lens=(32, 1, 31, 64), seq_lens=(64, 32, 63, 64), note="full blocks of int4"),
    Case(**_INT4, query_lens=(3, 3, 3), seq_lens=(64, 34, 129), padding_rows=2, fused_qkv=True),
    Case(**_INT4, query_lens=(1, 1, 0, 0), seq_lens=(9, 40, 0, 0), note="padded decodes over int4"),
    Case(**_INT4, query_lens=(40, 1), seq_lens=(70, 33), write=False, note="nothing to write to int4"),
    Case(**_INT4, query_lens=(2, 1), seq_lens=(0, 9), write=False, sinks=1.0, note="sinks without keys over int4"),
    Case(**_INT4, query_lens=(1, 1, 1), seq_lens=(33, 70, 57), shared_prefix=32),
    Case(**_INT4, paged=False, seq_lens=(5, 1, 17)),
    Case(**_windowed("turboquant4", 20)),
    _decode(**_windowed("turboquant4", 16), heads=(8, 4), head_dim=64),
    _chunks(**_windowed("turboquant_k3v4", 1), sinks=0.5, sliding_window=40, head_dim=24, head_dim_v=7),
    Case(**_windowed("turboquant2", 64), query_lens=(130, 1, 17), seq_lens=(300, 97, 81), layout="HND", softcap=9.0),
    _decode(**_windowed("int8", 33), sliding_window=70, poison_behind=True, alibi=True),
    Case(**_windowed("k8v4", 10), block_size=5, query_lens=(3, 11, 3), seq_lens=(64, 34, 129), padding_rows=2),
    Case(
        **_windowed("turboquant4", 48), query_lens=(1, 1, 0, 0), seq_lens=(9, 140, 0, 0), note="padded, with a window"
    ),
    Case(**_windowed("turboquant3", 16), query_lens=(40, 1), seq_lens=(70, 33), write=False, note="a window, no write"),
    Case(**_windowed("int4", 40), block_size=32, query_lens=(33, 1, 70), seq_lens=(164, 133, 71)),
    Case(**_windowed("turboquant4", 32), query_lens=(1, 1, 1), seq_lens=(33, 170, 97), shared_prefix=32),
    _decode(**_windowed("turboquant4", 20, 4), heads=(8, 4), head_dim=64, note="first tokens and a window, decodes"),
    _chunks(**_windowed("turboquant2", 0, 20), sinks=0.5, alibi=True, note="first tokens, chunks"),
    Case(**_windowed("int4", 0, 40), block_size=32, query_lens=(33, 1, 70), seq_lens=(164, 133, 71)),
    _chunks(**_windowed("int8", 16, 16), sliding_window=70, softcap=9.0, note="first tokens behind a sliding window"),
)

CASES: tuple[Case, ...] = (*_SHAPES, *_LENGTHS, *_FEATURES, *_MEMORY, *_KINDS, *_STORED)

_ROW: dict[str, Any] = {"latent_dim": 32, "head_dim": 40, "scale": 0.2}
_LARGE: dict[str, Any] = {"latent_dim": 512, "head_dim": 576, "scale": 0.1, "query_lens": (2, 1), "seq_lens": (40, 9)}
_SMALL: dict[str, Any] = {**_ROW, "scale": 0.002}  # of rows so large that they saturate
_DECODES: dict[str, Any] = {"query_lens": (1, 1, 1, 1), "seq_lens": (1, 16, 37, 129)}
# Of absorbed latent attention, apart: what is done to all cases of heads (another head_dim) does not fit these.
MLA_CASES: tuple[Case, ...] = (
    *(Case(**_ROW, heads=(heads, 1)) for heads in (1, 3, 16, 20, 128)),
    *(Case(**_ROW, **_DECODES, heads=(heads, 1)) for heads in (1, 5, 16, 48, 96)),
    *(Case(**_ROW, heads=(4, 1), block_size=size) for size in (1, 3, 64)),
    Case(**{**_ROW, "head_dim": 32}, heads=(4, 1), note="latent rows without a rotated part"),
    Case(**{**_ROW, "latent_dim": 24, "head_dim": 37}, **_DECODES, heads=(3, 1), note="odd latent rows"),
    Case(**_LARGE, heads=(16, 1)),
    Case(**_ROW, heads=(8, 1), query_lens=(16, 2, 5), seq_lens=(40, 90, 5), note="several tokens over latent rows"),
    Case(**_ROW, heads=(4, 1), query_lens=(40, 1), seq_lens=(171, 60), note="a chunk over latent rows"),
    Case(**_ROW, heads=(4, 1), query_lens=(1, 1), seq_lens=(1327, 700), note="long latent contexts"),
    Case(**_ROW, heads=(4, 1), query_lens=(1, 0, 1, 0), seq_lens=(40, 0, 9, 20), note="latent rows, empty sequences"),
    Case(**_ROW, heads=(4, 1), query_lens=(2, 1), seq_lens=(0, 9), write=False, note="no latent rows"),
    Case(**_ROW, heads=(4, 1), query_lens=(1,) * 40, seq_lens=tuple(range(1, 41)), note="many latent decodes"),
    Case(**_ROW, heads=(4, 1), sliding_window=17),
    Case(**_ROW, **_DECODES, heads=(4, 1), sliding_window=20, poison_behind=True),
    Case(**_ROW, heads=(4, 1), softcap=5.0, magnitude=3.0),
    Case(**_ROW, heads=(4, 1), causal=False),
    Case(**_ROW, heads=(4, 1), layout="HND", padding_rows=3),
    Case(**_ROW, heads=(4, 1), share_blocks=True, query_lens=(1, 5, 9), seq_lens=(20, 40, 60)),
    Case(**_ROW, **_DECODES, heads=(4, 1), poison=float("inf"), note="infinite poison, latent rows"),
    Case(**_ROW, **_DECODES, heads=(4, 1), lse=False),
    *(Case(**_ROW, **_E4M3, heads=(4, 1), kv_scale=kind) for kind in ("none", "float", "tensor")),
    *(Case(**_ROW, **_DECODES, **_E4M3, heads=(heads, 1), kv_scale="tensor") for heads in (5, 48)),
    Case(**_LARGE, **_E4M3, heads=(16, 1), kv_scale="float"),
    Case(**_ROW, **_E4M3, heads=(4, 1), query_lens=(40, 1), seq_lens=(171, 60), kv_scale="tensor", softcap=5.0),
    Case(**_ROW, **_E4M3, heads=(4, 1), query_lens=(1, 1), seq_lens=(1327, 700), kv_scale="float"),
    Case(
        **_ROW,
        **_E4M3,
        heads=(4, 1),
        query_lens=(1, 0, 1),
        seq_lens=(40, 0, 9),
        kv_scale="float",
        poison_behind=True,
        sliding_window=17,
    ),
    Case(**_ROW, **_E4M3, heads=(4, 1), query_lens=(2, 1), seq_lens=(0, 9), write=False, note="no latent rows of e4m3"),
    Case(**_ROW, **_E4M3, heads=(4, 1), kv_scale="tensor", block_size=3, layout="HND", padding_rows=3),
    *(Case(**_LARGE, kv_cache_dtype="fp8_ds_mla", heads=(heads, 1)) for heads in (3, 48)),
    Case(
        **{**_LARGE, "query_lens": (1, 0, 1), "seq_lens": (140, 0, 9)},
        kv_cache_dtype="fp8_ds_mla",
        heads=(4, 1),
        sliding_window=70,
        layout="HND",
        magnitude=100.0,
    ),
    Case(**_SMALL, **_E4M3, heads=(4, 1), kv_scale="tensor", magnitude=30.0, note="saturated latent rows"),
)
