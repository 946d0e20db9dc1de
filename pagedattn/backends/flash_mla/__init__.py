"""The backend FLASH_MLA: FlashMLA's decode kernel over latent rows."""

from .backend import FlashMLABackend

__all__ = ["FlashMLABackend"]
