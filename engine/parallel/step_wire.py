"""Steps and sampled tokens as bytes: what a driver and its ranks say to each other, without any object of Python's.

A step carries what changed since the step before: of each request the tokens and the tail of its block tables that the
ranks do not have yet, all of it and its parameters where they do not know the request. TPGroup know the requests of the
last step, no others, so that nothing needs to be forgotten by name. A message is a JSON part (empty in most steps) and
arrays of int32, each after its length.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from pagedattn.errors import PagedAttnError

from ..request import Request
from ..sampling_params import SamplingParams
from ..scheduler_output import SampledToken, ScheduledRequest, SchedulerOutput

_LENGTH = struct.Struct("=I")
_KEYS = 1 << 31
_PER_ITEM = 6  # key, start, num_tokens, samples, index of the first token sent, number of tokens sent


def pack(json_part: object, arrays: Sequence[Iterable[int]]) -> bytes:
    """A JSON value (None takes no room) and arrays of int32 as bytes."""
    text = b"" if json_part is None else json.dumps(json_part).encode()
    parts = [_LENGTH.pack(len(text)), text]
    for values in arrays:
        one = array("i", values)
        parts += (_LENGTH.pack(len(one)), one.tobytes())
    return b"".join(parts)


def unpack(data: bytes) -> tuple[Any, list[array[int]]]:
    """What `pack` was given."""
    (size,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + size
    json_part = json.loads(data[_LENGTH.size : at]) if size else None
    arrays = []
    while at < len(data):
        (count,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        one = array("i")
        one.frombytes(data[at : at + 4 * count])
        arrays.append(one)
        at += 4 * count
    return json_part, arrays


@dataclass(slots=True)
class _Sent:
    """What the ranks have of one request."""

    key: int
    num_tokens: int
    tables: list[list[int]]  # the request's own object, by which a new set of tables is told from a longer one
    blocks: list[list[int]]


class StepEncoder:
    """The driver's side: remembers what it sent. After a step that may not have arrived it must `forget`."""

    def __init__(self) -> None:
        self._sent: dict[Request, _Sent] = {}
        self._keys = 0

    def forget(self) -> None:
        """Send everything of every request again."""
        self._sent = {}

    def encode(self, step: SchedulerOutput) -> bytes:
        """A step for `StepDecoder.decode` of every rank, which must get each of them in order."""
        known, self._sent = self._sent, {}
        items: list[int] = []
        tokens: list[int] = []
        tables: list[int] = []
        news = []
        for item in step.scheduled:
            request = item.request
            sent = known.get(request)
            if sent is None:
                self._keys = (self._keys + 1) % _KEYS
                sent = _Sent(self._keys, 0, [], [])
                news.append({"key": sent.key, **_record(request)})
            ids, had = request.token_ids, sent.num_tokens
            items += (sent.key, item.start, item.num_tokens, item.samples, had, len(ids) - had)
            tokens += ids[had:]
            # A last token that the host has not read yet is negative; it is sent again when it is known.
            sent.num_tokens = len(ids) - (ids[-1] < 0)
            _add_tables(sent, request.block_ids, tables)
            self._sent[request] = sent
        groups = len(step.scheduled[0].request.block_ids) if step.scheduled else 0
        moves = (chain.from_iterable(pairs) for pairs in (step.copies, step.swap_out, step.swap_in))
        head = (step.num_decodes, groups)
        return pack(news or None, (head, items, tokens, tables, *moves, step.fresh_blocks))


class StepDecoder:
    """A rank's side: keeps the requests of the last step, as the driver has them."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def decode(self, data: bytes) -> SchedulerOutput:
        """The step that was encoded; its requests are the same objects as in the step before."""
        news, (head, items, tokens, tables, *moves, fresh_blocks) = unpack(data)
        num_decodes, num_groups = head
        known = self._requests
        for record in news or ():
            known[record.pop("key")] = _request(record)
        self._requests, scheduled, token_at, table_at = {}, [], 0, 0
        for at in range(0, len(items), _PER_ITEM):
            key, start, num_tokens, samples, first, count = items[at : at + _PER_ITEM]
            request = known.get(key)
            if request is None or first > len(request.token_ids):
                raise PagedAttnError("a step speaks of a request that this rank does not know: please report it")
            request.token_ids[first:] = tokens[token_at : token_at + count]
            token_at += count
            table_at = _take_tables(request, tables, table_at, num_groups)
            request.num_computed_tokens = start
            self._requests[key] = request
            scheduled.append(ScheduledRequest(request, start, num_tokens, bool(samples)))
        copies, swap_out, swap_in = (tuple(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in moves)
        return SchedulerOutput(tuple(scheduled), num_decodes, copies, swap_out, swap_in, tuple(fresh_blocks))


def encode_tokens(sampled: Sequence[SampledToken | None]) -> bytes:
    """The tokens of a step; rows that sample none are left out."""
    tokens = [token for token in sampled if token is not None]
    extras = [
        [row, token.logprob, list((token.top_logprobs or {}).items()), token.error]
        for row, token in enumerate(tokens)
        if token.logprob is not None or token.error is not None
    ]
    return pack(extras or None, ([token.token_id for token in tokens],))


def decode_tokens(data: bytes, step: SchedulerOutput) -> list[SampledToken | None]:
    """What was sampled, aligned with `step.scheduled`."""
    extras, (ids,) = unpack(data)
    tokens = [SampledToken(token) for token in ids]
    for row, logprob, top, error in extras or ():
        best = {token: value for token, value in top} if logprob is not None else None
        tokens[row] = SampledToken(ids[row], logprob, best, error)
    rest = iter(tokens)
    return [next(rest, None) if item.samples else None for item in step.scheduled]


def _record(request: Request) -> dict[str, Any]:
    """What never changes of a request, as JSON values."""
    return {
        "name": request.request_id,
        "prompt_len": request.prompt_len,
        "max_total_tokens": request.max_total_tokens,
        "seed": request.seed,
        "stop_ids": sorted(request.stop_ids),
        "sampling": asdict(request.sampling),
    }


def _request(record: dict[str, Any]) -> Request:
    """A request without tokens and blocks, which come in the step."""
    request = Request(
        record["name"],
        array("i"),
        SamplingParams(**record["sampling"]),
        arrival=0,
        max_total_tokens=record["max_total_tokens"],
        stop_ids=frozenset(record["stop_ids"]),
        seed=record["seed"],
    )
    request.prompt_len = record["prompt_len"]
    return request


def _add_tables(sent: _Sent, tables: list[list[int]], out: list[int]) -> None:
    """Append what is new of a request's tables: whether they are a new set; per group, where to cut, what follows."""
    fresh = sent.tables is not tables
    if fresh:
        sent.tables, sent.blocks = tables, [[] for _ in tables]
    out.append(fresh)
    for old, table in zip(sent.blocks, tables, strict=True):
        if old == table:  # nearly always
            out += (len(table), 0)
            continue
        first = next((at for at, pair in enumerate(zip(old, table, strict=False)) if pair[0] != pair[1]), None)
        first = min(len(old), len(table)) if first is None else first
        out += (first, len(table) - first)
        out += table[first:]
        old[first:] = table[first:]


def _take_tables(request: Request, tables: array[int], at: int, num_groups: int) -> int:
    """Undo `_add_tables`; returns where the next request's part begins."""
    if tables[at]:
        request.block_ids = [[] for _ in range(num_groups)]
    at += 1
    for table in request.block_ids:
        first, count = tables[at], tables[at + 1]
        at += 2
        if count or first < len(table):
            table[first:] = tables[at : at + count]
            at += count
    return at
