"""What vLLM and its users see of the backend before a model runs: registration, releases, refusals, variables."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_steps  # noqa: F401, which puts stand-ins where vLLM is not installed

from pagedattn.backends.triton import backend as triton_backend
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.integrations import vllm as integration
from pagedattn.integrations.vllm import chosen, plugin, releases
from pagedattn.integrations.vllm.backend import PagedAttentionBackend
from pagedattn.integrations.vllm.kernels import serving_backend, why_not

ROOT = Path(__file__).parent.parent.parent
HOPPER = (9, 0)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, str]]:
    """What was registered, of a vLLM of a tested release."""
    from vllm.v1.attention.backends import registry

    found: dict[Any, str] = {}
    monkeypatch.setattr(registry, "register_backend", found.__setitem__)
    monkeypatch.setattr(releases, "installed", lambda: "0.24.0")
    for name in [name for name in os.environ if name.startswith("PAGEDATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", raising=False)
    yield found


def test_the_wheel_names_what_vllm_calls() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^\[project\.entry-points\."{releases.GROUP}"\]\n{releases.NAME} = "(.*)"$', text, re.MULTILINE)
    assert found and EntryPoint(releases.NAME, found[1], releases.GROUP).load() is integration.register


def test_registration_may_be_repeated_and_imports_no_backend(
    registered: dict[Any, str], caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    plugin.register()
    ((member, path),) = registered.items()
    module, _, name = path.rpartition(".")
    assert member.name == "CUSTOM" and (import_module(module), name) == (chosen, "Backend")
    assert not caplog.records and "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY" not in os.environ


def test_one_variable_takes_the_place_of_flash_attn(
    registered: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_VLLM_DEFAULT", "1")
    plugin.register()
    paths = {member.name: path for member, path in registered.items()}
    module, _, name = paths.pop("FLASH_ATTN").rpartition(".")
    assert getattr(import_module(module), name) is PagedAttentionBackend and [*paths] == ["CUSTOM"]


@pytest.mark.parametrize(
    ("before", "after"), [("", "PAGEDATTN_"), ("TRITON_", "TRITON_,PAGEDATTN_"), ("PAGEDATTN_", "PAGEDATTN_")]
)
def test_rays_workers_get_the_variables(
    registered: dict[Any, str], monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", before)
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    plugin.register()
    plugin.register()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == after


@pytest.mark.parametrize("release", ["0.23.1", "0.34.0", "1.0.0rc1", "main"])
def test_a_release_that_was_not_tested_is_told(
    registered: dict[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: release)
    with caplog.at_level(logging.WARNING, "pagedattn"):
        plugin.register()
    (record,) = caplog.records
    assert f"vLLM {release} was not tested" in record.message and "pip install 'vllm>=0.24,<0.34'" in record.message
    assert len(registered) == 1, "it is tried all the same"


@pytest.mark.parametrize("release", ["0.24.0", "0.24.1.dev3+cu130", "0.30", "0.33.2"])
def test_tested_series(release: str) -> None:
    assert not releases.why_untested(release)


def test_without_vllm_there_is_nothing_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed", lambda: None)
    with pytest.raises(UnsupportedError, match="vLLM is not installed here; pip install vllm"):
        plugin.register()
    assert releases.describe() == ["not installed (pagedattn's backend for it was tested with 0.24 to 0.33)"]


def test_what_keeps_vllm_from_finding_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[Any] = []
    for name in ("TRITON_CACHE_DIR", *(name for name in os.environ if name.startswith("PAGEDATTN_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(releases, "installed", lambda: "0.33.0")
    monkeypatch.setattr(releases, "entry_points", lambda group: points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert releases.describe() == [
        "0.33.0",
        "finds no plugin 'pagedattn': pagedattn is imported from a folder; pip install it",
    ]
    points.append(SimpleNamespace(name="pagedattn"))
    assert releases.describe() == ["0.33.0"]
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert (
        releases.describe()[1] == "loads no plugin 'pagedattn': VLLM_PLUGINS='other'; add pagedattn to it, or unset it"
    )
    monkeypatch.setenv("VLLM_PLUGINS", "other,pagedattn")
    assert releases.describe() == ["0.33.0"]


def test_what_rays_workers_get_is_told(registered: dict[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "entry_points", lambda group: [SimpleNamespace(name="pagedattn")])
    for name in ("TRITON_CACHE_DIR", "VLLM_PLUGINS", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):
        monkeypatch.delenv(name, raising=False)
    assert releases.describe() == ["0.24.0"]
    monkeypatch.setenv("PAGEDATTN_CHECK", "0")
    monkeypatch.setenv("PAGEDATTN_LOG", "info")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    _, own, others = releases.describe()
    assert own.startswith("Ray's workers get PAGEDATTN_CHECK, PAGEDATTN_LOG: the plugin adds PAGEDATTN_ to VLLM_RAY_")
    assert others.startswith("Ray's workers do not get TRITON_CACHE_DIR: add it to VLLM_RAY_EXTRA_ENV_VARS_TO_COPY (")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "OTHER,TRITON_CACHE_DIR")
    assert releases.describe() == ["0.24.0", own]


def test_which_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDATTN_BACKEND", raising=False)
    assert serving_backend() == ("TRITON" if torch.cuda.is_available() else "TORCH")
    for name in ("TORCH", "triton"):
        monkeypatch.setenv("PAGEDATTN_BACKEND", name)
        assert serving_backend() == name.upper()
    monkeypatch.setenv("PAGEDATTN_BACKEND", "FLASHINFER")
    with pytest.raises(InvalidInputError, match=r"TRITON or TORCH inside vLLM, got FLASHINFER.*its own backend"):
        serving_backend()


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TRITON as where kernels are not interpreted; what it says of itself is remembered."""
    says = triton_backend.TritonBackend.capabilities
    says.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(triton_backend, "interpreted", lambda: False)
        yield
    says.cache_clear()


