"""pagedattn.engine: a small engine that generates text from a model folder through the paged cache.

Its scheduler's own nouns (`Request`, `SchedulerOutput`, `KVGroup`, `KVCacheManager`, ...) stand here too, for engines
and tests that use them without an LLM.
"""

from .api.async_llm import AsyncLLM, TokenStream
from .api.calibrate import calibrate
from .api.llm import LLM
from .api.outputs import CompletionOutput, RequestOutput, TokenDelta
from .config import EngineConfig
from .kv.manager import KVCacheManager
from .kv_group import KVGroup
from .request import Request, RequestStatus
from .sampling_params import SamplingParams
from .scheduler_output import SampledToken, ScheduledRequest, SchedulerOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "KVCacheManager",
    "KVGroup",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "SampledToken",
    "SamplingParams",
    "ScheduledRequest",
    "SchedulerOutput",
    "TokenDelta",
    "TokenStream",
    "calibrate",
]
