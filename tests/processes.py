"""Python processes that tests start, and their environment."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pagedattn

CHECKOUT = Path(pagedattn.__file__).parent.parent.resolve()


def environment(*first: Path, without: Sequence[str] = (), **variables: str) -> dict[str, str]:
    """This process's variables but those that begin with one of `without`, and `variables`.

    PYTHONPATH begins with the folders `first`, the checkout where none is given, and goes on as it is, but for the
    checkout: torch and others may be found by it alone.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [*(first or [CHECKOUT]), *(folder for folder in folders if Path(folder).resolve() != CHECKOUT)]
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}


def run_python(
    *argv: str, env: dict[str, str], cwd: Path | None = None, timeout: int = 300
) -> subprocess.CompletedProcess[str]:
    """What `python -c` or `python -m` does with `argv`, its standard input empty; killed after `timeout` seconds.

    It is a fork of a process that has imported torch and nothing else of weight, so that it starts at once. What
    Python reads when it starts has no effect but for PYTHONPATH and PYTHONSAFEPATH.
    """
    server = _fork_server()
    assert server.stdin is not None and server.stdout is not None
    asked = {"argv": argv, "env": env, "cwd": str(cwd or Path.cwd()), "timeout": timeout}
    print(json.dumps(asked), file=server.stdin, flush=True)
    return subprocess.CompletedProcess(argv, *json.loads(server.stdout.readline()))


@cache
def _fork_server() -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
    alone = environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # a fork has none of its parent's threads
    server = subprocess.Popen(command, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    atexit.register(server.communicate)
    return server
