"""The layout that vLLM 0.24 asks for."""

LAYOUT = "NHD"


def get_kv_cache_layout() -> str:
    return LAYOUT
