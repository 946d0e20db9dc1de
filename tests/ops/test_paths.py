"""Which path a call takes, and what is said where the one asked for cannot serve."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
import torch

from pagedattn import ops
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.runtime import op_registry

CPU = torch.device("cpu")
CSRC = ("reshape_and_cache", "reshape_and_cache_classic", "copy_blocks", "swap_blocks", "gather_kv")


def call(path: str) -> torch.Tensor:
    cache = torch.zeros(6, 4, 2, 16)
    ops.reshape_and_cache(torch.ones(1, 2, 16), None, cache, None, torch.tensor([9]), path=path)
    return cache


@pytest.mark.skipif(not os.environ.get("EXPECT_CSRC"), reason="EXPECT_CSRC is not set: nobody says it must be there")
def test_the_extension_is_there_and_preferred() -> None:
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for op in CSRC:
            assert op_registry.path_of(op, device) == "csrc", f"{op} on {device}: {op_registry.csrc_status()}"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where the library looks for the extension, in an empty folder; what it found before is forgotten and restored."""
    monkeypatch.setattr(op_registry, "_EXTENSION", tmp_path / "_csrc.so")
    op_registry._load_csrc.cache_clear()
    yield tmp_path / "_csrc.so"
    op_registry._load_csrc.cache_clear()


def test_without_the_extension_torch_serves_and_csrc_says_how_to_build_it(extension: Path) -> None:
    assert ops.path_of("reshape_and_cache", "cpu") == "torch"
    assert bool((call("auto")[2, 1] == 1).all())
    with pytest.raises(UnsupportedError, match=r"path='csrc' of reshape_and_cache: .*not built: python setup.py build"):
        call("csrc")


def test_the_reason_that_the_build_left_is_told(extension: Path) -> None:
    extension.with_suffix(".txt").write_text(
        "not built: no C++ compiler was found\nand pages of detail\n", encoding="utf-8"
    )
    assert op_registry.csrc_status() == "not built: no C++ compiler was found"
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler was found"):
        call("csrc")


def test_a_note_of_a_file_that_is_gone_is_not_believed(extension: Path) -> None:
    extension.with_suffix(".txt").write_text("built with torch 2.13\n", encoding="utf-8")
    assert op_registry.csrc_status().startswith("not built: python setup.py")


def test_a_file_that_cannot_be_loaded_is_no_extension(extension: Path) -> None:
    extension.write_bytes(b"not a library")
    assert "cannot be loaded" in op_registry.csrc_status() and ops.path_of("copy_blocks", "cpu") == "torch"


def test_an_extension_of_another_revision_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.path_of("copy_blocks", "cpu") != "csrc":
        pytest.skip(op_registry.csrc_status())
    op_registry._load_csrc.cache_clear()
    monkeypatch.setattr(op_registry, "_REVISION", -1)
    try:
        assert "build it again" in op_registry.csrc_status() and ops.path_of("copy_blocks", "cpu") == "torch"
    finally:
        op_registry._load_csrc.cache_clear()


def test_auto_prefers_the_extension_and_it_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.path_of("reshape_and_cache", "cpu") != "csrc":
        pytest.skip(op_registry.csrc_status())
    assert "_csrc.so, built with torch" in op_registry.csrc_status()
    called = []
    real = op_registry.csrc_op("reshape_and_cache")
    module = import_module("pagedattn.ops.reshape_and_cache")  # the package's name of it is the function
    monkeypatch.setattr(module, "csrc_op", lambda name: called.append(name) or real)
    assert bool((call("auto")[2, 1] == 1).all()) and called == ["reshape_and_cache"]
    call("torch")
    assert called == ["reshape_and_cache"]


def test_a_gpu_prefers_csrc_then_triton_then_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(op_registry, "_load_csrc", lambda: (True, "here"))
    monkeypatch.setattr(op_registry, "has_triton", lambda: True)
    monkeypatch.setattr(op_registry, "_cuda_ready", lambda device: True)
    assert op_registry.path_of("copy_blocks", gpu) == "csrc"
    assert op_registry.choose("auto", gpu, "copy_blocks", "whole blocks") == "torch"
    monkeypatch.setattr(op_registry, "_cuda_ready", lambda device: False)
    assert op_registry.path_of("copy_blocks", gpu) == "triton"
    assert op_registry.path_of("reshape_and_cache_classic", gpu) == "torch"
    with pytest.raises(UnsupportedError, match="no kernels for cuda:0; build it there"):
        op_registry.choose("csrc", gpu, "copy_blocks")
    monkeypatch.setattr(op_registry, "has_triton", lambda: False)
    assert op_registry.path_of("copy_blocks", gpu) == "torch"


def test_a_gpu_without_the_extension_is_told_once(extension: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpu = torch.device("cuda", 7)  # of no other test: the warning is given once for a device
    op_registry.choose("auto", CPU, "copy_blocks")
    op_registry.choose("triton" if op_registry.has_triton() else "torch", gpu, "copy_blocks")
    op_registry.choose("auto", gpu, "merge_attn_states")  # has none on any machine
    op_registry.path_of("copy_blocks", gpu)
    assert not caplog.records
    for op in CSRC:
        op_registry.choose("auto", gpu, op)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pagedattn", "WARNING")
    for text in ("on cuda run by Triton or torch", "not built: python setup.py build_ext", "pagedattn env"):
        assert text in record.getMessage()


def test_ops_without_csrc_say_so() -> None:
    with pytest.raises(UnsupportedError, match="this op has none; use one of auto, triton, torch"):
        ops.merge_attn_states(torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 4), path="csrc")
    assert ops.path_of("merge_attn_states", "cpu") == "torch"


def test_a_path_or_an_op_that_is_not_there() -> None:
    with pytest.raises(InvalidInputError, match="path must be one of auto, csrc, triton, torch"):
        call("cuda")
    with pytest.raises(InvalidInputError, match="op must be"):
        ops.path_of("reshape", CPU)
