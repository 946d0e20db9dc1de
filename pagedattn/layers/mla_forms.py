"""The two forms of latent attention (MLA): who serves each, and how many new tokens of a sequence are which."""

from __future__ import annotations

from typing import NamedTuple

from ..backends.selector import Request, Selection, select_backend
from ..errors import NoBackendError
from ..spec import AttentionSpec, AttentionType, Mask

_NEVER = 1 << 30  # new tokens that no sequence has


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
        131072 / 768 = 171.
        """
        saved = 2 * self.latent + self.rope - (self.nope + self.rope + self.value)
        return -(-self.latent * (self.nope + self.value) // saved) if saved > 0 else _NEVER

    def measured_break_even(self, capability: tuple[int, int] | None) -> int:
        """The same by measurement, on Hopper GPUs: the expanded form gathers each row too, however few heads share it,
        and stores what a row expands to (H200: 225 to 253 tokens with 128 heads, 447 to 525 with 16; docs/mla.md)."""
        if capability is None or capability[0] != 9 or self.break_even == _NEVER:
            return self.break_even
        return round(self.break_even * (1.2 + 26 / self.num_heads))


class LatentForms(NamedTuple):
    """Who attends absorbed and who expanded, and the new tokens up to which a sequence is attended to absorbed."""

    absorbed: Selection
    expanded: Selection
    most_absorbed: int

    @property
    def expanded_from(self) -> int | None:
        """New tokens of a sequence from which on it is attended to expanded; None where none ever is."""
        return None if self.most_absorbed >= _NEVER else self.most_absorbed + 1


def select_forms(
    spec: AttentionSpec, dims: LatentDims, request: Request, max_absorbed_len: int | None = None
) -> LatentForms:
    """Choose for both forms: decodes are absorbed, so that who is asked for decodes attends absorbed at any length.

    Raises:
        NoBackendError: a form that the one asked for, or anybody, cannot serve.
    """
    absorbed = select_backend(spec, Request(request.decode, request.decode, request.source))
    asked = Request(request.prefill, request.prefill, request.source)
    try:
        expanded = select_backend(expanded_spec(spec, dims), asked)
    except NoBackendError as error:
        raise NoBackendError(f"the expanded form, which `prefill=` names a backend for: {error}") from None
    if spec.sliding_window is not None:  # a chunk of keys does not tell distances
        return LatentForms(absorbed, expanded, _NEVER)
    usual = dims.measured_break_even(spec.capability)
    return LatentForms(absorbed, expanded, usual if max_absorbed_len is None else max_absorbed_len)


def expanded_spec(spec: AttentionSpec, dims: LatentDims, causal: bool = True) -> AttentionSpec:
    """Dense attention over packed keys and values of every head."""
    return AttentionSpec(
        num_heads=spec.num_heads,
        head_dim=dims.nope + dims.rope,
        head_dim_v=dims.value,
        dtype=spec.dtype,
        device_type=spec.device_type,
        capability=spec.capability,
        attn_type=AttentionType.ENCODER_ONLY,
        scale=spec.scale,
        mask=Mask(causal, spec.sliding_window if causal else None),
        softcap=spec.softcap,
        needs_lse=True,
    )
