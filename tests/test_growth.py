"""A new cache format is a folder and a row, a new mask two files: a copy of the library that has both serves them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import random_work
from growth.edits import FORMAT, MASK
from processes import environment

import pagedattn

pytest.importorskip("triton")
HERE = Path(__file__).parent
LIBRARY = Path(pagedattn.__file__).parent


def grow(library: Path) -> None:
    """Add the toy format and the toy mask to a copy of the library."""
    shutil.copytree(HERE / "growth" / "toy", library / "formats" / "toy")
    for name, text, replacement in (*FORMAT, *MASK):
        path = library / name
        source = path.read_text(encoding="utf-8")
        assert source.count(text) == 1, f"{name}: {text!r}"
        path.write_text(source.replace(text, replacement), encoding="utf-8")


def sources(library: Path) -> dict[str, bytes]:
    return {path.relative_to(library).as_posix(): path.read_bytes() for path in library.rglob("*.py")}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("grown") / "pagedattn"
    shutil.copytree(LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__", "engine", "bench"))
    grow(copy)
    return copy


def test_they_touch_a_folder_a_row_and_the_masks_two_files(library: Path) -> None:
    before, after = sources(LIBRARY), sources(library)
    changed = {name for name in after if before.get(name) != after[name]}
    folder = {f"formats/toy/{name}.py" for name in ("__init__", "format", "device")}
    assert changed == folder | {"formats/registry.py", "spec/mask.py", "kernels/masking.py"}


def test_both_are_served_stored_and_moved(library: Path) -> None:
    env = environment(library.parent, HERE, TRITON_INTERPRET="1")
    command = [sys.executable, str(HERE / "growth" / "serve.py"), *random_work.option()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", cwd=library.parent)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["library"]).parent == library
    assert len(found["served"]) == (6 if random_work.everything else 2)
    for name, (passed, others) in found["served"].items():
        assert (passed, others) == (8, {}), name
    for backend in ("TORCH", "TRITON"):
        assert len(found[backend]) == 6 and all(found[backend].values()), (backend, found[backend])
