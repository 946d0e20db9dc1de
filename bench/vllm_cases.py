"""What bench.vllm_compare runs: suites of cases, and which of them a number of GPUs allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from .vllm_models import FETCHED


@dataclass(frozen=True)
class Case:
    """Options of `LLM` and variables under which both backends run a model.

    requests: of random tokens, a workload each; none: what the model was trained on.
    ranks: data parallel processes that share the prompts out; a server has as many behind one address.
    served: by `vllm serve`, over the library's backend alone. one_gpu: each rank of it is a node of its own, all of
        them on one GPU, which models without experts allow: their ranks exchange nothing.
    peer: vLLM's own backend.
    """

    suite: str
    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    requests: tuple[int, ...] = ()
    ranks: int = 1
    served: bool = False
    one_gpu: bool = False
    peer: str = "FLASH_ATTN"

    @property
    def connector(self) -> str | None:
        """The KV connector, through which a second generation must load what the first one stored."""
        return self.options.get("kv_transfer_config", {}).get("kv_connector")

    @property
    def over_ray(self) -> bool:
        """Its workers are Ray's, which must be installed."""
        return self.options.get("distributed_executor_backend") == "ray"

    @property
    def gpus(self) -> int:
        """GPUs that it needs."""
        sizes = (self.options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        return (1 if self.one_gpu else self.ranks) * max(sizes)


STORE = "{store}"  # in options: an empty folder of the engine's own


def _connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}}


