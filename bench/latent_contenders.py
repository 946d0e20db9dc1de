"""What `bench.latent_engine` measures: this library's engine over each kind of cache, and vLLM's by its backends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from pagedattn import MLASpec
from pagedattn.engine import LLM, SamplingParams

from .engine_bench import parts
from .engine_cases import EngineCase
from .ratios import Row
from .vllm_cases import Case
from .vllm_process import Engines

OWN = {"latent": True, "expanded": False}
VLLM = {f"vllm {backend}": backend for backend in ("CUSTOM", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")}
LENGTHS = (2048, 8192, 32768)


class Contender(Protocol):
    """An engine that generates greedily. `facts`: of its cache and its start."""

    @property
    def facts(self) -> Row: ...

    def ask(self, prompts: Sequence[list[int]], max_tokens: Sequence[int], logprobs: int | None = None) -> Row:
        """`tokens` of each prompt, `seconds` for all, and `logprobs` of the tokens where asked for.

        Raises:
            RuntimeError: the engine ended.
        """
        ...

    def profile(self) -> Row:
        """Where a step's time goes, as far as that can be seen."""
        ...

    def close(self) -> None: ...


class OwnEngine:
    """This library's engine, in this process."""

    def __init__(self, case: EngineCase, folder: Path, latent: bool) -> None:
        start = time.perf_counter()
        self._case = case
        self._llm = LLM(folder, load_format="dummy", latent=latent, log_interval=None, **case.options)
        self._start_up = time.perf_counter() - start
        if any(isinstance(spec, MLASpec) != latent for spec in self._llm.runner.cache.groups[0].specs):
            kept = "latent rows" if latent else "keys and values"
            raise RuntimeError(f"the engine must keep {kept}; a warning of pagedattn says why it does not")

    @property
    def facts(self) -> Row:
        """Bytes of a token in all layers, and how many sequences of some lengths the cache holds at a time."""
        runner = self._llm.runner
        blocks, size = self._llm.stats().num_blocks, runner.kv_groups[0].block_size
        graphs = runner._graphs
        return {
            "start_up_s": round(self._start_up, 1),
            "parameters": runner.model.num_parameters,
            "cache_bytes_per_token": runner.cache.nbytes / runner.num_kv_blocks / size,
            "cache_bytes": runner.cache.nbytes,
            "cache_tokens": blocks * size,
            "sequences_that_fit": {str(length): blocks // -(-length // size) for length in LENGTHS},
            "captured_sizes": 0 if graphs is None else len(graphs._steps),
            "attention": runner.describe(),
        }

    def ask(self, prompts: Sequence[list[int]], max_tokens: Sequence[int], logprobs: int | None = None) -> Row:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, logprobs=logprobs) for count in max_tokens
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate([*prompts], params, progress=False)
        seconds, found = time.perf_counter() - begin, [output.outputs[0] for output in outputs]
        out: Row = {"seconds": seconds, "tokens": [[*one.token_ids] for one in found]}
        return out if logprobs is None else out | {"logprobs": [[*(one.logprobs or ())] for one in found]}

    def profile(self) -> Row:
        return parts(self._llm, self._case)

    def close(self) -> None:
        self._llm.close()


class VLLMEngine:
    """vLLM's engine over one of its attention backends, in a process of its own.

    Its random weights are uniform within 0.001, so that all tokens are about as likely: they say nothing about tokens.
    """

    def __init__(self, case: EngineCase, folder: Path, backend: str) -> None:
        start = time.perf_counter()
        total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 1 << 30
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "block_size": 64, "enable_prefix_caching": True}
        options |= {name: case.options[name] for name in ("max_model_len", "max_num_seqs") if name in case.options}
        asked = Case("latent-engine", backend, folder.name, options, peer=backend)
        self._cache = min(40 << 30, int(0.3 * total))
        self._engines = Engines(asked, backend, folder.parent, self._cache)
        try:
            self._engines.wait_until_ready()
        except RuntimeError:
            self.close()
            raise
        self._start_up = time.perf_counter() - start

    @property
    def facts(self) -> Row:
        return {"start_up_s": round(self._start_up, 1), "cache_bytes": self._cache}

    def ask(self, prompts: Sequence[list[int]], max_tokens: Sequence[int], logprobs: int | None = None) -> Row:
        return self._engines.ask(prompts, max_tokens, logprobs=logprobs)

    def profile(self) -> Row:
        return {}

    def close(self) -> None:
        with suppress(OSError):  # it may have ended
            self._engines.close()


def start(name: str, case: EngineCase, folder: Path) -> Contender:
    """Start a contender on the model in `folder`.

    Raises:
        PagedAttnError, RuntimeError: it does not start.
    """
    return OwnEngine(case, folder, OWN[name]) if name in OWN else VLLMEngine(case, folder, VLLM[name])


def versions(name: str) -> dict[str, Any]:
    """Of the packages that run a contender's model."""
    from importlib.metadata import version

    return {package: version(package) for package in ("torch", "transformers" if name in OWN else "vllm")}
