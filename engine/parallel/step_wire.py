"""Packed steps and sampled tokens as bytes: what a driver and its ranks say, without any object of Python's.

A message is a JSON part, empty in most, and arrays of int32, each behind its shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..sampling.metadata import SamplingMetadata, TokenCountUpdates
from ..scheduler_output import SampledToken, SchedulerOutput
from ..worker.host_batch import BlockMoves, HostBatch
from ..worker.persistent_batch import BlockTableUpdates


def pack(json_part: object, arrays: Sequence[np.ndarray]) -> bytes:
    """A JSON value (None takes no room) and arrays of int32 as bytes."""
    text = b"" if json_part is None else json.dumps(json_part).encode()
    parts = [np.array([len(text)], dtype=np.int32).tobytes(), text.ljust(-(-len(text) // 4) * 4)]
    for array in arrays:
        head = np.array([array.ndim, *array.shape], dtype=np.int32)
        parts += (head.tobytes(), array.astype(np.int32, copy=False).tobytes())
    return b"".join(parts)


def unpack(data: bytes) -> tuple[Any, list[np.ndarray]]:
    """What `pack` was given."""
    words = np.frombuffer(bytearray(data), dtype=np.int32)
    size = int(words[0])
    arrays, at = [], 1 - (-size // 4)
    while at < len(words):
        begin = at + 1 + int(words[at])
        shape = words[at + 1 : begin].tolist()
        at = begin + prod(shape)
        arrays.append(words[begin:at].reshape(shape))
    return json.loads(data[4 : 4 + size]) if size else None, arrays


def encode_step(batch: HostBatch) -> bytes:
    """A packed step for `decode_step` of every rank, which must get each of them in order."""
    updates, sampling = batch.updates, batch.sampling
    head = np.array([batch.num_decodes, updates.table_changed, *batch.shared], dtype=np.int32)
    arrays = [head, *batch[:5], *updates[:5], *batch.moves]
    if sampling is not None:
        arrays += [*sampling[:3], *sampling.counts]
    return pack(None, arrays)


def decode_step(data: bytes) -> HostBatch:
    """The step that was encoded."""
    _, (head, *arrays) = unpack(data)
    num_decodes, table_changed, *shared = head.tolist()
    step, updates, moves, sampling = arrays[:5], arrays[5:10], arrays[10:16], arrays[16:]
    changed = BlockTableUpdates._make([*updates, bool(table_changed)])
    own = SamplingMetadata._make([*sampling[:3], TokenCountUpdates._make(sampling[3:])]) if sampling else None
    return HostBatch._make([*step, changed, num_decodes, shared, own, BlockMoves._make(moves)])


def encode_tokens(tokens: Sequence[SampledToken]) -> bytes:
    """The tokens of a step's sampled rows."""
    extras = [
        [row, token.logprob, list((token.top_logprobs or {}).items()), token.error]
        for row, token in enumerate(tokens)
        if token.logprob is not None or token.error is not None
    ]
    return pack(extras or None, [np.array([token.token_id for token in tokens], dtype=np.int32)])


def decode_tokens(data: bytes, step: SchedulerOutput) -> list[SampledToken | None]:
    """What was sampled, aligned with `step.scheduled`."""
    extras, (ids,) = unpack(data)
    tokens = [*map(SampledToken, ids.tolist())]
    for row, logprob, top, error in extras or ():
        best = {token: value for token, value in top} if logprob is not None else None
        tokens[row] = SampledToken(tokens[row].token_id, logprob, best, error)
    return step.align(tokens)
