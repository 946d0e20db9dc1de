"""The kernel libraries that a GPU machine may have, each as one name; and the cases they can be asked."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagedattn.backends.base import AttentionBackend
from pagedattn.backends.registry import get_backend
from pagedattn.testing.case import Case


class Peer(NamedTuple):
    """A backend, for FLASH_ATTN the version that PAGEDATTN_FLASH_ATTN names, and what its caches are of."""

    backend: str
    version: str = ""
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        name = f"FA{self.version}" if self.version else self.backend
        return name if self.kv_cache_dtype == "auto" else f"{name}, {self.kv_cache_dtype}"

    def load(self) -> type[AttentionBackend]:
        """The backend class; the caller has set PAGEDATTN_FLASH_ATTN."""
        return get_backend(self.backend)

    def case(self, case: Case) -> Case:
        """`case` with the head dim that every library is built for, and blocks and a cache as this one needs them."""
        size = 256 if self.version == "2" and case.block_size == 16 else case.block_size
        lse = case.lse and not (self.version == "2" and case.alibi)
        clean = self.version == "3" or (self.version == "2" and case.sliding_window is not None)
        return case.but(head_dim=128, head_dim_v=None, block_size=size, clean_cache=clean, lse=lse)


FA2, FA3 = Peer("FLASH_ATTN", "2"), Peer("FLASH_ATTN", "3")
FA3_FP8 = Peer("FLASH_ATTN", "3", "fp8_e4m3")
FLASHINFER, TRITON, TORCH = Peer("FLASHINFER"), Peer("TRITON"), Peer("TORCH")
DTYPES = (torch.bfloat16, torch.float16)
