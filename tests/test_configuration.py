"""docs/configuration.md has every variable and every option, with the meaning and the default in the code."""

from __future__ import annotations

import re
from dataclasses import fields

import option_tables
import pytest

from pagedattn import env
from pagedattn.engine import EngineConfig, SamplingParams

PAGE = option_tables.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_the_code_says() -> None:
    assert option_tables.written(PAGE) == PAGE, "run python tests/option_tables.py"


def test_every_variable_says_its_default() -> None:
    assert 1 <= len(env.VARIABLES) <= 10
    assert not [name for name, meaning in env.VARIABLES.items() if not re.search("default|not set", meaning)]


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_option_has_a_row(kind: type) -> None:
    assert [field.name for field in fields(kind)] == list(option_tables.meanings(kind))
    rows = re.findall(r"^\| `(\w+)` \| (?:`[^`]+`|required) \| [^|]{10,} \|$", PAGE, re.MULTILINE)
    assert {field.name for field in fields(kind)} <= set(rows)
