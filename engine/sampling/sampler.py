"""Sampler: one token per row of logits, on the device, by each request's own parameters.

Randomness is a counter-based hash of (seed, position, token id), so a row's token depends on its logits, its seed and
its position, and never on the batch around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..models.fused_ops import fuses
from ..request import Request
from ..sampling_params import SamplingParams
from ..scheduler_output import SampledToken
from .packed_params import LOWEST_TEMPERATURE, next_state, request_params
from .rows import SampledRows
from .token_counts import TokenCounts

_INFINITY = float("inf")
_GOLDEN = 0x9E3779B1 - (1 << 32)  # 2**32 over the golden ratio: spreads token ids over int32


class AsyncTokens:
    """Tokens that the device is drawing, on their way to the host."""

    def __init__(self, tokens: torch.Tensor, wanted: Sequence[int | None], logprobs: Sequence[torch.Tensor]) -> None:
        """tokens [n], -1 where there is none.

        `wanted` has how many best tokens each row reports (None: nothing), or is empty. `logprobs` of the m rows that
        do: those of their tokens [m, 1], and the best of each row [m, k] with their ids.
        """
        self.tokens = tokens
        self._wanted = wanted
        self._on_gpu = tokens.is_cuda
        self._copies = [_to_host(tensor) for tensor in (tokens, *logprobs)]
        if self._on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[SampledToken]:
        """Wait for the tokens."""
        if self._on_gpu:
            self._arrived.synchronize()
        tokens, *logprobs = (copy.tolist() for copy in self._copies)
        out = [*map(SampledToken, tokens)]
        if min(tokens) < 0:
            out = [token if token.token_id >= 0 else _BROKEN for token in out]
        if logprobs:
            reporting = [row for row, count in enumerate(self._wanted) if count is not None]
            for row, (own,), values, ids in zip(reporting, *logprobs, strict=True):
                if out[row].error is None:
                    top = dict(zip(ids[: self._wanted[row]], values, strict=False))
                    out[row] = SampledToken(tokens[row], own, top)
        return out


_BROKEN = SampledToken(-1, error="no token has a finite logit")


class BatchState(NamedTuple):
    """What the device has of a batch's requests: `rows` says which are theirs in the others."""

    rows: SampledRows
    params: torch.Tensor  # [R, PARAMS] int32, as `PersistentBatch` has them
    counts: TokenCounts


