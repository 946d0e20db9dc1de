"""The conformance kit: every case a backend claims to serve, against the oracle; for our backends and others'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from ..backends.base import AttentionBackend
from ..backends.registry import get_backend
from ..errors import InvalidInputError, UnsupportedError, describe_error
from ..formats.base import LayerCache
from ..spec import Capabilities
from .case import Case
from .cases import CASES, MLA_CASES
from .compare import assert_close, assert_lse_close
from .problem import Problem, make_problem
from .report import Report


def conformance(
    backend: str | type[AttentionBackend],
    *,
    device: torch.device | str | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    cases: Iterable[Case] | None = None,
    tell: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Run the suite against `backend`: a registered name, "module:Class", or the class.

    In a test: `conformance("mypkg.mod:Backend").raise_for_failures()`. By itself: `print(conformance(...))`, or
    `pagedattn conformance mypkg.mod:Backend`. A case the backend rejects is reported with its reasons; what a backend
    must serve is for its own tests to say. One that needs clean caches gets unused slots of zeros.

    Args:
        device: to run on; a GPU where there is one, else the CPU.
        dtypes: each case also runs in each of these; None leaves a case its own, float32.
        tell: called before each case with its name, how many are done, and how many there are.

    Raises:
        InvalidInputError: there is no such backend, or it is no AttentionBackend.
        UnsupportedError: its module cannot be imported.
    """
    cls = load(backend)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    report = Report(backend=cls.name, device=str(where))
    clean = cls.capabilities().needs_clean_cache
    asked = None if dtypes is None else tuple(dtypes)
    every = cases or (*CASES, *MLA_CASES)
    variants = [case.but(dtype=d, clean_cache=clean) for case in every for d in asked or (case.dtype,)]
    for done, variant in enumerate(variants):
        name = f"{variant.id}-{str(variant.dtype).removeprefix('torch.')}"
        if tell is not None:
            tell(name, done, len(variants))
        reasons = cls.rejections(variant.spec(where))
        if reasons:
            report.refused[name] = "; ".join(map(str, reasons))
            report.features.update({reason.feature for reason in reasons})
            continue
        try:
            check(cls, make_problem(variant, where), name)
            report.passed.append(name)
        except Exception as error:
            report.failed[name] = describe_error(error)
    return report


def check(backend: type[AttentionBackend], problem: Problem, name: str = "") -> None:
    """Output, LSE and the cache's bytes after one run, against the oracle.

    Raises:
        AssertionError: something differs.
    """
    case, rows = problem.case, sum(problem.case.query_lens)
    before = _bytes(problem)
    out, lse = problem.run(backend)
    serves = backend.capabilities()
    fp8 = problem.fp8 if serves.rounds_queries(problem.spec) else None
    gates: dict[str, Any] = {"softcap": case.softcap is not None, "condition": problem.condition}
    gates |= {"fp8_queries": fp8 is not None, "rounded_states": serves.rounded_states}
    assert_close(name or case.id, out[:rows], problem.expected, problem.naive if fp8 is None else fp8, **gates)
    if case.lse:
        if lse is None or lse.dtype not in (torch.float32, torch.float64):
            raise AssertionError(f"{name}: return_lse gave {lse}")
        gates = lse_gates(serves, case)
        if fp8 is not None and problem.fp8_lse is not None:
            gates["off"] += lse_error(problem.fp8_lse, problem.expected_lse)
        assert_lse_close(name or case.id, lse[:rows], problem.expected_lse, case.dtype, **gates)
    if problem.cache is None or problem.cache_after is None:
        return
    after = _bytes(problem)
    for plane, (got, want) in enumerate(zip(after, map(_as_bytes, _planes(problem.cache_after)), strict=True)):
        if not torch.equal(got, want):
            what = ("keys", "values", "scales of its own", "scales of its own", "open keys", "open values")[plane]
            raise AssertionError(f"{name}: {int((got != want).sum())} bytes of the cache's {what} are wrong")
    if case.write and rows and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise AssertionError(f"{name}: nothing was written to the cache")


def lse_gates(capabilities: Capabilities, case: Case) -> dict[str, Any]:
    """What `assert_lse_close` allows beyond its dtype's: a logit by products of fp8 takes head_dim / 32 instructions
    for each of two parts of a query, each of which may take off a unit of the 13th bit."""
    fp8 = capabilities.fp8_products and case.kv_cache_dtype.startswith("fp8")
    return {"rounded": capabilities.rounded_lse, "off": case.head_dim / 16 * 2**-13 if fp8 else 0.0}


def lse_error(naive: torch.Tensor, expected: torch.Tensor) -> float:
    """What `assert_lse_close` takes for `off` where the LSE of a naive implementation is as wrong: twice its error."""
    seen = expected.isfinite()
    if not seen.any():
        return 0.0
    return 2 * float(((naive - expected)[seen].abs() / (1 + expected[seen].abs())).max())


def load(backend: str | type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend class from a registered name, "module:Class", or itself; raises as `conformance`."""
    cls: object = backend
    if isinstance(backend, str):
        module, _, attribute = backend.partition(":")
        try:
            cls = getattr(import_module(module), attribute) if attribute else get_backend(backend)
        except (ImportError, AttributeError) as error:
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            hint = "; is it on PYTHONPATH?" if absent else ""
            raise UnsupportedError(f"backend {backend} cannot be loaded: {error}{hint}") from error
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise InvalidInputError("backend", "a subclass of AttentionBackend, its name or module:Class", repr(cls))
    return cls


def _bytes(problem: Problem) -> tuple[torch.Tensor, ...]:
    if problem.cache is None:
        return ()
    return tuple(map(_as_bytes, _planes(problem.cache)))


def _planes(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    return cache.planes if cache.recent is None else (*cache.planes, *cache.recent.planes)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous().view(torch.uint8)
