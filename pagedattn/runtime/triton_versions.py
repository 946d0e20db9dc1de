"""Which versions of Triton the kernels were tried with, and what is said of another one.

Gluon and the arguments of compiled kernels are no stable interfaces: with a version that was not tried, the prefill
kernel for Hopper and the launches past Triton's dispatcher are off, and everything else runs.
"""

from __future__ import annotations

from .distributions import release_of

TRIED = ("3.6", "3.7", "3.8", "3.9")
REMEDY = f"install a newer pagedattn, or triton {TRIED[-1]} with the torch that requires it"


def installed() -> str | None:
    """The version of Triton, or None where it is not installed; Triton itself is not imported."""
    return release_of("triton")


def series(found: str) -> tuple[int, int]:
    """(3, 7) of "3.7.1+git"."""
    major, minor = found.split(".")[:2]
    return int(major), int(minor)


def why_untried() -> str:
    """What is said of the installed version where it was not tried; "" where it was."""
    found = installed()
    if found is None:
        return "triton is not installed"
    if ".".join(map(str, series(found))) in TRIED:
        return ""
    return (
        f"triton {found} was not tried, only {', '.join(TRIED)}: the prefill kernel for Hopper and launches past "
        "Triton's dispatcher are off"
    )
