"""The site is built without a network, and the API pages have every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from processes import environment

import pagedattn
import pagedattn.engine
import pagedattn.integrations.transformers
import pagedattn.ops

ROOT = Path(__file__).parent.parent
API = sorted((ROOT / "docs").glob("api_*.md"))
# Modules with pages of their own, and what the library itself needs of a package's folder.
ELSEWHERE = {"__version__", "ops", "NAME", "import_transformers"}


@pytest.mark.parametrize(
    "module",
    [pagedattn, pagedattn.ops, pagedattn.engine, pagedattn.integrations.transformers],
    ids=lambda module: module.__name__,
)
def test_every_public_name_is_on_an_api_page(module: ModuleType) -> None:
    listed = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text(encoding="utf-8") for page in API), re.MULTILINE)
    # mkdocstrings reads files: in a checkout pagedattn.engine is the folder engine.
    name = "engine" if module is pagedattn.engine else module.__name__
    missing = {f"{name}.{one}" for one in set(module.__all__) - ELSEWHERE} - set(listed)
    assert not missing and len(listed) == len(set(listed))


@pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason="mkdocs is not installed: pip install '.[docs]'",
)
def test_it_is_built_without_a_network(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    variables = environment(http_proxy=nowhere, https_proxy=nowhere, HTTPS_PROXY=nowhere)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        html = (tmp_path / page.with_suffix(".html").name).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"([^\"]+)\"", html)
        assert loaded and not [one for one in loaded if "//" in one], page.name
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert f'id="{name}"' in html, f"{page.name}: {name}"
