"""The environment of Python processes that tests start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pagedattn

CHECKOUT = Path(pagedattn.__file__).parent.parent.resolve()


def environment(*first: Path, without: Sequence[str] = (), **variables: str) -> dict[str, str]:
    """This process's variables but those that begin with one of `without`, and `variables`.

    PYTHONPATH begins with the folders `first`, the checkout where none is given, and goes on as it is, but for the
    checkout: torch and others may be found by it alone.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [*(first or [CHECKOUT]), *(folder for folder in folders if Path(folder).resolve() != CHECKOUT)]
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
