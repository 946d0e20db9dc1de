"""Operands of the Hopper kernel over latent codes: the orders of channels and keys, by torch in the place of Gluon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

operands = pytest.importorskip("pagedattn.kernels.mla_decode.hopper_fp8_operands")
KEYS, LATENT, PANEL, PANELS, SOME = 128, 512, 128, 4, 32


def of_words(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four codes of each word: here a word is four numbers in a last dimension."""
    return words.unbind(-1)


def pairs(even: torch.Tensor, odd: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(one for both in zip(even.unbind(-1), odd.unbind(-1), strict=True) for one in both)


class Words(torch.Tensor):
    """Words [.., n, 4] that are reshaped and permuted as if they were [.., n]."""

    @property
    def shape(self) -> Any:
        return super().shape[:-1]

    def reshape(self, sizes: list[int]) -> Words:
        return torch.Tensor.reshape(self.as_subclass(torch.Tensor), [*sizes, 4]).as_subclass(Words)

    def permute(self, order: tuple[int, ...]) -> Words:
        return torch.Tensor.permute(self.as_subclass(torch.Tensor), [*order, len(order)]).as_subclass(Words)


def split(x: Words) -> tuple[torch.Tensor, ...]:
    return tuple(part.as_subclass(Words) for part in x.as_subclass(torch.Tensor).unbind(-2))


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The device functions as Python's, of torch tensors."""
    language = SimpleNamespace(
        join=lambda a, b: torch.stack((a, b), -1),
        split=split,
        convert_layout=lambda x, *_, **__: x,
        DotOperandLayout=lambda *_: None,
        constexpr=int,
    )
    names = ("key_operand", "halves_of", "in_key_order", "value_operand", "in_order")
    found = SimpleNamespace(**{name: getattr(operands, name).fn for name in names})
    given = {
        "gl": language,
        "KEYS": KEYS,
        "LATENT": LATENT,
        "PANEL": PANEL,
        "PANELS": PANELS,
        "SOME_KEYS": SOME,
        "output_layout": lambda rows: None,
    }
    for name, value in (given | {"elements": lambda x: of_words(plain(x)), "pairs": pairs_of}).items():
        monkeypatch.setattr(operands, name, value)
    return found


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def pairs_of(even: torch.Tensor, odd: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return pairs(plain(even), plain(odd))


def words_of(rows: torch.Tensor) -> Words:
    return rows.unflatten(-1, (-1, 4)).as_subclass(Words)


@pytest.mark.parametrize(("channels", "width"), [(LATENT, PANEL), (64, 64)], ids=["latent", "rotated"])
def test_keys_and_queries_have_their_channels_in_one_order(
    functions: SimpleNamespace, channels: int, width: int
) -> None:
    torch.manual_seed(0)
    rows, queries = torch.randn(KEYS, channels).double(), torch.randn(8, channels).double()
    ordered = functions.in_key_order(queries, width)
    parts = [functions.key_operand(words_of(part), None) for part in rows.split(width, 1)]
    torch.testing.assert_close(torch.cat(parts, 1) @ ordered.T, rows @ queries.T)


def test_halves_of_a_group_follow_each_other(functions: SimpleNamespace) -> None:
    words = words_of(torch.randn(KEYS, PANEL))
    halves = [functions.key_operand(half, None) for half in functions.halves_of(words)]
    assert torch.equal(torch.cat(halves, 1), functions.key_operand(words, None))


def test_values_are_put_in_order(functions: SimpleNamespace) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(SOME, LATENT).double(), torch.randn(SOME, 16).double()
    products = functions.value_operand(words_of(rows), None, None) @ weights
    torch.testing.assert_close(functions.in_order(products), rows.T @ weights)


def bank_of(row: int, byte: int, width: int) -> int:
    """Bank of a word of a row of so many bytes, in shared memory as TMA swizzles it."""
    swizzle = (row * width // 128 % 8) & (width // 16 - 1)
    return ((row * width + (byte ^ swizzle * 16)) // 4) % 32


@pytest.mark.parametrize(
    ("layout", "run", "width"),
    [
        pytest.param(lambda: operands.key_words(PANEL // 4), 4, 128, id="keys"),
        pytest.param(lambda: operands.key_words(16), 4, 64, id="rotated"),
        pytest.param(operands.value_words, 2, 128, id="values"),
    ],
)
def test_threads_that_read_together_use_no_bank_twice(layout: Any, run: int, width: int) -> None:
    """A thread reads `run` words at a time, and as many threads as have 128 bytes then read together."""
    bases = layout().lane_bases
    for first in range(0, 32, 32 // run):
        used = []
        for lane in range(first, first + 32 // run):
            row, word = (sum(base[axis] for i, base in enumerate(bases) if lane >> i & 1) for axis in (0, 1))
            used += [bank_of(row, 4 * (word + i), width) for i in range(run)]
        assert len(set(used)) == 32
