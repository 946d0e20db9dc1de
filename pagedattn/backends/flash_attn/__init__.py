"""The backend FLASH_ATTN: FlashAttention 2 and 3."""

from .backend import FlashAttnBackend

__all__ = ["FlashAttnBackend"]
