"""The examples do what they say, where that takes no GPU; tests/gpu runs the one that needs it."""

from __future__ import annotations

import runpy
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_a_layer_without_an_engine() -> None:
    # More tokens than two blocks hold, so that the answer depends on the block table.
    assert 0 <= import_module("attention_layer").main(prompt=20, more=15) < 1e-5


def test_the_manager_of_blocks_without_an_llm() -> None:
    found = import_module("kv_cache_manager").main()
    assert [cached for cached, _ in found] == [0, 32, 32]  # whole blocks of 16
    assert all(0 <= difference < 1e-5 for _, difference in found)


def test_one_compiled_graph() -> None:
    assert 0 <= import_module("torch_compile").main(backend="aot_eager") < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says where there is no GPU")
def test_the_graph_says_what_it_needs() -> None:
    with pytest.raises(SystemExit, match=r"needs an NVIDIA GPU; torch finds none here\.$"):
        runpy.run_path(str(EXAMPLES / "cuda_graph.py"), run_name="__main__")


def test_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    import_module("tutorial").main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines if line[:1].isdigit()] == list("123456")
    assert "  slots of the 4 new tokens (block * 4 + offset): [21, 22, 23, 24]" in lines
    assert "  table of C: [1, 2, 7], 12 tokens: 'The cat ate.'" in lines  # blocks 1 and 2 are A's
    assert "  (source, destination) for cache.copy_blocks: [(6, 8)]" in lines
    (difference,) = [line.rpartition(" ")[2] for line in lines if "computing 4 of C's 12 tokens" in line]
    assert float(difference) < 1e-5
    assert sum("not FLASHINFER: " in line for line in lines) == 2


def test_the_tutorial_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install pagedattn[bench]")
    import_module("tutorial").main(["--plot", str(tmp_path / "pool.svg")])
    assert (tmp_path / "pool.svg").stat().st_size > 1000
