"""Triton kernels of the sampler, imported on first use only."""
