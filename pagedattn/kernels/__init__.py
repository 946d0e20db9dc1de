"""Kernels by family: each folder holds one's plan (pure), kernels and launch; what several share lies here."""
