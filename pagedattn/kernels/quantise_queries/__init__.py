"""Queries as e4m3 with a scale of each sequence and KV head."""
