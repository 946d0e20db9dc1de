"""Opening the files of a model folder: only regular files inside it, proved before the first open."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from pagedattn.errors import SecurityError, WeightsError

_MAX_JSON_BYTES = 64 << 20


class UnsafePathError(SecurityError, WeightsError):
    """A name in a model folder leaves the folder, or is no regular file; it was not opened."""


class ModelFolder:
    """A local model folder. Names come from untrusted files (an index, a config), so each is resolved before use.

    A name is accepted when its real path lies inside the folder, or when the folder is a snapshot of a Hugging Face
    cache and the name is a link to a blob of the same cache entry. Only regular files are accepted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.realpath(path))
        if not self.root.is_dir():
            problem = "is no folder" if self.root.exists() else "does not exist"
            raise WeightsError(
                f"model must be a local folder in Hugging Face format, got {os.path.abspath(path)!r}, which {problem}; "
                "run in the checkout what names examples/, and for a model of the Hub: "
                "hf download NAME --local-dir FOLDER"
            )
        is_snapshot = self.root.parent.name == "snapshots"
        self._blobs = self.root.parent.parent / "blobs" if is_snapshot else None

    def find(self, name: str) -> Path | None:
        """The real path of a file of this folder, or None where there is no such file.

        Raises:
            UnsafePathError: the name is absolute, has `..`, leaves the folder, or is no regular file.
        """
        pure = PurePosixPath(name)
        if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
            raise UnsafePathError(f"file name must be relative and inside the model folder {self.root}, got {name!r}")
        real = Path(os.path.realpath(self.root / pure))
        if not (real.is_relative_to(self.root) or real.parent == self._blobs):
            raise UnsafePathError(f"{name!r} must lie inside the model folder {self.root}, it leads to {real}")
        try:
            mode = os.lstat(real).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(mode):
            raise UnsafePathError(f"{self.root / name} must be a regular file, it is a {_kind(mode)}")
        return real

    def require(self, name: str) -> Path:
        """As `find`, but a missing file is a WeightsError."""
        real = self.find(name)
        if real is None:
            raise self._missing(name)
        return real

    def require_json(self, name: str) -> dict[str, Any]:
        """As `read_json`, but a missing file is a WeightsError."""
        value = self.read_json(name)
        if value is None:
            raise self._missing(name)
        return value

    def _missing(self, name: str) -> WeightsError:
        return WeightsError(f"{self.root / name} is missing; download the whole repository")

    def read_text(self, name: str, max_bytes: int = _MAX_JSON_BYTES) -> str | None:
        """The text of a file, None where it does not exist.

        Raises:
            UnsafePathError: as `find`, or the file is larger than `max_bytes`.
            WeightsError: it is not UTF-8.
        """
        real = self.find(name)
        if real is None:
            return None
        # the file may have been swapped since it was looked at: follow no link, wait for no writer
        with os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnsafePathError(f"{self.root / name} must be a regular file")
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise UnsafePathError(f"{self.root / name} must hold at most {max_bytes} bytes")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.root / name} must be UTF-8 text: {error}") from None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file, None where the file does not exist; WeightsError where it is no JSON object."""
        text = self.read_text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{self.root / name} must be JSON: {error}") from None
        if not isinstance(value, dict):
            raise WeightsError(f"{self.root / name} must hold a JSON object, got {type(value).__name__}")
        return value


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device or other special file")
