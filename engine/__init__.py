"""pagedattn.engine: a small engine that generates text from a model folder through the paged cache."""

from .async_llm import AsyncLLM, TokenStream
from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput, TokenDelta
from .sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "TokenDelta",
    "TokenStream",
]
