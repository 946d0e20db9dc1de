"""Attention of many new tokens per sequence on Hopper GPUs (sm_90)."""