@pytest.mark.usefixtures("_compiled")
def test_refusals_have_the_reasons_of_the_librarys_own_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    served = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "has_sink": True,
        "capability": HOPPER,
    }
    assert why_not(**served) is None
    for dtype in ("bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", None):
        assert why_not(**served | {"kv_cache_dtype": dtype}) is None
    for change, said in (
        ({"head_size": 576}, "head_dim=576 (serves 1..512)"),
        ({"capability": (7, 5)}, "capability=(7, 5) (serves at least (8, 0))"),
        ({"kv_cache_dtype": "float16"}, "a float16 cache needs queries of float16, not bfloat16"),
        ({"kv_cache_dtype": "fp8", "capability": (8, 0)}, "use fp8_e5m2"),
    ):
        reason = why_not(**served | change)
        assert reason is not None and said in reason, reason
    monkeypatch.setenv("PAGEDATTN_BACKEND", "FLASH_ATTN")
    assert "TRITON or TORCH inside vLLM" in str(why_not(**served))


def test_facts_that_vllm_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = PagedAttentionBackend
    assert backend.get_name() == "CUSTOM" and backend.get_supported_kernel_block_sizes() == [16, 32, 64, 128, 256]
    assert backend.supports_sink() and backend.supports_sliding_window()
    assert [backend.supports_attn_type(x) for x in ("decoder", "encoder_only", "encoder_decoder", "encoder")] == [
        True
    ] * 3 + [False]
    assert backend.get_kv_cache_shape(7, 16, 2, 32) == (7, 2, 16, 2, 32)
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    assert backend.supports_batch_invariance()
    levels = [backend.get_builder_cls().get_cudagraph_support(None, None).name]
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TORCH")
    assert not backend.supports_batch_invariance()
    assert [*levels, backend.get_builder_cls().get_cudagraph_support(None, None).name] == ["UNIFORM_BATCH", "NEVER"]
