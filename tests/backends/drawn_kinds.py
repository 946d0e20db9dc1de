"""Layers and lengths of random problems by the generator of `pagedattn bench random`, sized down so that the oracle
computes them in milliseconds; with what that has not: every format, ALiBi, masks of blocks, and layouts.
"""

from __future__ import annotations

from random import Random
from typing import Any

from pagedattn import Mask
from pagedattn.bench.random_shapes import KINDS, random_case, random_text
from pagedattn.bench.workload import parse
from pagedattn.formats.registry import FORMATS, format_of
from pagedattn.testing.case import Case

PREFIX = "drawn "
MOST = 400  # layers: each has kernels of its own, which take seconds to compile
LESS = 16  # times fewer keys than the benchmark has
_MOST_KEYS, _MOST_PAIRS = 8000, 2_000_000  # of all sequences: rows that are made, and logits of a head
STORED = tuple(name for name in FORMATS if name != "auto")
WITH_NATIVE = (
    *("int4:window=64", "int4:first=32", "int4:window=40:first=64", "int8:window=64:first=16", "k8v4:first=16"),
    *("turboquant4:window=64", "turboquant4:window=100:first=32", "turboquant3:first=16"),
)


def names(count: int, seed: int = 0) -> list[str]:
    """Of so many drawn layers: `drawn SEED/NUMBER`, all that is needed to draw one again."""
    return [f"{PREFIX}{seed}/{number}" for number in range(count)]


def case_drawn(name: str) -> Case:
    """The layer of that name, whose lengths are the caller's to choose; TRITON serves every one."""
    seed, number = map(int, name.removeprefix(PREFIX).split("/"))
    shape, draw = random_case(seed, number), Random(f"layer {seed}/{number}")
    form = draw.choice((*STORED, *STORED, *WITH_NATIVE)) if draw.random() < 0.4 else shape.kv_cache_dtype
    form_of = format_of(form)
    window = shape.window // LESS or None
    options: dict[str, Any] = {"sliding_window": window}
    if form_of.takes_scales:
        options["kv_scale"] = draw.choice(("none", "float", "tensor", "head"))
    size = max(shape.block_size, form_of.default_block_size)
    kind = draw.random()
    if kind < 0.15 and not form_of.whole_blocks:
        options = options | {"sliding_window": None, "mask": _mask_of_blocks(draw, size, window)}
    elif kind < 0.25 and not form_of.whole_blocks:
        options["causal"] = False
    elif form == "auto" and window:
        options["poison_behind"] = draw.random() < 0.5
    return Case(
        heads=(shape.heads, shape.kv_heads),
        head_dim=shape.dim,
        block_size=size,
        dtype=shape.torch_dtype,
        softcap=shape.softcap or None,
        sinks=draw.choice((0.0, 0.5, 1.0)) if shape.sinks else None,
        kv_cache_dtype=form,
        alibi=draw.random() < 0.1,
        deterministic=draw.random() < 0.15,
        layout=draw.choice(("NHD", "NHD", "NHD", "HND")),
        lse=draw.random() < 0.8,
        **options,
    )


def _mask_of_blocks(draw: Random, size: int, window: int | None) -> Mask:
    """Either half of attention over a cache whose open blocks lie apart, with recent and first blocks or without."""
    recent = draw.choice((None, 1, 2))
    if draw.random() < 0.4:
        return Mask(True, window, own_block=size, recent_blocks=recent)
    ends: dict[str, Any] = draw.choice(({}, {}, {"from_block": 1}, {"from_block": 3}, {"to_block": 2}))
    return Mask(True, window, earlier_blocks=size, recent_blocks=recent, **ends)


def lengths_drawn(draw: Random) -> tuple[list[int], list[int]]:
    """Query and key lengths of a step as traffic has it, with `LESS` times fewer keys."""
    while True:
        work = parse(random_text(draw, draw.choice(KINDS), LESS))
        pairs = sum(q * s for q, s in zip(work.query_lens, work.seq_lens, strict=True))
        if sum(work.seq_lens) <= _MOST_KEYS and pairs <= _MOST_PAIRS:
            return work.query_lens, work.seq_lens
