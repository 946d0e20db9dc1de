"""vLLM's Python and metadata without its compiled parts, for tests over its real classes on a CPU: make vllm-test.

`python tests/vllm_sources.py FOLDER` lets pip download the oldest release that is served and the newest one on the
index, keeps the text files in FOLDER/vllm-<release>/ and prints these folders, for PYTHONPATH. What is there already
is not fetched again. VLLM_WHEELS names a folder of wheels that pip looks into before the index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from peer_sources import download, folder_of

from pagedattn.integrations.vllm.releases import SERVED

# Wheels are chosen for this Python, so that one that is too old is told so and does not get an old release.
FOR_PYTHON = ("--only-binary=:all:", "--python-version", "3.12")
PARTS = (".py", ".json", ".txt", "/METADATA")


def newest() -> str:
    """The newest release on the index.

    Raises:
        SystemExit: pip could not say.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", *FOR_PYTHON, "vllm"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout
    found = re.match(r"vllm \(([\d.]+)\)", said)
    return found[1] if found else sys.exit("pip could not name the newest vLLM: is the package index reachable?")


def fetch(release: str, root: Path) -> str:
    """Download a release and keep its Python; what went wrong, or nothing."""
    target = folder_of(root, "vllm", release)
    if target.exists():
        return ""
    wheels = os.environ.get("VLLM_WHEELS")
    local = ("--find-links", wheels) if wheels else ()
    wanted = f"vllm=={release}"
    print(f"downloading {wanted}, 300 MB", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=root) as where:
        archive = download(wanted, where, *FOR_PYTHON, *local)
        if archive is None:
            return f"pip could not download {wanted}, see above: is the package index reachable?"
        unpacked = Path(where, "unpacked")
        unpack(archive, unpacked)
        unpacked.rename(target)
    return ""


def unpack(wheel: Path, target: Path) -> None:
    """Text files alone: a wheel has more than a gigabyte of compiled ones."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(PARTS)])


def too_new(target: Path, python: tuple[int, int]) -> str:
    """Why this Python cannot run the release, or nothing."""
    (metadata,) = target.glob("vllm-*.dist-info/METADATA")
    found = re.search(r"^Requires-Python:.*>=(\d+)\.(\d+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None or python >= (needed := (int(found[1]), int(found[2]))):
        return ""
    return "{} needs Python {}.{} or newer, this is {}.{}: left out".format(target.name, *needed, *python)


def main(root: Path) -> None:
    """Fetch both ends of what is served, and print the folders of those that this Python can run.

    Raises:
        SystemExit: one could not be fetched.
    """
    root = root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    for release in dict.fromkeys((f"{SERVED.oldest}.0", newest())):
        if failure := fetch(release, root):
            sys.exit(failure)
        target = folder_of(root, "vllm", release)
        reason = too_new(target, sys.version_info[:2])
        print(reason or target, file=sys.stderr if reason else sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
