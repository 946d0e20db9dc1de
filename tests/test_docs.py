"""The documentation is held against the code: links, python blocks, the support matrix, and the texts of errors."""

from __future__ import annotations

import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import environment, run_python

from pagedattn import KVCacheDtype, PagedKVCache
from pagedattn.engine import EngineConfig, KVGroup
from pagedattn.engine.worker import kv_memory
from pagedattn.errors import WeightsError
from pagedattn.formats.registry import NAMES, format_of

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted(ROOT.glob("examples/**/*.md")),
    *DOCS,
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Ids of headings, as mkdocs and GitHub make them."""
    found: Counter[str] = Counter()
    out = set()
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        out.add(f"{slug}_{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return out


def links() -> list[tuple[Path, str]]:
    return [(page, target) for page in PAGES for target in LINK.findall(re.sub(r"`[^`]*`", "", prose(page)))]


def test_relative_links_and_their_anchors_are_there() -> None:
    broken, seen = [], 0
    for page, target in links():
        if re.match(r"[a-z]+:", target):
            continue
        seen += 1
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken and seen >= 12, (broken, seen)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"\b(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {page.name for page in DOCS} and len(listed) >= 8


def test_what_the_architecture_page_names_is_in_the_file_that_it_names() -> None:
    text = re.sub(r"\s+", " ", prose(ROOT / "docs/architecture.md"))
    files = re.findall(r"`((?:pagedattn|engine|tests|csrc)/[\w/]*(?:\.\w+)?)`", text)
    assert len(files) > 40 and not [file for file in files if not (ROOT / file).exists()]
    named = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`", text)
    wrong = [
        (name, file)
        for name, file in named
        if not re.search(rf"(def|class) {name.split('.')[-1]}\b", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert len(named) > 15 and not wrong, wrong


def test_the_architecture_page_lists_every_kernel_family() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    families = {path.parent.name for path in (ROOT / "pagedattn/kernels").glob("*/__init__.py")}
    assert sorted(listed) == sorted(families) and len(families) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for number, code in enumerate(python_blocks(page)):
        compile(code, f"{page.name}, block {number}", "exec")


def python_blocks(page: Path) -> list[str]:
    return [code for language, code in FENCED.findall(page.read_text(encoding="utf-8")) if language == "python"]


@pytest.mark.parametrize("page", [*filter(python_blocks, DOCS)], ids=lambda page: page.stem)
def test_python_blocks_of_a_page_run_in_order(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), names)


NAME_EXAMPLES = [
    pytest.param(code, id=page.stem)
    for page in (ROOT / "README.md", *DOCS)
    for code in python_blocks(page)
    if "examples/" in code
]


@pytest.mark.parametrize("code", NAME_EXAMPLES)
def test_outside_the_checkout_a_block_stops_at_once(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*words: object, **more: object) -> None:
        raise AssertionError(f"the network was asked for {words}")

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FileNotFoundError, WeightsError)) as caught:
        exec(compile(code, "block", "exec"), {})
    said = str(caught.value)
    assert "examples" in said and "\n" not in said


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_what_names_the_checkout_says_that_it_is_run_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for named in re.finditer(r"python -m (?:bench|pytest)\b|python examples/|\Wexamples/tiny-qwen3", text):
        paragraph = text[named.end() :].partition("\n\n")[0]
        assert "checkout" in text[: named.start()] + paragraph, f"{page.name}: {named[0]}"


def test_pages_with_python_blocks() -> None:
    assert len(list(filter(python_blocks, DOCS))) >= 10


def test_the_support_matrix_is_what_backends_declare() -> None:
    text = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- pagedattn backends --matrix -->\n(.*)<!-- end -->", text, re.DOTALL)
    assert match is not None
    # Without the interpreter, in which TRITON serves a CPU too, and without other packages' backends.
    variables = environment(without=["TRITON_INTERPRET"], PAGEDATTN_PLUGINS="0")
    done = run_python("-m", "pagedattn", "backends", "--matrix", env=variables)
    done.check_returncode()
    assert match[1] == done.stdout, "write the output of `pagedattn backends --matrix` into docs/support.md"
    header = match[1].splitlines()[0]
    assert all(f"`{name}`" in header for name in ("TORCH", "TRITON", "FLASHINFER", "FLASH_ATTN (FA2)"))


def test_what_fits_is_what_the_cache_takes() -> None:
    """The table of docs/formats.md, by the bytes of a cache without memory of the same layers."""
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+`) \| ([\d.]+) \| ([\d,]+) \| (\d+) \| (\d\.\d\d) \|$", text, re.MULTILINE)
    names = [re.findall(r"`(.+?)`", row[0]) for row in rows]
    assert {name for formats in names for name in formats} >= {name for name in NAMES if name != "fp8_e4m3"}
    room = 40 << 30
    shape: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "meta"}
    plain = PagedKVCache(32, 1, 16, **shape).nbytes / 16
    for (_, *told), formats in zip(rows, names, strict=True):
        for name in formats:
            size = KVCacheDtype.of(name).block_size(None)
            recent = 1 if format_of(name.partition(":skip")[0]).whole_blocks else None
            taken = PagedKVCache(32, 1, size, **shape, kv_cache_dtype=name, recent_blocks=recent).slabs.numel()
            tokens = (room // taken - 1) * size
            numbers = f"{taken / size / 1024:.3g} {tokens:,} {tokens // 4096} {plain * size / taken:.2f}"
            assert told == numbers.split(), name


@pytest.mark.parametrize(("name", "window_blocks"), [("int4", 0), ("turboquant4:window=64", 2)])
def test_what_fits_beside_a_second_cache_is_what_the_engine_takes(name: str, window_blocks: int) -> None:
    config = EngineConfig(model="m", kv_cache_dtype=name)
    shape: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "meta"}
    cache = PagedKVCache(32, 1, 32, **shape, kv_cache_dtype=name, recent_blocks=1)
    assert cache.recent is not None
    of_one, group = (
        kv_memory.BlockBytes(cache.slabs.numel(), cache.recent.nbytes),
        KVGroup(32, None, None, window_blocks),
    )
    found = kv_memory._split(40 << 30, config, of_one, [group])
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    tokens = (found.cache - 1) * config.tokens_per_block
    assert f"{found.recent:,} blocks of {of_one.recent >> 20} MiB, beside which 40 GiB hold {tokens:,} tokens" in text


def test_numbers_have_a_file() -> None:
    """Every result file that a page names is there, and no page quotes a time or a speed without naming one."""
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(\w+\.json)\b", text)) - {"result.json"}
    folders = [ROOT / "bench/results/h200", ROOT / "bench/results/h100"]
    assert named and all(any((folder / name).exists() for folder in folders) for name in named)
    measured = re.compile(r"\d (?:us|GB/s|TFLOP/s)\b")
    for paragraph in text.split("\n\n"):
        assert not measured.search(paragraph) or ".json" in paragraph, paragraph
    for page in DOCS:
        if page.name not in ("performance.md",):
            assert not measured.search(prose(page)), page.name
