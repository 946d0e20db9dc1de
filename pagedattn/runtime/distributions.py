"""Installed packages, without importing them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release_of(distribution: str) -> str | None:
    """The installed release; None where there is none, or none that says so, as of a build without a distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
