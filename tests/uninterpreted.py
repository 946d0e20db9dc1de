"""Scripts that need Triton's compiler, run in a process of their own: TRITON_INTERPRET is read when kernels are
imported, and tests are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pagedattn

TESTS = Path(__file__).parent


def output_of(script: str, **environment: str) -> list[str]:
    """The lines that `script` of this folder prints, given more environment variables; fails where it fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = str(Path(pagedattn.__file__).parent.parent)
    everything = {**inherited, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, str(TESTS / script)], env=everything, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
