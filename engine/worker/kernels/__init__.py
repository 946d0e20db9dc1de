"""Triton kernels of the worker, imported on first use only."""
