"""Runs Python programs in forks of this process, which has imported torch: a start takes no seconds then.

Each line of standard input asks for a program, each line of standard output answers, as JSON (see processes.py).
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from types import ModuleType
from typing import Any

import torch  # noqa: F401  (what takes the time)

OWN = {os.path.dirname(os.path.abspath(__file__)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
LIBRARIES = [folder for folder in sys.path if folder not in OWN]


def begin(asked: dict[str, Any], out: int, err: int) -> None:
    """Become the process that was asked for, all but for its program."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    for number, given in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(given, number)
    here = "" if asked["argv"][0] == "-c" else os.getcwd()
    safe = sys.version_info >= (3, 11) and os.environ.get("PYTHONSAFEPATH")
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*([] if safe else [here]), *given, *LIBRARIES]
    importlib.invalidate_caches()
    signal.alarm(asked["timeout"])


def execute(option: str, program: str, *words: str) -> None:
    """As `python -c` and `python -m` do."""
    sys.argv[:] = [option, *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if option == "-c":
        exec(compile(program, "<string>", "exec"), vars(main))
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def end(asked: dict[str, Any]) -> None:
    """Run the program and leave, without the second in which Python takes apart what it has imported."""
    status: Any = 0
    try:
        execute(*asked["argv"])
    except SystemExit as left:
        status = left.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status or 0)


def serve() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            asked = json.loads(line)
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                child = os.fork()
                if child == 0:
                    begin(asked, out.fileno(), err.fileno())
                    end(asked)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                said = [(file.seek(0), file.read().decode("utf-8", "replace"))[1] for file in (out, err)]
            print(json.dumps([status, *said]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
