"""How the real vLLM finds, selects and refuses our backend, on a CPU (make vllm-test)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm_real
from vllm_real import BACKEND
from vllm_steps import make_layer

vllm_real.release()

from vllm import plugins  # noqa: E402
from vllm.config.attention import AttentionConfig  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backends import registry  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402

from pagedattn.integrations.vllm import refusals, register  # noqa: E402
from pagedattn.integrations.vllm.backend import PagedAttentionBackend  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
GROUP = "vllm.general_plugins"


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    for name in ("PAGEDATTN_VLLM_DEFAULT", "PAGEDATTN_BACKEND", "VLLM_PLUGINS", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of an installed pagedattn, with the entry points of pyproject.toml alone."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    at = lines.index(f'[project.entry-points."{GROUP}"]')
    point = lines[at + 1].replace('"', "")
    folder = tmp_path / "pagedattn-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pagedattn\nVersion: 0\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{point}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own selection on a Hopper GPU, whose module imports compiled operations that are not needed for it."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase

    monkeypatch.setattr(CudaPlatformBase, "get_device_capability", classmethod(lambda *_: DeviceCapability(9, 0)))
    return CudaPlatformBase


def asked(**options: Any) -> AttentionSelectorConfig:
    """What vLLM asks of a backend for a layer."""
    given: dict[str, Any] = {"head_size": 128, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": None}
    return AttentionSelectorConfig(**given | options)


def reasons(**options: Any) -> list[str]:
    """Why vLLM refuses the layer for our backend."""
    config = asked(**options)
    return PagedAttentionBackend.validate_configuration(device_capability=DeviceCapability(9, 0), **config._asdict())


def test_the_entry_point_registers_the_backend(wheel: None) -> None:
    with pytest.raises(ValueError, match="must be registered"):
        AttentionBackendEnum.CUSTOM.get_class()
    plugins.load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_class() is PagedAttentionBackend
    assert AttentionBackendEnum.FLASH_ATTN.get_path() != BACKEND
    assert AttentionConfig(backend="CUSTOM").backend is AttentionBackendEnum.CUSTOM


@pytest.mark.parametrize(("allowed", "found"), [("pagedattn", True), ("other,pagedattn", True), ("other", False)])
def test_a_variable_of_vllm_filters_plugins(
    wheel: None, allowed: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    plugins.load_general_plugins()
    assert (AttentionBackendEnum.CUSTOM in registry._ATTN_OVERRIDES) == found


def test_vllm_selects_it_where_it_is_asked_for(platform: Any) -> None:
    register()
    assert platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked()) == BACKEND
    with pytest.raises(ValueError, match="a bfloat16 cache needs queries of bfloat16, not float16"):
        platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked(kv_cache_dtype="bfloat16"))


def test_it_is_the_default_where_a_variable_says_so(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_VLLM_DEFAULT", "1")
    register()
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is PagedAttentionBackend
    assert platform.get_attn_backend_cls(None, asked()) == BACKEND


SERVED: list[dict[str, Any]] = [
    {},
    {"head_size": 64, "dtype": torch.float32},
    {"head_size": 80},
    {"head_size": 512},
    {"has_sink": True},
    {"kv_cache_dtype": "float16"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"block_size": 16},
    {"block_size": 784},
    {"attn_type": "encoder_only"},
    {"attn_type": "encoder_decoder"},
    {"use_kv_connector": True},
    {"use_batch_invariant": True},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"head_size": 513}, "head_dim"),
    ({"use_mla": True}, "MLA=True (serves keys and values of heads): start vLLM with another attention backend"),
    ({"use_sparse": True}, "sparse attention=True (serves all keys"),
    ({"kv_cache_dtype": "bfloat16"}, "a bfloat16 cache needs queries of bfloat16, not float16"),
    (
        {"kv_cache_dtype": "fp8_per_token_head"},
        "kv_cache_dtype=fp8_per_token_head (serves auto, the model's dtype, fp8, fp8_e5m2, and int8_per_token_head "
        "with vLLM 0.33): pass --kv-cache-dtype",
    ),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype=nvfp4 (serves auto"),
    ({"dtype": torch.float64}, "dtype=float64 (serves float16, bfloat16, float32): pass --dtype auto"),
    ({"block_size": 24}, "block_size not supported"),  # vLLM compares this text
    ({"attn_type": "encoder"}, "attention type encoder not supported"),
    ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    ({"use_per_head_quant_scales": True}, "scales per head=True (serves a scale of"),
    ({"use_non_causal": True}, "non-causal attention not supported"),
]
# Asked by later releases only.
LATER_SERVED = [{"has_sliding_window": True}]
LATER_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_adaptive_verification": True}, "device-cpu query lens mismatch"),
    ({"use_dcp": True}, "parallelism=True (serves one rank for all keys): pass --decode-context-parallel-size 1"),
    ({"use_pcp": True}, "parallelism=True (serves one rank for all keys): pass --prefill-context-parallel-size 1"),
    ({"use_rswa": True}, "R-SWA not supported"),
]


def is_asked(options: dict[str, Any]) -> bool:
    return set(options) <= set(AttentionSelectorConfig._fields)


@pytest.mark.parametrize("options", [*filter(is_asked, SERVED + LATER_SERVED)], ids=str)
def test_what_is_served_is_refused_for_no_reason(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    assert reasons(**options) == []


@pytest.mark.parametrize(
    ("options", "reason"), [*REFUSED, *(row for row in LATER_REFUSED if is_asked(row[0]))], ids=str
)
def test_what_is_not_served_is_refused_by_name(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    assert reason in reasons(**options)[0]


def test_int8_caches_are_served_where_vllm_asks_how_rows_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    said = reasons(kv_cache_dtype="int8_per_token_head")
    if vllm_real.caches_are_packed():
        assert said == []
    else:
        assert "kv_cache_dtype=int8_per_token_head (serves auto" in said[0] and "with vLLM 0.33" in said[0]


def test_vllm_still_compares_its_text_on_block_sizes(platform: Any) -> None:
    """Else ours could stand in its place, as for other options."""
    source = Path(sys.modules[platform.__module__].__file__ or "").read_text(encoding="utf-8")
    assert 'reasons == ["block_size not supported"]' in source


def test_vllm_knows_the_options_that_messages_name() -> None:
    from vllm import envs

    source = (Path(envs.__file__).parent / "engine/arg_utils.py").read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z-]+", Path(refusals.__file__).read_text(encoding="utf-8")))
    assert len(options) == 4 and all(f'"{option}"' in source for option in options)


def test_batch_invariance_makes_layers_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(use_batch_invariant=True) == ["batch invariance not supported"], "TORCH promises no bits"
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TRITON")
    assert not make_layer().impl.attention.spec.deterministic
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert make_layer().impl.attention.spec.deterministic


def test_vllm_splits_its_blocks_into_powers_of_two() -> None:
    from vllm.v1.worker.utils import select_common_block_size

    sizes = [select_common_block_size(size, [PagedAttentionBackend]) for size in (16, 48, 64, 784, 1024)]
    assert sizes == [16, 16, 64, 16, 256]
