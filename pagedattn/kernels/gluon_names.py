"""What Gluon calls differently in the versions of Triton that are served."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# A barrier of a warpgroup's threads: `thread_barrier` up to Triton 3.6.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
# (descriptor, coordinates, barrier, destination): `async_copy_global_to_shared` up to Triton 3.8.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# A method that begins with an underscore up to Triton 3.8.
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory as that of another dtype, shape and layout."""
    if _REINTERPRET:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
