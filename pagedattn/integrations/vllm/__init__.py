"""vLLM runs on these kernels: an attention backend that vLLM finds through its entry point `vllm.general_plugins`.

`LLM(model, attention_backend="CUSTOM")`, or `vllm serve MODEL --attention-backend CUSTOM`. See docs/vllm.md.
"""

from .plugin import register

__all__ = ["register"]
