"""The conformance kit: every case a backend claims to serve, against the oracle; for our backends and others'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module

import torch

from ..backends.base import AttentionBackend
from ..backends.registry import get_backend
from .case import Case
from .cases import CASES
from .compare import assert_close, assert_lse_close
from .problem import Problem, make_problem


@dataclass(slots=True)
class Report:
    """What ran, what the backend refused (with its own reasons), and what failed."""

    passed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def raise_for_failures(self) -> None:
        """Raise AssertionError naming every failed case; also where nothing ran at all."""
        if self.failed:
            raise AssertionError("\n".join(f"{case}: {why}" for case, why in self.failed.items()))
        if not self.passed:
            raise AssertionError(f"the backend refused every case: {self.refused}")


def conformance(
    backend: str | type[AttentionBackend],
    *,
    device: torch.device | str | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    cases: Iterable[Case] | None = None,
) -> Report:
    """Run the suite against `backend`: a registered name, "module:Class", or the class.

    Each case also runs in each of `dtypes` where given. A case the backend rejects is reported with its reasons; what
    a backend must serve is for its own tests to say. One that needs clean caches gets unused slots of zeros.
    """
    cls = load(backend)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    report = Report()
    clean = cls.capabilities().needs_clean_cache
    for case in cases or CASES:
        for variant in [case.but(dtype=dtype, clean_cache=clean) for dtype in dtypes or (case.dtype,)]:
            name = f"{variant.id}-{str(variant.dtype).removeprefix('torch.')}"
            reasons = cls.rejections(variant.spec(where))
            if reasons:
                report.refused[name] = "; ".join(map(str, reasons))
                continue
            try:
                check(cls, make_problem(variant, where), name)
                report.passed.append(name)
            except Exception as error:
                report.failed[name] = f"{type(error).__name__}: {error}"
    return report


def check(backend: type[AttentionBackend], problem: Problem, name: str = "") -> None:
    """Output, LSE and the cache's bytes after one run, against the oracle.

    Raises:
        AssertionError: something differs.
    """
    case, rows = problem.case, sum(problem.case.query_lens)
    before = _bytes(problem)
    out, lse = problem.run(backend)
    softcap = case.softcap is not None
    assert_close(name or case.id, out[:rows], problem.expected, problem.naive, softcap=softcap)
    if case.lse:
        if lse is None or lse.dtype not in (torch.float32, torch.float64):
            raise AssertionError(f"{name}: return_lse gave {lse}")
        rounded = backend.capabilities().rounded_lse
        assert_lse_close(name or case.id, lse[:rows], problem.expected_lse, case.dtype, rounded)
    if problem.cache is None or problem.cache_after is None:
        return
    after = _bytes(problem)
    for side, got, want in zip(("key", "value"), after, map(_as_bytes, problem.cache_after), strict=True):
        if not torch.equal(got, want):
            raise AssertionError(f"{name}: {int((got != want).sum())} bytes of the {side} cache are wrong")
    if case.write and rows and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise AssertionError(f"{name}: nothing was written to the cache")


def load(backend: str | type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend class from a registered name, "module:Class", or itself."""
    if not isinstance(backend, str):
        return backend
    module, _, attribute = backend.partition(":")
    return getattr(import_module(module), attribute) if attribute else get_backend(backend)


def _bytes(problem: Problem) -> tuple[torch.Tensor, ...]:
    if problem.cache is None:
        return ()
    return _as_bytes(problem.cache.key), _as_bytes(problem.cache.value)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous().view(torch.uint8)
