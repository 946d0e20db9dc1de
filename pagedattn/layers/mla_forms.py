"""The two forms of latent attention (MLA): the sizes that decide which one a sequence takes."""

from __future__ import annotations

from typing import NamedTuple


class LatentDims(NamedTuple):
    """Sizes of a latent layer: L and R of a cached row, N and V of an expanded head beside R."""

    num_heads: int
    latent: int
    rope: int
    nope: int
    value: int

    @property
    def break_even(self) -> int:
        """New tokens of a sequence from which on its expanded form takes fewer multiplications than the absorbed one.

        For each head, key and query row the absorbed form multiplies 2 L + R times (a key of L + R, a value of L), the
        expanded one N + R + V times, after L (N + V) for each head and key. DeepSeek's sizes (512, 64, 128, 128) give
        131072 / 768 = 171. Where memory limits and not arithmetic, the absorbed form wins longer than that.
        """
        saved = 2 * self.latent + self.rope - (self.nope + self.rope + self.value)
        return -(-self.latent * (self.nope + self.value) // saved) if saved > 0 else 1 << 30
