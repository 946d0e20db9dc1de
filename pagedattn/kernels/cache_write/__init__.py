"""Writes of new keys and values into the cache."""
