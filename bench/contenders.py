"""Who is compared: each backend of the library, and each FlashAttention version, with the block size it wants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pagedattn.backends.registry import get_backend


class Contender(NamedTuple):
    """One row of a comparison. `version` is what PAGEDATTN_FLASH_ATTN says while its layers are built and run."""

    name: str
    backend: str
    block_size: int = 16
    version: str = ""

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """PAGEDATTN_FLASH_ATTN as this contender needs it."""
        before = os.environ.get("PAGEDATTN_FLASH_ATTN", "")
        os.environ["PAGEDATTN_FLASH_ATTN"] = self.version
        try:
            yield
        finally:
            os.environ["PAGEDATTN_FLASH_ATTN"] = before

    def available(self) -> bool:
        """Whether it can run here."""
        with self.chosen():
            return get_backend(self.backend).availability().ok


ALL = (
    Contender("TRITON", "TRITON"),
    Contender("FLASH_ATTN (FA3)", "FLASH_ATTN", version="3"),
    Contender("FLASH_ATTN (FA2)", "FLASH_ATTN", 256, "2"),
    Contender("FLASHINFER", "FLASHINFER"),
    Contender("TORCH", "TORCH"),
)


def contenders(names: str | None) -> list[Contender]:
    """Those that a comma-separated list names, else all that can run here."""
    if names:
        wanted = names.split(",")
        return [one for one in ALL if one.backend in wanted or one.name in wanted]
    return [one for one in ALL if one.available() and (torch.cuda.is_available() or one.backend == "TORCH")]
