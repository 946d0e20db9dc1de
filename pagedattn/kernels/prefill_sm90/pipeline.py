"""Gluon: what the warps of a warp-specialised kernel pass to each other through shared memory."""

# No `from __future__ import annotations`: an aggregate checks its fields against the classes its annotations name.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_device import tile_layout


@gluon.jit
def _matrix(tile):
    """A tile as rows and columns."""
    if len(tile.shape) == 2:
        return tile
    else:
        ROWS: gl.constexpr = tile.numel // tile.shape[len(tile.shape) - 1]
        return tile.reshape([ROWS, tile.shape[len(tile.shape) - 1]])


@aggregate
class Ring:
    """Stages of shared memory that one side fills and others empty; the n-th use of a ring is stage n % STAGES. more:
    the same stages of a second part of each tile, or none."""

    tiles: gl.shared_memory_descriptor
    more: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, more, full, empty, STAGES):
        self.tiles, self.more, self.full, self.empty = tiles, gl.tuple(more), full, empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(n % self.STAGES)

    @gluon.jit
    def parts(self, n):
        """The parts of a tile, [rows, columns] each."""
        tiles = (_matrix(self.tiles.index(n % self.STAGES)),)
        for i in gl.static_range(len(self.more)):
            tiles = tiles + (_matrix(self.more[i].index(n % self.STAGES)),)  # noqa: RUF005 - no stars in a kernel
        return tiles

    @gluon.jit
    def barrier(self, n):
        """Where the filling side's copies count."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def wait_full(self, n):
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1)

    @gluon.jit
    def wait_empty(self, n):
        mbarrier.wait(self.empty.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, n):
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)


@gluon.jit
def make_ring(
    DTYPE: gl.constexpr,
    SHAPE: gl.constexpr,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    RELEASES: gl.constexpr,
    FILLS: gl.constexpr = 1,
    MORE: gl.constexpr = None,
):
    """A ring of STAGES tiles of SHAPE, each full after FILLS arrivals and empty again after RELEASES releases. MORE:
    the shape of a second part of each."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    more = ()
    if MORE is not None:
        more = (gl.allocate_shared_memory(DTYPE, [STAGES] + MORE, tile_layout(MORE)),)  # noqa: RUF005
    tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + SHAPE, LAYOUT)  # noqa: RUF005 - no stars in a kernel
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FILLS)
        mbarrier.init(empty.index(i), count=RELEASES)
    return Ring(tiles, more, full, empty, STAGES)


@aggregate
class Channels:
    """Everything that passes between the loaders and the two consumers."""

    items: Ring  # an item's fields
    q0: Ring  # the query rows of either consumer
    q1: Ring
    k: Ring
    v: Ring
    pins: gl.shared_memory_descriptor  # of each consumer or both: sums that it stores and that are never read

    @gluon.constexpr_function
    def __init__(self, items, q0, q1, k, v, pins):
        self.items, self.q0, self.q1, self.k, self.v, self.pins = items, q0, q1, k, v, pins

    @gluon.jit
    def release(self, c):
        """A consumer is done with keys c and with values c - 1, of the same item or the one before: one barrier for
        both, for it makes the warps of the group wait for each other."""
        self.k.release(c)

    @gluon.jit
    def wait_empty_values(self, c):
        """Until the values whose place values c take are no longer needed; the two rings have as many stages."""
        self.k.wait_empty(c + 1)
