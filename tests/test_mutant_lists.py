"""The lists of faults follow the code: `mutants.py` itself takes an hour, so that nobody runs it with every change."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_is_changed_is_there_once(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    for old, new in mutant.changes:
        assert source.count(old) == 1 and old != new
        source = source.replace(old, new)
    assert all((ROOT / word).exists() for word in mutant.tests.split() if word.endswith(".py"))
