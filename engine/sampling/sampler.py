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
from ..scheduler_output import SampledToken
from .metadata import NO_LOGPROBS, SamplingMetadata, SamplingMetadataBuilder
from .packed_params import next_state, request_params
from .rows import SampledRows
from .token_counts import TokenCounts

_INFINITY = float("inf")
_GOLDEN = 0x9E3779B1 - (1 << 32)  # 2**32 over the golden ratio: spreads token ids over int32


class AsyncTokens:
    """Tokens that the device is drawing, on their way to the host."""

    def __init__(self, tokens: torch.Tensor, wanted: Sequence[int], logprobs: Sequence[torch.Tensor]) -> None:
        """tokens [n], -1 where there is none.

        `wanted` has how many best tokens each row reports (or NO_LOGPROBS), or is empty. `logprobs` of the m rows that
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
            reporting = [row for row, count in enumerate(self._wanted) if count != NO_LOGPROBS]
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
        rows = np.arange(len(requests), dtype=np.int32)
        sampling = SamplingMetadataBuilder(len(requests)).build(requests, rows)
        return self.sample_async(logits, self._own_state(requests, rows), sampling).read()

    def sample_async(
        self,
        logits: torch.Tensor,
        state: BatchState,
        sampling: SamplingMetadata | None,
        *,
        drawn: torch.Tensor | None = None,
    ) -> AsyncTokens:
        """A token for each row of logits [n, vocab_size], waiting for nothing.

        Args:
            state: what the device has of the requests; the last token of each may be known to it alone.
            sampling: None where no row has penalties, min_tokens or logprobs.
            drawn: [n], what a graph drew from `logits` already.
        """
        scores = logits
        if sampling is not None:
            scores = self._mask(state.counts.penalize(logits, sampling, state.rows, state.params), sampling.masked)
        if drawn is None or scores is not logits:
            drawn = _by_kernel(scores, state) if fuses(logits) else self._by_torch(scores, state)
        wanted = () if sampling is None else sampling.logprobs.tolist()
        return AsyncTokens(drawn, wanted, self._logprobs(logits, drawn, wanted))

    def _own_state(self, requests: Sequence[Request], rows: np.ndarray) -> BatchState:
        """The state of a batch that comes once: all tokens of its requests are known to the host."""
        last = np.array([request.token_ids[-1] for request in requests], dtype=np.int32)
        lengths = np.array([len(request.token_ids) for request in requests], dtype=np.int32)
        last_tokens, on_device, lens, params = map(self._to_device, (last, rows, lengths, request_params(requests)))
        counts = TokenCounts(len(requests), len(self._token_hash), self.device)
        return BatchState(SampledRows(last_tokens, on_device, lens), params, counts)

    def _by_torch(self, scores: torch.Tensor, state: BatchState) -> torch.Tensor:
        scores, lengths = scores.float(), state.rows.lengths
        params = state.params.index_select(0, state.rows.state_rows)
        random = (params[:, 0].view(torch.float32) > 0).nonzero()[:, 0]
        if len(random) == len(scores):
            best, tokens = self._draw(scores, params, lengths)
        else:
            best, tokens = scores.max(dim=-1)
            if len(random):
                best[random], tokens[random] = self._draw(scores[random], params[random], lengths[random])
        return torch.where(best.isfinite(), tokens, -1)

    def _mask(self, scores: torch.Tensor, masked: np.ndarray) -> torch.Tensor:
        """Tokens that may not come yet cannot win."""
        masked = masked[masked[:, 1] < scores.shape[1]]
        if not len(masked):
            return scores
        where = self._to_device(masked).long()
        return scores.float().index_put((where[:, 0], where[:, 1]), torch.full((), -_INFINITY, device=self.device))

    def _draw(
        self, scores: torch.Tensor, params: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gumbel-max: the argmax of log probability plus Gumbel noise is a sample (Gumbel 1954; no softmax needed)."""
        scores = scores * params[:, :1].view(torch.float32).reciprocal()
        cutoff = _cutoff(scores, params)
        if cutoff is not None:
            scores.masked_fill_(scores < cutoff, -_INFINITY)
        return scores.add_(self._noise(params, lengths)).max(dim=-1)

    def _noise(self, params: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Gumbel noise [m, vocab_size], from 31 bits that hash each row's seed, position and token id."""
        seeds = params[:, 4:6].cpu().numpy().copy().view(np.uint64)[:, 0]
        mixed = next_state(seeds ^ lengths.cpu().numpy().astype(np.uint64))
        keys = (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)
        bits = _mix(self._token_hash ^ self._to_device(keys)[:, None]).bitwise_and_(0x7FFFFFFF)
        uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int]) -> list[torch.Tensor]:
        """Of the m rows that report: log probabilities of their tokens [m, 1], and the best of each [m, k] with ids."""
        rows = [row for row, count in enumerate(wanted) if count != NO_LOGPROBS]
        if not rows:
            return []
        where = self._to_device(rows)
        logprobs = logits[where].float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[where, None].clamp(min=0).long())
        width = min(max(wanted), logits.shape[1])
        return [own, *logprobs.topk(width)]

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


def _cutoff(scores: torch.Tensor, params: torch.Tensor) -> torch.Tensor | None:
    """The smallest score that top_k, top_p and min_p leave in each row, [m, 1]; None where none of them is on."""
    vocab = scores.shape[1]
    _, top_p, min_p = params[:, :3].view(torch.float32).split(1, dim=1)
    top_k = params[:, 3:4].long()
    kept = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    cutoff = torch.full_like(scores[:, :1], -_INFINITY)
    if min_p.any():
        cutoff = scores.amax(dim=-1, keepdim=True) + min_p.log()
    rows = ((kept < vocab) | (top_p < 1)).nonzero()[:, 0]
    if not len(rows):
        return cutoff if min_p.any() else None
    some, kept, top_p = scores[rows], kept[rows], top_p[rows]
    width = int(kept.max())
    ordered = some.topk(width).values if width < vocab else some.sort(dim=-1, descending=True).values
    if (top_p < 1).any():
        inside = torch.arange(width, device=scores.device) < kept
        probs = ordered.masked_fill(~inside, -_INFINITY).softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        kept = ((before < top_p) & inside).sum(dim=-1, keepdim=True).clamp_(min=1)
    smallest = ordered.gather(1, kept - 1)
    return cutoff.index_copy(0, rows, torch.maximum(cutoff[rows], smallest))


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
