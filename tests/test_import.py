"""`import pagedattn` is cheap: it adds little to `import torch`, loads no kernel library and touches no GPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from processes import environment, run_python

import pagedattn

ROOT = Path(pagedattn.__file__).parent.parent
# CPU seconds: wall time on a shared machine measures its neighbours.
SCRIPT = """
import json, sys, time
import torch
before = time.process_time()
import pagedattn
took = time.process_time() - before
print(json.dumps([took, sorted({name.partition(".")[0] for name in sys.modules}), torch.cuda.is_initialized()]))
"""


@cache
def runs() -> list[tuple[float, set[str], bool]]:
    out = []
    for _ in range(3):
        done = run_python("-c", SCRIPT, env=environment(), cwd=ROOT)
        done.check_returncode()
        took, modules, touched = json.loads(done.stdout)
        out.append((took, set(modules), touched))
    return out


def test_it_adds_less_than_0_3_seconds_to_import_torch() -> None:
    times = [took for took, _, _ in runs()]
    assert len(times) == 3 and 0 < statistics.median(times) < 0.3, times


def test_no_kernel_library_is_imported_and_no_gpu_touched() -> None:
    for _, modules, touched in runs():
        assert {"torch", "pagedattn"} <= modules
        assert not modules & {"triton", "transformers", "flash_attn", "flashinfer", "safetensors", "tokenizers"}
        assert not touched


def imports(code: str, folder: Path, *, stdin: bool = False) -> str:
    """What Python prints that finds `folder` first; or the last line of its error."""
    own = {**environment(folder), "PYTHONSAFEPATH": "1"}
    if stdin:
        command = [sys.executable, "-"]
        done = subprocess.run(command, cwd=folder, env=own, input=code, capture_output=True, text=True, check=False)
    else:
        done = run_python("-c", code, cwd=folder, env=own)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("stdin", [False, True], ids=["-c", "-"])
def test_a_checkout_has_the_engine_and_the_benchmark_however_python_is_started(stdin: bool) -> None:
    code = "import pagedattn.engine.api.llm, pagedattn.bench as bench; print(pagedattn.engine.__file__, bench.__file__)"
    assert imports(code, ROOT, stdin=stdin) == " ".join(
        str(ROOT / name / "__init__.py") for name in ("engine", "bench")
    )


def test_what_lies_beside_an_installation_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    """Other people's packages do; and a library that was installed with its engine has it inside."""
    (tmp_path / "pagedattn").mkdir()
    for one in (ROOT / "pagedattn").iterdir():
        (tmp_path / "pagedattn" / one.name).symlink_to(one)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    code = "import pagedattn.engine; print(pagedattn.engine.__file__)"
    assert str(tmp_path) not in imports(code, tmp_path)  # an installation's, where there is one
    (tmp_path / "setup.py").touch()
    assert imports(code, tmp_path) == str(tmp_path / "engine" / "__init__.py")
    (tmp_path / "pagedattn" / "engine").symlink_to(ROOT / "engine")
    assert imports(code, tmp_path) == str(tmp_path / "pagedattn" / "engine" / "__init__.py")
