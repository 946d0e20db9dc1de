"""How a compiled kernel is called: the one module that knows the launchers of Triton's versions (`CudaLauncher`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton

from .triton_versions import series, why_untried

KNOWN = not why_untried()
_PACKED = series(triton.__version__) >= (3, 7)  # the C function takes the kernel's arguments as one sequence


class Entry(NamedTuple):
    """A compiled kernel: `call` takes the grid, the stream, `head`, then the kernel's arguments, `packed` into one
    sequence or not."""

    call: Callable[..., Any]
    head: tuple[Any, ...]
    packed: bool
    kernel: Any  # kept: from Triton 3.9 on, a compiled kernel that is collected unloads its code


def entry_of(compiled: Any) -> Entry:
    """The C function that launches, where the kernel needs no memory of the launch's own; without metadata of the
    launch and without hooks."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return Entry(run, (compiled.function, compiled.packed_metadata, None, None, None), False, compiled)
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    if _PACKED:
        rest = (compiled.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
    else:
        rest = (None, None, compiled.packed_metadata, None, None, None)
    return Entry(run.launch, (compiled.function, *flags, *rest), _PACKED, compiled)


class PlacedDescriptor:
    """A tensor descriptor at another address: as much of one as Triton's launchers read."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, like: Any, address: int) -> None:
        self.address, self.shape, self.strides, self.padding = address, like.shape, like.strides, like.padding
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)

    @property
    def base(self) -> PlacedDescriptor:
        return self

    def data_ptr(self) -> int:
        return self.address
