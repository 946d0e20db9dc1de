"""Triton kernels of the engine, imported on first use only."""
