"""What serves, but less well than it could, says so, with the remedy."""

from __future__ import annotations

import pytest

from pagedattn.backends.base import Availability
from pagedattn.backends.torch_native import TorchBackend
from pagedattn.cli import command as cli

LAYER = ("--heads", "8", "--head-dim", "64", "--dtype", "fp32", "--device", "cpu")


@pytest.mark.parametrize("reason", ["", "a slow build"])
def test_why_and_backends_name_it(
    reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Availability(ok=True, version="7", reason=reason, hint="pip install fast" if reason else "")
    monkeypatch.setattr(TorchBackend, "availability", lambda: state)
    said = []
    for command in (("why", *LAYER, "--backend", "TORCH"), ("backends",)):
        assert cli.main(command) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert ("TORCH: a slow build (pip install fast)" in said[0]) == bool(reason)
    assert ("7; a slow build (pip install fast)" in said[1]) == bool(reason)
    assert ("slow" in said[0] + said[1]) == bool(reason)
