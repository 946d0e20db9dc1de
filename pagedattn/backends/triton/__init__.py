"""The backend TRITON: our own Triton and Gluon kernels."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
