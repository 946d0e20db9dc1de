"""Every PAGEDATTN_* variable: a strict parser, few of them, and nobody else reads the environment for one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import pagedattn
from pagedattn import env
from pagedattn.errors import InvalidInputError

ROOT = Path(pagedattn.__file__).parent
READERS: dict[str, tuple[Callable[[], object], object, dict[str, object]]] = {
    "PAGEDATTN_BACKEND": (
        env.backend,
        None,
        {"TRITON": "TRITON", "TORCH ": "TORCH", " ": None, "prefill=A,decode=B": "prefill=A,decode=B"},
    ),
    "PAGEDATTN_CHECK": (env.check_level, 1, {"0": 0, "1": 1, "2": 2}),
    "PAGEDATTN_FLASH_ATTN": (env.flash_attn_version, None, {"2": 2, "3": 3}),
    "PAGEDATTN_REPLAY": (env.replay, True, {"0": False, "1": True}),
    "PAGEDATTN_LOG": (env.log_level, None, {"debug": "DEBUG", "info": "INFO", "error": "ERROR"}),
    "PAGEDATTN_TRACEBACK": (env.traceback, False, {"0": False, "1": True}),
    "PAGEDATTN_PLUGINS": (env.plugins_enabled, True, {"0": False, "1": True}),
    "PAGEDATTN_VLLM_DEFAULT": (env.vllm_default, False, {"0": False, "1": True}),
}
BAD = {
    "PAGEDATTN_CHECK": ("3", "-1", "yes", ""),
    "PAGEDATTN_FLASH_ATTN": ("1", "4", "FA3"),
    "PAGEDATTN_REPLAY": ("yes", "2"),
    "PAGEDATTN_LOG": ("INFO", "trace", ""),
    "PAGEDATTN_TRACEBACK": ("yes", ""),
    "PAGEDATTN_PLUGINS": ("2",),
    "PAGEDATTN_VLLM_DEFAULT": ("yes", ""),
}


def test_there_are_few_and_all_are_read_here() -> None:
    assert sorted(READERS) == sorted(env.VARIABLES) and len(env.VARIABLES) <= 8
    assert all(len(meaning) > 20 for meaning in env.VARIABLES.values())


@pytest.mark.parametrize("name", sorted(READERS))
def test_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, default, values = READERS[name]
    monkeypatch.delenv(name, raising=False)
    assert read() == default
    for text, value in values.items():
        monkeypatch.setenv(name, text)
        assert read() == value


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_value_that_is_none_of_them_is_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidInputError, match=rf"{name} must be one of .*, got '{text}'; correct or unset"):
        READERS[name][0]()


def test_no_other_module_reads_the_environment_for_one() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.name != "env.py" and re.search(r"(environ|getenv)[^\n]*PAGEDATTN_", path.read_text(encoding="utf-8")):
            found.append(path)
    assert not found
