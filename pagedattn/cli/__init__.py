"""The command line, `pagedattn` or `python -m pagedattn`."""

from .command import main

__all__ = ["main"]
