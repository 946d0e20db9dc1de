"""Triton kernels of the decoder, imported on first use only."""
