"""The Python of the kernel libraries that adapters call, for tests that compare signatures: nothing of it is installed.

`python tests/peer_sources.py FOLDER` lets pip download the oldest and the newest release that each adapter serves, and
keeps the few files below in FOLDER/<distribution>-<release>/. What is there already is not fetched again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagedattn.backends.flash_attn import versions as versions
from pagedattn.backends.flashinfer.backend import RELEASES
from pagedattn.backends.releases import Releases


class Peer(NamedTuple):
    """A library: its releases, the files that are kept, and what pip needs to know of it. `moved`: files that are at
    one place in the oldest release and at another in the newest."""

    releases: Releases
    files: tuple[str, ...]
    options: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()

    def files_of(self, release: str) -> tuple[str, ...]:
        """What is kept of one end of the releases."""
        return (*self.files, *(pair[release == self.releases.newest] for pair in self.moved))


PEERS = (
    Peer(
        RELEASES,
        ("flashinfer/decode.py", "flashinfer/prefill.py", "flashinfer/attention/_core.py"),
        moved=(("flashinfer/mla/_core.py", "flashinfer/mla/_batch_mla/_wrapper.py"),),
    ),
    # Published as sources: for metadata pip runs setup.py, which wants the torch that is here and compiles nothing.
    Peer(
        versions.FA2.releases,
        ("flash_attn/flash_attn_interface.py", "hopper/flash_attn_interface.py", "hopper/test_util.py"),
        ("--no-binary", "flash-attn", "--no-build-isolation"),
    ),
)


def folder_of(root: Path, distribution: str, release: str) -> Path:
    """Where the files of a release lie."""
    return root / f"{distribution}-{release}"


def fetch(peer: Peer, release: str, root: Path) -> str:
    """Download one release and keep its files; what went wrong, or nothing."""
    target, files = folder_of(root, peer.releases.distribution, release), peer.files_of(release)
    if all((target / name).exists() for name in files):
        return ""
    wanted = f"{peer.releases.distribution}=={release}"
    with tempfile.TemporaryDirectory() as where:
        archive = download(wanted, where, *peer.options)
        if archive is None:
            return f"pip could not download {wanted}, see above: is the package index reachable?"
        found = dict(members(archive, files))
    if missing := [name for name in files if name not in found]:
        return f"{wanted} has no {', '.join(missing)}: name the files that it has in {__file__}"
    for name, content in found.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return ""


def download(wanted: str, where: str, *options: str) -> Path | None:
    """What pip downloads for a requirement, without dependencies; None where it cannot, which it has said."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", where, wanted]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    if subprocess.run(command, env=environment).returncode:
        return None
    (archive,) = Path(where).iterdir()
    return archive


def members(archive: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Those of `names` that a wheel, or a source distribution below its one folder, holds."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in names if name in wheel.namelist())
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            name = member.name.partition("/")[2]
            stream = sources.extractfile(member) if name in names else None
            if stream is not None:
                yield name, stream.read()


def main(root: Path) -> None:
    """Fetch both ends of what each adapter serves.

    Raises:
        SystemExit: some could not be fetched.
    """
    wanted = [(peer, release) for peer in PEERS for release in (peer.releases.oldest, peer.releases.newest)]
    if failures := list(filter(None, (fetch(peer, release, root) for peer, release in wanted))):
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
