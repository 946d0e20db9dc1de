"""The command line, `pagedattn` or `python -m pagedattn`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `command.main`."""
    from .command import main as run  # which imports every sub-command

    return run(argv)
