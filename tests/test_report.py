"""What the conformance kit says of a backend: in a test, and to a person."""

from __future__ import annotations

import pytest

from pagedattn.backends.torch_native import TorchBackend
from pagedattn.errors import InvalidInputError, UnsupportedError
from pagedattn.spec import Capabilities, IntRange
from pagedattn.testing import CASES, Case, Report, conformance

FEW = (Case(), Case(sliding_window=5), Case(note="wide", head_dim=64))


class Narrow(TorchBackend):
    name = "NARROW"

    @classmethod
    def capabilities(cls) -> Capabilities:
        serves = super().capabilities()
        return Capabilities(
            devices=serves.devices, dtypes=serves.dtypes, head_dims=IntRange(1, 32), block_sizes=IntRange(), lse=True
        )


class Silent(Narrow):
    """Serves what it cannot: the kit gives it a window, which its builder and implementation know nothing of."""

    name = "SILENT"

    @classmethod
    def capabilities(cls) -> Capabilities:
        return TorchBackend.capabilities()

    class impl(TorchBackend.impl):
        def __init__(self, spec):  # type: ignore[no-untyped-def]
            super().__init__(spec.replace(sliding_window=None))


def test_a_backend_by_class_by_path_and_by_name() -> None:
    for backend in (TorchBackend, "pagedattn.backends.torch_native:TorchBackend", "TORCH"):
        report = conformance(backend, device="cpu", cases=FEW)
        report.raise_for_failures()
        assert (
            report.ok
            and len(report.passed) == 3
            and str(report) == "TORCH on cpu: conforms (3 passed, 0 failed, 0 refused)"
        )


def test_what_is_refused_is_told_by_feature_and_is_no_failure() -> None:
    report = conformance(Narrow, device="cpu", cases=FEW)
    report.raise_for_failures()
    lines = report.describe().splitlines()
    assert lines[0] == "NARROW on cpu: conforms (1 passed, 0 failed, 2 refused)"
    assert lines[1] == "  cases refused, by what they ask for: sliding_window (1), head_dim (1)" and len(lines) == 2
    assert report.refused["wide-float32"] == "head_dim=64 (serves 1..32)"


def test_a_failure_is_one_line_and_raises() -> None:
    report = conformance(Silent, device="cpu", cases=FEW)
    assert not report.ok and list(report.failed) == ["sliding_window=5-float32"]
    first, failed = str(report).splitlines()
    assert first == "SILENT on cpu: does not conform (2 passed, 1 failed, 0 refused)"
    assert failed.startswith("  failed sliding_window=5-float32: AssertionError: ") and "max error" in failed
    with pytest.raises(AssertionError, match=r"sliding_window=5-float32: .*max error"):
        report.raise_for_failures()


def test_one_that_refuses_everything_does_not_conform() -> None:
    report = conformance(Narrow, device="cpu", cases=[FEW[2], Case(head_dim=128)])
    assert not report.ok and "refused every case (0 passed, 0 failed, 2 refused)" in str(report)
    assert "  refused: head_dim=64 (serves 1..32)" in str(report).splitlines()
    with pytest.raises(AssertionError, match="refused every case"):
        report.raise_for_failures()


def test_progress_is_told_before_each_case() -> None:
    told: list[tuple[str, int, int]] = []
    conformance(Narrow, device="cpu", cases=FEW, tell=lambda *what: told.append(what))
    assert [one[1:] for one in told] == [(0, 3), (1, 3), (2, 3)] and told[2][0] == "wide-float32"


@pytest.mark.parametrize(
    ("backend", "error", "text"),
    [
        ("NOBODY", InvalidInputError, "backend must be one of"),
        ("nowhere:Backend", UnsupportedError, "No module named 'nowhere'; is it on PYTHONPATH?"),
        ("pagedattn.testing:Nobody", UnsupportedError, "no attribute 'Nobody'"),
        ("pagedattn.testing:Report", InvalidInputError, "a subclass of AttentionBackend"),
        (Report, InvalidInputError, "a subclass of AttentionBackend"),
    ],
)
def test_what_is_no_backend(backend: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("?", r"\?")):
        conformance(backend, cases=FEW)


def test_cases_are_public() -> None:
    assert len(CASES) >= 130 and all(isinstance(case, Case) for case in CASES)
