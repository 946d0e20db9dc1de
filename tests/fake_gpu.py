"""A GPU that is not there: Triton compiles for sm_90a and 'launches' into a list, so that host code runs without one.

Tensors stay on the CPU. What is real: the JIT, its specialisation, the compiled kernels down to LLVM and their
launchers' arguments; what is not: code for a GPU, and the driver below `cuLaunchKernelEx`. To be used in a process of
its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler, driver

from pagedattn import Attention
from pagedattn.backends.triton import backend
from pagedattn.runtime import launcher, op_registry
from pagedattn.runtime.target import Target, target_of
from pagedattn.spec import Capabilities

HOPPER = Target(num_sms=132, shared_bytes=232448, supports_pdl=True)


_PACKED = hasattr(driver, "annotate_arguments")  # from Triton 3.7 on, a kernel's arguments are one sequence
_FILL = "fill_tma_descriptor_tiled" if _PACKED else "fill_tma_descriptor"


class Launched(list[tuple[Any, ...]]):
    """Arguments of every launch: (gridX, gridY, gridZ, stream, function, two flags, six more, *kernel arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = True

    def __call__(self, *args: Any) -> None:
        if self.keep:
            self.append((*args[:13], *args[15]) if _PACKED else args)


launched = Launched()
_make_ttgir = compiler.CUDABackend.make_ttgir


class _Launcher(driver.CudaLauncher):
    def __init__(self, src: Any, metadata: Any) -> None:  # without the C code that the real one compiles
        self.num_ctas = metadata.num_ctas
        described = getattr(metadata, "tensordesc_meta", None)
        self.launch = driver.wrap_handle_tensordesc(launched, dict(src.signature), described)
        self.global_scratch_size, self.global_scratch_align = metadata.global_scratch_size, 128
        self.profile_scratch_size, self.profile_scratch_align = metadata.profile_scratch_size, 128
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        self.arg_annotations, self.kernel_signature, self.gsan_enabled = (), b"", False


class _Driver:
    launcher_cls: Any = _Launcher

    def __init__(self) -> None:
        functions = iter(range(1, 1 << 30))
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (object(), next(functions), 64, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": HOPPER.shared_bytes},
            **{_FILL: lambda address, *layout: (address, str(layout))},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _without_layouts(module: Any, metadata: dict[str, Any], *rest: Any) -> Any:
    """The module as it is, where a launch asks nothing of its layouts: it does of those of tensor descriptors."""
    if "tensordesc" in str(module):
        return _make_ttgir(module, metadata, *rest)
    metadata["tensordesc_meta"] = []
    return module


def _without_code(backend: Any, module: Any, metadata: dict[str, Any], *rest: Any) -> Any:
    """The module as it is; launched into a list, a kernel needs no code."""
    sizes = dict.fromkeys(("tmem_size", "global_scratch_size", "profile_scratch_size"), 0)
    metadata |= {**sizes, "shared": 1024, "global_scratch_align": 128, "profile_scratch_align": 128}
    return module


def install() -> None:
    """Make Triton and the library believe that CPU tensors can be launched on."""
    compiler.CUDABackend.make_ttgir = staticmethod(_without_layouts)  # type: ignore[method-assign]
    compiler.CUDABackend.make_llir = _without_code  # type: ignore[method-assign]
    compiler.CUDABackend.make_ptx = lambda self, src, metadata, *rest: metadata.update(name="kernel") or ""  # type: ignore[method-assign]
    compiler.CUDABackend.make_cubin = lambda *args: b""  # type: ignore[method-assign]
    triton.runtime.driver.set_active(_Driver())  # type: ignore[arg-type]
    launcher.current_device = lambda: 0
    users = [vars(module) for name, module in sys.modules.items() if name.startswith("pagedattn.")]
    for names in [names for names in users if names.get("target_of") is target_of]:
        names["target_of"] = lambda device: HOPPER
    refusal = op_registry._refusal
    op_registry._refusal = lambda path, *rest: "" if path == "triton" else refusal(path, *rest)
    known = backend.TritonBackend.capabilities()
    values = {name: getattr(known, name) for name in Capabilities.__dataclass_fields__}
    facts = Capabilities(**{**values, "devices": ("cuda", "cpu")})
    backend.TritonBackend.capabilities = classmethod(lambda cls: facts)  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)


def files_to_a_launch(call: Callable[[], object]) -> list[list[str]]:
    """For each launch, the library's files on the way from `Attention.forward` to it."""
    found: list[list[str]] = []

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Launched.__call__.__code__:
            files: list[str] = []
            while frame is not None and frame.f_code is not Attention.forward.__code__:
                frame = frame.f_back
                files += [frame.f_code.co_filename] if frame is not None else []
            found.append(sorted({file.rpartition("pagedattn/")[2] for file in files if "/pagedattn/" in file}))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
