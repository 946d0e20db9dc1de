"""How a cache stores keys and values."""
