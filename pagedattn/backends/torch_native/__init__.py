"""The backend TORCH: attention in torch, for any device."""

from .backend import TorchBackend

__all__ = ["TorchBackend"]
