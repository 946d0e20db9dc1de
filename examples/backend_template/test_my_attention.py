"""The backend against the oracle: all that it says it serves, in every dtype it names, and that it serves enough."""

from __future__ import annotations

from my_attention import MyBackend

from pagedattn.testing import conformance


def test_it_conforms() -> None:
    report = conformance(MyBackend, dtypes=MyBackend.capabilities().dtypes)
    report.raise_for_failures()
    # A backend that refuses everything has no failures either. What it must serve is for this test to say.
    assert len(report.passed) >= 270, report.describe()
