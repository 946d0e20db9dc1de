"""Which variables the real vLLM hands to Ray's workers, and that a worker gets them, where Ray is installed too (make
vllm-test)."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import vllm_real

vllm_real.release()

from vllm.ray.ray_env import get_env_vars_to_copy  # noqa: E402

from pagedattn.integrations.vllm import plugin, releases  # noqa: E402


def test_vllm_names_ours_among_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(releases.RAY_PREFIXES, "")
    monkeypatch.setenv("PAGEDATTN_CHECK", "2")
    assert "PAGEDATTN_CHECK" not in _names()
    plugin.register()
    assert "PAGEDATTN_CHECK" in _names()


def test_a_worker_of_ray_gets_the_variables_and_finds_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = pytest.importorskip("ray")
    cloudpickle = pytest.importorskip("cloudpickle")
    from vllm.v1.executor import ray_utils

    if not hasattr(ray_utils, "RayWorkerWrapper"):
        pytest.skip("this release gives Ray's workers their variables when it starts them")
    monkeypatch.delenv("PAGEDATTN_CHECK", raising=False)
    # Its processes have the variables of now.
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        worker = ray.remote(ray_utils.RayWorkerWrapper).remote(rpc_rank=0)

        def ask(method: Any, *given: Any) -> Any:
            return ray.get(worker.execute_method.remote(method, *given))

        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which the worker cannot import
        level = cloudpickle.dumps(_check_level)
        assert ask(level) == 1
        monkeypatch.setenv(releases.RAY_PREFIXES, "")
        monkeypatch.setenv("PAGEDATTN_CHECK", "2")
        plugin.register()
        ask("update_environment_variables", [{name: os.environ[name] for name in _names() if name in os.environ}])
        assert ask(level) == 2 and ask(cloudpickle.dumps(_backend)).startswith("pagedattn.")
    finally:
        ray.shutdown()


def _names() -> set[str]:
    """Variables that vLLM copies."""
    return get_env_vars_to_copy(destination="workers")


def _check_level(worker: Any) -> int:
    from pagedattn import env

    return env.check_level()


def _backend(worker: Any) -> str:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    return AttentionBackendEnum.CUSTOM.get_path()
