"""What a user calls: LLM, AsyncLLM, and the engine behind both."""
