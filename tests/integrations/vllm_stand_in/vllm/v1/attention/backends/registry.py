"""Where backends are registered."""

from __future__ import annotations

from enum import Enum

OVERRIDES: dict[AttentionBackendEnum, str] = {}


class AttentionBackendEnum(Enum):
    CUSTOM, FLASH_ATTN = range(2)


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    OVERRIDES[backend] = class_path
