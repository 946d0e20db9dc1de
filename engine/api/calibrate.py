"""calibrate: the largest keys and values that a model computes for a text, for the scales of fp8 caches."""

from __future__ import annotations

import os

from pagedattn import KVScales, __version__
from pagedattn.errors import InvalidInputError, PagedAttnError, UnsupportedError

from ..models.folder import ModelFolder
from ..runner_protocol import Observed
from ..sampling_params import SamplingParams
from .llm import LLM


def calibrate(
    model: str | os.PathLike[str],
    text: str,
    *,
    max_tokens: int = 8192,
    dtype: str = "auto",
    device: str | None = None,
) -> KVScales:
    """Run a model folder over a text, whose cache keeps keys and values as they are, and keep their maxima.

    Args:
        text: like what will be served; cut into prompts as long as the model takes.
        max_tokens: tokens of the text to use at most.
        dtype, device: as `EngineConfig`.

    Returns:
        What `LLM(kv_scales=)` takes once it is saved, and `hf.enable(kv_scales=)` as it is.

    Raises:
        InvalidInputError: no text, or keys or values that are not finite.
        UnsupportedError: a folder without a tokenizer; else as `LLM`.
    """
    from ..models.loader import weight_files
    from ..worker.kv_maxima import KVMaxima

    if type(max_tokens) is not int or max_tokens < 1:
        raise InvalidInputError("max_tokens", "a positive integer", repr(max_tokens))
    # An observer sees eager steps only, and a cached prefix is in none.
    options = {"enforce_eager": True, "enable_prefix_caching": False, "overlap": False, "log_interval": None}
    llm = LLM(model, dtype=dtype, device=device, latent=False, **options)  # an fp8 cache has keys and values
    tokenizer, runner = llm.runner.tokenizer, llm.runner
    if tokenizer is None or not isinstance(runner, Observed):
        raise UnsupportedError("calibrate needs a tokenizer in the model folder; it has none")
    tokens = tokenizer.encode(text)[:max_tokens]
    if not tokens:
        raise InvalidInputError("text", "at least one token long", repr(text[:40]))
    maxima = runner.observer = KVMaxima()
    size = runner.max_model_len - 1
    prompts = [tokens[first : first + size] for first in range(0, len(tokens), size)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    layers = maxima.layers()
    failed = next((one for one in outputs if one.finish_reason == "error"), None)
    if failed is not None:
        raise PagedAttnError(f"the model could not read the text: {failed.outputs[0].explanation}")
    return KVScales.measured(layers, len(tokens), weight_files(ModelFolder(model)), __version__)
