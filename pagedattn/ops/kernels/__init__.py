"""Triton kernels and their launchers, imported on first use."""