_EAGER = {"enforce_eager": True}
_V1, _V2 = ({"VLLM_USE_V2_MODEL_RUNNER": number} for number in "01")  # left alone, vLLM looks at the model
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
_TIGHT = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 140, "max_num_seqs": 32}
TOKENS = [
    *(
        Case("tokens", f"{model}, {mode}, {runner}", model, options, variables)
        for model in ("tiny-qwen3", "tiny-gemma2", "tiny-gpt-oss")
        for mode, options in (("eager", _EAGER), ("graphs", {}))
        for runner, variables in (("first runner", _V1), ("second runner", _V2))
    ),
    Case("tokens", "blocks of 64, first runner", "tiny-qwen3", {"block_size": 64}, _V1),
    Case("tokens", "blocks of 64, second runner", "tiny-qwen3", {"block_size": 64}, _V2),
    Case("tokens", "HND", "tiny-qwen3", {}, {"VLLM_KV_CACHE_LAYOUT": "HND"}),
    Case("tokens", "fp8 cache", "tiny-qwen3", {"kv_cache_dtype": "fp8"}),
    Case("tokens", "n-gram speculation", "tiny-qwen3", {"speculative_config": _NGRAM}),
    Case("tokens", "chunked prefill, preemption", "tiny-qwen3", _TIGHT),
    Case("tokens", "prefix cache", "tiny-qwen3", {"enable_prefix_caching": True}),
    Case("tokens", "batch invariance", "tiny-qwen3", {}, {"VLLM_BATCH_INVARIANT": "1"}),
    Case("tokens", "a real model, graphs", FETCHED),
    Case("tokens", "a real model, eager", FETCHED, _EAGER),
    Case("tokens", "a real model, float16", FETCHED, {"dtype": "float16"}),
]
# To memory of the host: with the first runner the caches of all layers lie in one, with blocks outermost.
_OFFLOADING = _connector("OffloadingConnector", cpu_bytes_to_use=1 << 28)
# To files. It stores a prompt as if its first step had all of it; and it loads nothing before a full graph of the
# second runner, which replays outside the context that it looks for.
_FILES = _connector("ExampleConnector", shared_storage_path=STORE) | {"max_num_batched_tokens": 8192}
CONNECTORS = [
    Case("connectors", "host memory, first runner", "tiny-qwen3", _OFFLOADING, _V1),
    Case("connectors", "host memory, second runner", "tiny-qwen3", _OFFLOADING, _V2),
    Case("connectors", "host memory, fp8 cache", "tiny-qwen3", _OFFLOADING | {"kv_cache_dtype": "fp8"}),
    Case("connectors", "files, first runner", "tiny-qwen3", _FILES, _V1),
    Case("connectors", "files, second runner", "tiny-qwen3", _FILES | _EAGER, _V2),
]
_PAGES = {"block_size": 64}  # FlashMLA has no other
LATENT = [
    Case("latent", "eager, blocks of 64", "tiny-deepseek", _EAGER | _PAGES, _V2, peer="FLASH_ATTN_MLA"),
    Case("latent", "graphs, blocks of 64, first runner", "tiny-deepseek", _PAGES, _V1, peer="FLASH_ATTN_MLA"),
    Case("latent", "graphs, blocks of 64, second runner", "tiny-deepseek", _PAGES, _V2, peer="FLASHMLA"),
    Case("latent", "graphs, blocks of 16", "tiny-deepseek", {}, _V2, peer="TRITON_MLA"),
    Case("latent", "n-gram speculation", "tiny-deepseek", _PAGES | {"speculative_config": _NGRAM}, peer="FLASHMLA"),
]
SERVER = [
    Case("server", "vllm serve", "tiny-qwen3", served=True),
    Case("server", "data parallel, two nodes on one GPU", "tiny-qwen3", ranks=2, served=True, one_gpu=True),
]
_RAY = {"distributed_executor_backend": "ray"}
# Each engine starts a Ray of its own, in place of joining its peer's; a variable of ours goes to the workers.
_OWN_RAY = {"RAY_ADDRESS": "local", "PAGEDATTN_BACKEND": "TRITON"}
RAY = [
    Case("ray", "eager", "tiny-qwen3", _EAGER | _RAY, _OWN_RAY),
    Case("ray", "graphs", "tiny-qwen3", _RAY, _OWN_RAY),
]
_LONG = {"load_format": "dummy", "max_model_len": 8192, "skip_tokenizer_init": True}
SPEED = [
    Case("speed", "one GPU", "qwen3-0.6b", _LONG, requests=(256, 1)),
    Case("speed", "one GPU, fp8", "qwen3-0.6b", _LONG | {"kv_cache_dtype": "fp8"}, requests=(256, 1)),
]
_TP, _PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
TWO_GPUS = [
    Case("two-gpus", "tensor parallel", "tiny-qwen3", _TP),
    Case("two-gpus", "pipeline parallel", "tiny-qwen3", _PP),
    Case("two-gpus", "tensor parallel, Ray", "tiny-qwen3", _TP | _RAY, _OWN_RAY),
    Case("two-gpus", "tensor parallel, connector", "tiny-qwen3", _OFFLOADING | _TP),
    # `LLM` takes a process for each rank, and serves models with experts alone so: ranks of others share nothing.
    Case("two-gpus", "data parallel, eager", "tiny-gpt-oss", _EAGER, ranks=2),
    Case("two-gpus", "data parallel, graphs", "tiny-gpt-oss", ranks=2),
    Case("two-gpus", "data parallel, vllm serve", "tiny-qwen3", ranks=2, served=True),
    Case("two-gpus", "tensor parallel, random weights", "llama-8b", _LONG | _TP, requests=(256, 1)),
]
CASES = [*TOKENS, *LATENT, *CONNECTORS, *RAY, *SERVER, *SPEED, *TWO_GPUS]
SUITES = [*dict.fromkeys(case.suite for case in CASES)]
ALL = "all"  # suites that the GPUs allow


def chosen(suites: Sequence[str], words: Sequence[str], gpus: int) -> list[Case]:
    """Cases of the suites, whose name holds one of the words, if there are any; of `ALL` those that are possible here.

    Raises:
        ValueError: a suite by name needs more GPUs than there are.
    """
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    named = [case for case in cases if case.suite in suites]
    for case in named:
        if case.gpus > gpus:
            raise ValueError(f"--suite {case.suite} must need at most {gpus} GPUs, the number here, got {case.gpus}")
    ray = find_spec("ray") is not None
    possible = [case for case in cases if case.gpus <= gpus and (ray or not case.over_ray)]
    return [case for case in cases if case in named or (ALL in suites and case in possible)]
