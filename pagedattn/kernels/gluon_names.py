"""What Gluon calls differently in the versions of Triton that are served."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# A barrier of a warpgroup's threads: `thread_barrier` up to Triton 3.6.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
# (descriptor, coordinates, barrier, destination): `async_copy_global_to_shared` up to Triton 3.8.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
