"""Programs that tests start in a fork: they see, say and end with what they would in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, run_python

FACTS = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv, sys.path, os.getcwd(), os.environ["MORE"], "PAGEDATTN_X" in os.environ, __name__, sys.stdin.read())
print("careful", file=sys.stderr)
print(sorted(name for name in sys.modules if name.startswith(("pagedattn", "triton", "transformers", "pytest"))))
"""


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("option", ["-c", "-m"])
def test_a_program_has_what_a_process_of_its_own_has(
    option: str, safe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_X", "1")
    (tmp_path / "facts.py").write_text(FACTS, encoding="utf-8")
    argv = [option, FACTS if option == "-c" else "facts", "one", "two"]
    own = environment(tmp_path, without=["PAGEDATTN_"], MORE="3", PYTHONSAFEPATH=safe)
    given: dict[str, object] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    alone = subprocess.run([sys.executable, *argv], cwd=tmp_path, env=own, **given)  # type: ignore[call-overload]
    forked = run_python(*argv, cwd=tmp_path, env=own)
    assert "at exit" in alone.stdout and alone.stderr == "careful\n"
    assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no room')", 1, "no room\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import time; time.sleep(60)", -14, ""),
    ],
)
def test_its_status_is_told(ending: str, status: int, said: str) -> None:
    done = run_python("-c", f"print('begins', flush=True); {ending}", env=environment(), timeout=1)
    assert done.returncode == status and done.stdout == "begins\n" and done.stderr.endswith(said)


def test_it_begins_with_torch_and_leaves_nothing_to_the_next() -> None:
    code = "import sys, os; print('torch' in sys.modules, 'left' in os.environ); os.environ['left'] = sys.left = '1'"
    first = run_python("-c", f"{code}; import pagedattn", env=environment())
    second = run_python("-c", f"{code}; print('pagedattn' in sys.modules)", env=environment())
    assert (first.stdout, second.stdout) == ("True False\n", "True False\nFalse\n"), first.stderr + second.stderr
