"""`import pagedattn` is cheap: it adds little to `import torch`, loads no kernel library and touches no GPU."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

from processes import environment

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
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment(), cwd=ROOT, capture_output=True, text=True, check=True
        )
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
