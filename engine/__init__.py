"""pagedattn.engine: a small engine that generates text from a model folder through the paged cache."""

from .config import EngineConfig
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput, TokenDelta
from .sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "TokenDelta"]
