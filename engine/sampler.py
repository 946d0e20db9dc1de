"""Sampler: one token per row of logits, on the device, by each request's own parameters.

Randomness is a counter-based hash of (seed, position, token id), so a row's token depends on its logits, its seed and
its position, and never on the batch around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .request import Request
from .sampling_params import SamplingParams
from .step import SampledToken

_LOWEST_TEMPERATURE = 1e-5
_INFINITY = float("inf")


class Sampler:
    """Samples for a model of `vocab_size` tokens.

    Order of operations: min_tokens, penalties, temperature, top_k, top_p of what top_k left, min_p. Tokens as likely as
    the last one kept are kept too. Log probabilities are those of the model, before all of these.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._token_hash = _mix(torch.arange(vocab_size, dtype=torch.int32, device=device))

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """logits float32 [n, vocab_size], row i for the next token of `requests[i]`, to n tokens.

        A row without a finite maximum (NaN, +Inf, or every token masked) gives token -1 with `error` set.
        """
        scores = self._mask_stops(self._penalize(logits, requests), requests)
        random = [row for row, request in enumerate(requests) if not request.sampling.greedy]
        if len(random) == len(requests):
            best, tokens = self._draw(scores, requests)
        else:
            best, tokens = scores.max(dim=-1)
            if random:
                rows = self._to_device(random)
                drawn = self._draw(scores[rows], [requests[row] for row in random])
                best[rows], tokens[rows] = drawn
        tokens = torch.where(best.isfinite(), tokens, -1)
        return self._report(logits, tokens, [request.sampling.logprobs for request in requests])

    def _penalize(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Repetition penalty over prompt and output, presence and frequency penalties over the output."""
        rows = [row for row, request in enumerate(requests) if _has_penalty(request.sampling)]
        if not rows:
            return logits
        chosen = [requests[row] for row in rows]
        tokens = [np.array(request.token_ids, dtype=np.int64) for request in chosen]
        lengths = [len(ids) for ids in tokens]
        flat = np.concatenate(tokens) + np.repeat(np.arange(len(rows)) * logits.shape[1], lengths)
        generated = np.concatenate([np.arange(len(request.token_ids)) >= request.prompt_len for request in chosen])
        some = logits[self._to_device(rows)]
        seen = torch.zeros(some.numel(), dtype=torch.bool, device=self.device)
        seen[self._to_device(flat)] = True
        counts = torch.zeros(some.numel(), device=self.device)
        outputs = self._to_device(flat[generated])
        counts.index_put_((outputs,), torch.ones_like(outputs, dtype=counts.dtype), accumulate=True)
        seen, counts = seen.view_as(some), counts.view_as(some)
        settings = [request.sampling for request in chosen]
        repetition, presence, frequency = self._columns(
            [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in settings]
        )
        some = torch.where(seen, torch.where(some > 0, some / repetition, some * repetition), some)
        some -= frequency * counts + presence * (counts > 0)
        return logits.index_copy(0, self._to_device(rows), some)

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
        return scores.index_put((where[:, 0], where[:, 1]), scores.new_tensor(-_INFINITY))

    def _draw(self, scores: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gumbel-max: the argmax of log probability plus Gumbel noise is a sample (Gumbel 1954; no softmax needed)."""
        settings = [request.sampling for request in requests]
        (temperature,) = self._columns([(max(s.temperature, _LOWEST_TEMPERATURE),) for s in settings])
        scores = scores / temperature
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

    def _report(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int | None]) -> list[SampledToken]:
        rows = [row for row, count in enumerate(wanted) if count is not None]
        out = [
            SampledToken(token) if token >= 0 else SampledToken(-1, error="no token has a finite logit")
            for token in tokens.tolist()
        ]
        if not rows:
            return out
        where = self._to_device(rows)
        logprobs = logits[where].log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[where, None].clamp(min=0)).flatten().tolist()
        width = min(max(wanted[row] or 0 for row in rows), logits.shape[1])
        values, ids = (part.tolist() for part in logprobs.topk(width))
        for i, row in enumerate(rows):
            if out[row].error is None:
                top = dict(zip(ids[i][: wanted[row]], values[i], strict=False))
                out[row] = SampledToken(out[row].token_id, own[i], top)
        return out

    def _columns(self, rows: Sequence[tuple[float, ...]]) -> tuple[torch.Tensor, ...]:
        """Per-row numbers as float32 columns [len(rows), 1]."""
        return self._to_device(np.array(rows, dtype=np.float32)).split(1, dim=1)

    def _to_device(self, values: Sequence[object] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(self.device, non_blocking=True)


def _has_penalty(sampling: SamplingParams) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


def _row_keys(requests: Sequence[Request]) -> np.ndarray:
    """int32 per request: its seed and the position of its next token, mixed (splitmix64, Steele et al. 2014)."""
    state = np.array([request.seed & 0xFFFFFFFFFFFFFFFF for request in requests], dtype=np.uint64)
    for word in (np.zeros_like(state), np.array([len(request.token_ids) for request in requests], dtype=np.uint64)):
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int32, each output bit depending on each input bit. Constants: C. Wellons, hash prospector."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x735A2D97
    return x ^ (x >> 15 & 0x1FFFF)
