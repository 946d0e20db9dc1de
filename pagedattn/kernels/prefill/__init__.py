"""Attention of many new tokens per sequence, on any GPU."""
