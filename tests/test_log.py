"""The log: PAGEDATTN_LOG sends it to standard error; without it the logger is the application's."""

from __future__ import annotations

import pytest
from processes import environment, run_python

LAYER = "import pagedattn; pagedattn.Attention(8, 64, 2, backend='TORCH')"


def said(code: str, level: str | None) -> tuple[str, str]:
    variables = environment(without=["PAGEDATTN_"]) | ({} if level is None else {"PAGEDATTN_LOG": level})
    done = run_python("-c", code, env=variables)
    done.check_returncode()
    return done.stdout, done.stderr


def test_the_choice_is_told_on_standard_error_where_it_was_asked_for() -> None:
    out, err = said(LAYER, "info")
    assert not out and err.startswith("INFO pagedattn: attention backend: TORCH")
    assert said(LAYER, "warning") == said(LAYER, None) == ("", "")


def test_an_application_with_handlers_is_told_once() -> None:
    _, err = said(f"import logging; logging.basicConfig(level=logging.INFO); {LAYER}", "info")
    assert err.count("attention backend") == 1 and err.startswith("INFO:pagedattn:")


def test_without_the_variable_the_logger_is_not_touched_and_warnings_are_seen() -> None:
    code = "import logging; log = logging.getLogger('pagedattn'); log.setLevel(10); import pagedattn"
    out, err = said(f"{code}; print(log.level, log.handlers); log.warning('careful')", None)
    assert (out, err) == ("10 []\n", "careful\n")


@pytest.mark.parametrize("level", ["verbose", ""])
def test_a_bad_level_is_mentioned_and_the_import_goes_on(level: str) -> None:
    message = (
        f"PAGEDATTN_LOG must be one of debug, info, warning, error, got {level!r}; correct or unset the variable\n"
    )
    assert said(LAYER, level) == ("", message)
