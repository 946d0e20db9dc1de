"""What the docs say of model families is what the tests run."""

from __future__ import annotations

import re
from pathlib import Path

from hf_more_models import ALL

ROOT = Path(__file__).parents[2]


def test_the_docs_count_and_name_the_families_that_are_tested() -> None:
    text = (ROOT / "docs" / "hugging_face.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| \d\.\de-\d\d \| \d+\.\d \|$", text, re.MULTILINE)
    assert rows == sorted(ALL) and len(set(rows)) == len(rows)
    (said,) = re.findall(r"on (\d+)\s+families", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(said) == len(rows)
