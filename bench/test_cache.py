"""Cache ops by pytest: `python -m pytest bench/test_cache.py --result OUT.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .cache_ops import GPU, OPS, swaps
from .ratios import Row


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_cache(results, op: Callable[[], Iterator[Row]]) -> None:
    if op is swaps and not GPU:
        pytest.skip("there is no bus to a device here")
    rows = list(op())
    results.add(rows)
    assert rows and not [row["refused"] for row in rows if row["refused"]]
