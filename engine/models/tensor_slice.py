"""TensorSlice: the part of a stored tensor that a model wants, where it is one rank of several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """`start : stop` along `dim` of a tensor whose stored shape is `full`."""

    dim: int
    start: int
    stop: int
    full: tuple[int, ...]

    @property
    def where(self) -> tuple[slice, ...]:
        """As an index."""
        return (slice(None),) * self.dim + (slice(self.start, self.stop),)
