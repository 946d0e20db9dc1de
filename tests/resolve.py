"""Whether constraints.txt can be installed: pip's dry run, from the package index alone, by each supported Python here.

    python3.11 tests/resolve.py [--ends | --python 3.12]

Find-links, extra indexes and installed packages are left out, since what they offer nobody else has. A Python that is
not on this machine is named; none at all, or one that cannot resolve, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent


def supported() -> list[str]:
    """The Pythons that pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", text)


def candidates(version: str) -> Iterator[Path]:
    """Where an interpreter of this version may be: this one, on the PATH, or below pyenv."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield Path(sys.executable)
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    yield from sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)


def interpreter(version: str) -> Path | None:
    """The first that runs and has pip."""
    for one in candidates(version):
        if subprocess.run([one, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return one
    return None


def requirements(extra: str) -> list[str]:
    """What pyproject.toml asks for with an extra, those that this names included; nothing is built for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [*project["dependencies"]]
    names = [extra]
    for name in names:
        for one in project["optional-dependencies"][name]:
            inner = re.fullmatch(r"pagedattn\[(.*)\]", one)
            names.extend(inner[1].split(",") if inner else ())
            found.extend(() if inner else (one,))
    return found


def newest_pip(folder: Path) -> tuple[list[str], list[str]]:
    """The command of a pip as new as the index has it, in an environment of its own, and options of its dry run.

    Older ones download each wheel that they only look at, some gigabytes for every Python.
    """
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "--no-compile", "-U", "pip"], capture_output=True)
    options = ["--dry-run", "--ignore-installed"]
    if "fast-deps" in subprocess.run([*pip, "install", "--help"], capture_output=True, text=True).stdout:
        options.append("--use-feature=fast-deps")
    return pip, options


def resolve(pip: list[str], options: list[str], python: Path) -> subprocess.CompletedProcess[str]:
    """Pip's dry run of what `make demo` and `make chat` install, for another Python than its own."""
    wanted = [*requirements("dev"), *requirements("chat")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    own = {
        name: os.environ[name] for name in ("PIP_CERT", "PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT") if name in os.environ
    }
    return subprocess.run(
        [*pip, "--python", str(python), "install", *options, "-c", "constraints.txt", *wanted],
        cwd=ROOT,
        env={**inherited, **own, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", help="versions to try instead of all")
    parser.add_argument("--ends", action="store_true", help="try the oldest and the newest version only")
    given = parser.parse_args()
    versions = given.python or supported()[:: len(supported()) - 1 if given.ends else 1]
    with tempfile.TemporaryDirectory() as folder:
        return try_all(versions, *newest_pip(Path(folder)))


def try_all(versions: list[str], pip: list[str], options: list[str]) -> int:
    """Resolve for each version and print what came of it; 1 where one cannot, or none is here."""
    tried, failed = 0, []
    for version in versions:
        python = interpreter(version)
        if python is None:
            print(f"Python {version} is not here", flush=True)
            continue
        done, tried = resolve(pip, options, python), tried + 1
        last = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("Would install")), "")
        chosen = [one for one in last.split() if one.startswith(("torch-", "triton-", "numpy-", "transformers-"))]
        print(f"Python {version}: {' '.join(chosen) if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            failed.append(version)
            print(done.stderr[-3000:], flush=True)
    return 1 if failed or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
