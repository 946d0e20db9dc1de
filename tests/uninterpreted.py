"""Scripts that need Triton's compiler, run in a process of their own: TRITON_INTERPRET is read when kernels are
imported, and tests are interpreted."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from processes import environment

TESTS = Path(__file__).parent
# Of this test run, for all its workers: conftest.py names it.
folder: Path | None = None


def output_of(script: str, *arguments: str, **variables: str) -> list[str]:
    """The lines that `script` of this folder prints, given more environment variables; fails where it fails.

    It runs once in a test run, whichever worker asks first, and the others wait for it; a failure is kept too.
    """
    assert folder is not None, "conftest.py names the folder of the run"
    asked = sha256(json.dumps([script, arguments, variables], sort_keys=True).encode()).hexdigest()[:16]
    kept = folder / f"{Path(script).stem}-{asked}.json"
    with kept.with_suffix(".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _keep(kept, [script, *arguments], variables)
    status, output, error = json.loads(kept.read_text(encoding="utf-8"))
    assert status == 0, error
    return output.splitlines()


def _keep(kept: Path, command: list[str], variables: dict[str, str]) -> None:
    # A home may be read-only, and what an earlier run compiled may be stale.
    cache = {"TRITON_CACHE_DIR": str(kept.parent / "triton")}
    everything = environment(without=["TRITON_INTERPRET"], **cache, **variables)
    command = [sys.executable, str(TESTS / command[0]), *command[1:]]
    done = subprocess.run(command, env=everything, capture_output=True, encoding="utf-8", errors="replace")
    written = kept.with_suffix(".part")
    written.write_text(json.dumps([done.returncode, done.stdout, done.stderr[-3000:]]), encoding="utf-8")
    written.replace(kept)
