"""Backends of other packages: found, used, and in nobody's way where they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pagedattn
from pagedattn import Attention, AttentionSpec, CommonAttentionMetadata, list_backends, register_backend, select_backend
from pagedattn.backends import registry
from pagedattn.backends.base import AttentionMetadata, Availability
from pagedattn.backends.torch_native import TorchBackend
from pagedattn.errors import InvalidInputError, UnsupportedError

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDATTN_BACKEND", raising=False)
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))


@pytest.mark.parametrize("target", ["no_such_module_anywhere:Backend", f"{__name__}:NoSuchClass"])
def test_a_backend_that_cannot_be_loaded_is_in_nobodys_way(target: str) -> None:
    register_backend("BROKEN", target)
    chosen = select_backend(SPEC)
    assert chosen.name == "TORCH" and "cannot be loaded" in str(chosen.rejections["BROKEN"][0])
    assert list_backends()["BROKEN"].startswith("unavailable: ")
    with pytest.raises(UnsupportedError, match=r"BROKEN .* cannot be loaded"):
        select_backend(SPEC, "BROKEN")


class RaisingBackend(TorchBackend):
    @classmethod
    def availability(cls) -> Availability:
        raise OSError("libacme.so: cannot open shared object file")


@pytest.mark.parametrize(("target", "said"), [("RaisingBackend", "OSError: libacme.so"), ("pytest", "AttributeError")])
def test_a_backend_that_raises_is_in_nobodys_way(target: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._backends, "RAISING", f"{__name__}:{target}")
    chosen = select_backend(SPEC)
    assert chosen.name == "TORCH" and said in str(chosen.rejections["RAISING"][0])
    assert list_backends()["RAISING"].startswith(f"unavailable: {said}")
    with pytest.raises(UnsupportedError, match=rf"backend RAISING, asked for by argument, .*\n.*{said}"):
        select_backend(SPEC, "RAISING")


def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """An installed package with an entry point, as pip would leave it."""
    (tmp_path / "acme_attention.py").write_text(body, encoding="utf-8")
    info = tmp_path / "acme_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-attention\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[pagedattn.backends]\nACME = acme_attention:AcmeBackend\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_attention", raising=False)
    registry._installed.cache_clear()


ACME = """
from pagedattn.backends.torch_native import TorchBackend
class AcmeBackend(TorchBackend):
    name = "ACME"
"""


@pytest.fixture
def _no_plugins_afterwards() -> Iterator[None]:
    yield
    registry._installed.cache_clear()


@pytest.mark.usefixtures("_no_plugins_afterwards")
def test_installed_packages_bring_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin(tmp_path, monkeypatch, ACME)
    assert list_backends()["ACME"] == torch.__version__
    assert (select_backend(SPEC).name, select_backend(SPEC, "ACME").name) == ("TORCH", "ACME")
    assert pagedattn.Attention(4, 32, backend="decode=ACME").selection.decode.name == "ACME"
    monkeypatch.setenv("PAGEDATTN_PLUGINS", "0")
    assert "ACME" not in list_backends()
    with pytest.raises(InvalidInputError, match="backend must be one of"):
        select_backend(SPEC, "ACME")


@pytest.mark.usefixtures("_no_plugins_afterwards")
def test_a_plugin_that_fails_otherwise_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin(tmp_path, monkeypatch, "raise OSError('libcuda.so.1: cannot open shared object file')")
    assert select_backend(SPEC).name == "TORCH"


class Plain(AttentionMetadata):
    """Of somebody who wrote a constructor of his own."""

    def __init__(self, common: CommonAttentionMetadata) -> None:
        self.common = common


def test_metadata_that_skip_the_base_constructor_are_served() -> None:
    layer, common = Attention(4, 32, 2, backend="TORCH"), CommonAttentionMetadata.from_lengths([3], [3])
    query, key, value = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    metadata = Plain(common)
    for _ in range(2):
        assert torch.equal(layer(query, key, value, None, metadata), layer(query, key, value, None, common))
    assert metadata.plan is None and not metadata.shares_prefix
    with pytest.raises(InvalidInputError, match="max_query_len must be at least 3"):
        layer(query, key, value, None, common.replace(max_query_len=2))
