"""What the ptxas of the installed Triton says of a kernel, and the SASS it makes: the one place that asks it."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.language import target_info


class Compiled:
    """A kernel compiled by Triton; `said` is all that ptxas said, spills (bytes) and registers are of each function."""

    def __init__(self, source: Any, arch: int, options: dict[str, Any]) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log), knobs.nvidia.scope(), knobs.compilation.scope():
            knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
            target = GPUTarget("cuda", arch, 32)
            with _asked_for(target):
                self.kernel = triton.compile(source, target=target, options=options)
        self.ptx: str = self.kernel.asm["ptx"]
        self.shared: int = self.kernel.metadata.shared
        self.said = log.getvalue()
        self.spills = [int(n) for n in re.findall(r"(\d+) bytes spill", self.said)]
        self.registers = [int(n) for n in re.findall(r"Used (\d+) registers", self.said)]

    @cached_property
    def sass(self) -> str:
        """The kernel's instructions."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(self.kernel.asm["cubin"])
            command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
            done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
        return done.stdout


@contextlib.contextmanager
def _asked_for(target: GPUTarget) -> Iterator[None]:
    """Device code that asks for the GPU's capability is told of this one, which is not there."""

    def current_target() -> GPUTarget:
        return target

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
    kept, target_info.current_target = target_info.current_target, current_target
    try:
        yield
    finally:
        target_info.current_target = kept
