"""Sampling parameters of requests as rows of int32, which is how they lie on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..request import Request

# int32 words: the bits of temperature, top_p and min_p; top_k; the seed's state, low word first; the bits of
# repetition, presence and frequency penalty; prompt_len.
PARAMS = 10
LOWEST_TEMPERATURE = 1e-5


def _params(request: Request) -> np.ndarray:
    one = request.sampling
    out = np.empty(PARAMS, dtype=np.int32)
    temperature = 0.0 if one.greedy else max(one.temperature, LOWEST_TEMPERATURE)
    floats = out.view(np.float32)
    floats[:3] = temperature, one.top_p, one.min_p
    floats[6:9] = one.repetition_penalty, one.presence_penalty, one.frequency_penalty
    out[3], out[9] = one.top_k, request.prompt_len
    out[4:6] = next_state(np.array([request.seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)).view(np.int32)
    return out


def next_state(state: np.ndarray) -> np.ndarray:
    """A step of splitmix64 (Steele et al. 2014), uint64 to uint64."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def request_params(requests: Sequence[Request]) -> np.ndarray:
    """Sampling parameters [n, PARAMS] int32 of requests."""
    return np.array([_params(request) for request in requests], dtype=np.int32).reshape(-1, PARAMS)
