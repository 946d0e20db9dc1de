"""Variables that the backend reads."""

VLLM_BATCH_INVARIANT = False
