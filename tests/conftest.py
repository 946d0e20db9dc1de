"""Triton runs interpreted where there is no GPU; that must be decided before its kernels are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
