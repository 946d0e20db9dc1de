"""What the ptxas of the installed Triton says of a kernel, and the SASS it makes: the one place that knows which."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.nvidia import compiler


class Assembled(NamedTuple):
    """Bytes of spills and registers, of each function; everything ptxas said; the kernel's instructions."""

    spills: list[int]
    registers: list[int]
    said: str
    sass: str


def assemble(compiled: Any, arch: int) -> Assembled:
    """Assemble a compiled kernel's PTX once more, as Triton did, for what ptxas says of it."""
    flags = ["-v", f"--gpu-name=sm_{arch}{'a' if arch == 90 else ''}"]
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        flags.append("--regAllocOptLevel=2")
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"], encoding="utf-8")
        said = _run(compiler.get_ptxas(arch).path, *flags, str(ptx), "-o", str(cubin)).stderr
        sass = _run(knobs.nvidia.nvdisasm.path, "-c", str(cubin)).stdout
    spills, registers = (
        [int(n) for n in re.findall(pattern, said)] for pattern in (r"(\d+) bytes spill", r"Used (\d+) registers")
    )
    return Assembled(spills, registers, said, sass)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    return done
