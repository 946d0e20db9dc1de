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


@pytest.mark.parametrize(
    ("stored", "options", "told"),
    [
        ("int8", ("--compile",), True),
        ("int8", (), False),
        ("fp8", ("--compile",), False),
        ("auto", ("--compile",), False),
    ],
)
def test_why_tells_which_compilers_take_no_scales(
    stored: str, options: tuple[str, ...], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(("why", *LAYER, "--kv-cache-dtype", stored, *options)) == 0
    assert ("torch.compile: inductor and aot_eager" in " ".join(capsys.readouterr().out.split())) == told
