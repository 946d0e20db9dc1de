"""The backend FLASHINFER: FlashInfer's wrappers."""

from .backend import FlashInferBackend

__all__ = ["FlashInferBackend"]
