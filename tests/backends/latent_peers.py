"""The backends of other libraries over latent rows: on a GPU the libraries themselves, elsewhere their stand-ins."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from backends import fake_flash_mla
from backends.fake_flash_attn import CALLS, MODULES
from flashinfer_on_cpu import install as install_flashinfer

from pagedattn.backends.flash_attn import versions as versions
from pagedattn.backends.flash_mla import backend as flash_mla
from pagedattn.backends.flash_mla import metadata as flash_mla_metadata
from pagedattn.spec import AttentionSpec, Capabilities, Rejection
from pagedattn.testing.case import Case
from pagedattn.testing.cases import MLA_CASES

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BACKENDS = ("FLASH_MLA", "FLASH_ATTN", "FLASHINFER")
DTYPES = (torch.bfloat16, torch.float16) if GPU else (torch.float16,)
ROW: dict[str, Any] = {"latent_dim": 512, "head_dim": 576, "scale": 0.05, "dtype": torch.float16}


def install(patch: pytest.MonkeyPatch) -> None:
    """Make the stand-ins the installed libraries, and have backends take the CPU for a Hopper GPU."""
    install_flashinfer(patch)
    for name, module in {**MODULES[3], "flash_mla": fake_flash_mla.MODULE}.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(versions, "_installed", lambda name: sys.modules.get(name) is not None)
    patch.setattr(versions, "release_of", {}.get)
    patch.setenv("PAGEDATTN_FLASH_ATTN", "3")
    real = Capabilities.rejections

    def rejections(self: Capabilities, spec: AttentionSpec) -> list[Rejection]:
        return real(self, spec.replace(device_type="cuda", capability=(9, 0)))

    patch.setattr(Capabilities, "rejections", rejections)
    forget()
    CALLS.clear()


def forget() -> None:
    """What was found installed."""
    for cached in (versions.library, flash_mla_metadata.library, flash_mla._availability):
        cached.cache_clear()


def cases(backend: str, dtype: torch.dtype) -> list[Case]:
    """The suite's latent cases over rows of 512 + 64, in blocks and a cache as the backend needs them, each once."""
    size = {"block_size": 64} if backend == "FLASH_MLA" else {}
    changes = {**ROW, "dtype": dtype, "clean_cache": backend == "FLASH_ATTN", **size}
    return list(dict.fromkeys(case.but(**changes) for case in MLA_CASES))