class Sampler:
    """Samples for a model of `vocab_size` tokens.

    Order of operations: min_tokens, penalties, temperature, top_k, top_p of what top_k left, min_p. Tokens as likely as
    the last one kept are kept too. Log probabilities are those of the model, before all of these.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._token_hash = torch.arange(vocab_size, dtype=torch.int32, device=device) * _GOLDEN

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """logits [n, vocab_size], row i for the next token of `requests[i]`, to n tokens.

        A row without a finite maximum (NaN, +Inf, or every token masked) gives token -1 with `error` set.
        """
        return self.sample_async(logits, requests, self._own_state(requests)).read()

    def sample_async(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        state: BatchState,
        *,
        drawn: torch.Tensor | None = None,
        needs_processing: bool = True,
    ) -> AsyncTokens:
        """As `sample`, waiting for nothing.

        Args:
            state: what the device has of the requests; the last token of each may be known to it alone.
            drawn: [n], what a graph drew from `logits` already.
            needs_processing: whether any request has penalties, min_tokens or logprobs.
        """
        scores = logits
        if needs_processing:
            scores = self._mask_stops(state.counts.penalize(logits, requests, state.rows, state.params), requests)
        if drawn is None or scores is not logits:
            drawn = _by_kernel(scores, state) if fuses(logits) else self._by_torch(scores, requests)
        wanted = [request.sampling.logprobs for request in requests] if needs_processing else ()
        return AsyncTokens(drawn, wanted, self._logprobs(logits, drawn, wanted))

    def _own_state(self, requests: Sequence[Request]) -> BatchState:
        """The state of a batch that comes once: a row for each request, and all of their tokens known to the host."""
        rows = np.arange(len(requests), dtype=np.int32)
        last = np.array([request.token_ids[-1] for request in requests], dtype=np.int32)
        lengths = np.array([len(request.token_ids) for request in requests], dtype=np.int32)
        last_tokens, on_device, lens, params = map(self._to_device, (last, rows, lengths, request_params(requests)))
        counts = TokenCounts(len(requests), len(self._token_hash), self.device)
        return BatchState(SampledRows(last_tokens, on_device, lens, rows), params, counts)

    def _by_torch(self, scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        scores = scores.float()
        random = [row for row, request in enumerate(requests) if not request.sampling.greedy]
        if len(random) == len(requests):
            best, tokens = self._draw(scores, requests)
        else:
            best, tokens = scores.max(dim=-1)
            if random:
                rows = self._to_device(random)
                drawn = self._draw(scores[rows], [requests[row] for row in random])
                best[rows], tokens[rows] = drawn
        return torch.where(best.isfinite(), tokens, -1)

    def _mask_stops(self, scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Until min_tokens are generated, no token that would end the request can win."""
        pairs = [
            (row, token)
            for row, request in enumerate(requests)
            if request.num_generated < request.sampling.min_tokens
            for token in request.stop_ids
            if token < scores.shape[1]
        ]
        if not pairs:
            return scores
        where = self._to_device(pairs)
        return scores.float().index_put((where[:, 0], where[:, 1]), torch.full((), -_INFINITY, device=self.device))

    def _draw(self, scores: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gumbel-max: the argmax of log probability plus Gumbel noise is a sample (Gumbel 1954; no softmax needed)."""
        settings = [request.sampling for request in requests]
        (temperature,) = self._columns([(max(s.temperature, LOWEST_TEMPERATURE),) for s in settings])
        scores = scores * temperature.reciprocal()
        cutoff = self._cutoff(scores, settings)
        if cutoff is not None:
            scores.masked_fill_(scores < cutoff, -_INFINITY)
        return scores.add_(self._noise(requests)).max(dim=-1)

    def _cutoff(self, scores: torch.Tensor, settings: Sequence[SamplingParams]) -> torch.Tensor | None:
        """The smallest score that top_k, top_p and min_p leave in each row, [m, 1]; None where none of them is on."""
        vocab = scores.shape[1]
        rows = [row for row, s in enumerate(settings) if 0 < s.top_k < vocab or s.top_p < 1]
        cutoff = None
        if any(s.min_p > 0 for s in settings):
            (min_p,) = self._columns([(s.min_p,) for s in settings])
            cutoff = scores.amax(dim=-1, keepdim=True) + min_p.log()
        if not rows:
            return cutoff
        limits = [min(settings[row].top_k, vocab) if settings[row].top_k > 0 else vocab for row in rows]
        some, width = scores[self._to_device(rows)], max(limits)
        ordered = some.topk(width).values if width < vocab else some.sort(dim=-1, descending=True).values
        kept = self._to_device(limits)[:, None]
        if any(settings[row].top_p < 1 for row in rows):
            (top_p,) = self._columns([(settings[row].top_p,) for row in rows])
            inside = torch.arange(width, device=self.device) < kept
            probs = ordered.masked_fill(~inside, -_INFINITY).softmax(dim=-1)
            before = probs.cumsum(dim=-1) - probs
            kept = ((before < top_p) & inside).sum(dim=-1, keepdim=True).clamp_(min=1)
        smallest = ordered.gather(1, kept - 1)
        if cutoff is None:
            cutoff = torch.full_like(scores[:, :1], -_INFINITY)
        where = self._to_device(rows)
        return cutoff.index_copy(0, where, torch.maximum(cutoff[where], smallest))

    def _noise(self, requests: Sequence[Request]) -> torch.Tensor:
        """Gumbel noise [m, vocab_size], from 31 bits that hash each request's seed, position and token id."""
        bits = _mix(self._token_hash ^ self._to_device(_row_keys(requests))[:, None]).bitwise_and_(0x7FFFFFFF)
        uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int | None]) -> list[torch.Tensor]:
        """Of the m rows that report: log probabilities of their tokens [m, 1], and the best of each [m, k] with ids."""
        rows = [row for row, count in enumerate(wanted) if count is not None]
        if not rows:
            return []
        where = self._to_device(rows)
        logprobs = logits[where].float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[where, None].clamp(min=0).long())
        width = min(max(wanted[row] or 0 for row in rows), logits.shape[1])
        return [own, *logprobs.topk(width)]

    def _columns(self, rows: Sequence[tuple[float, ...]]) -> tuple[torch.Tensor, ...]:
        """Per-row numbers as float32 columns [len(rows), 1]."""
        return self._to_device(np.array(rows, dtype=np.float32)).split(1, dim=1)

    def _to_device(self, values: Sequence[object] | np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.asarray(values))
        if self.device.type == "cuda":
            host = host.pin_memory()  # from pageable memory a transfer waits for the device
        return host.to(self.device, non_blocking=True)


def _by_kernel(scores: torch.Tensor, state: BatchState) -> torch.Tensor:
    from .kernels.draw import draw

    tokens = torch.empty(len(scores), dtype=torch.int32, device=scores.device)
    draw(scores, state.params, state.rows.state_rows, state.rows.lengths, tokens)
    return tokens


def _row_keys(requests: Sequence[Request]) -> np.ndarray:
    """int32 per request: its seed and the position of its next token, mixed."""
    seeds = np.array([request.seed & 0xFFFFFFFFFFFFFFFF for request in requests], dtype=np.uint64)
    lengths = np.array([len(request.token_ids) for request in requests], dtype=np.uint64)
    return (next_state(next_state(seeds) ^ lengths) >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()  # the next step may write to its buffer before this one is read
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int32, each output bit depending on each input bit. Constants: C. Wellons, hash prospector."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x735A2D97
    return x ^ (x >> 15 & 0x1FFFF)
