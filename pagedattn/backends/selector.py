"""Which backend serves a spec: argument > use_backend() > PAGEDATTN_BACKEND > measured priority, with every reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

from .. import env
from ..errors import InvalidInputError, NoBackendError, UnsupportedError, describe_error
from ..spec import AttentionSpec
from ..spec.capabilities import Rejection
from .base import AttentionBackend
from .registry import backend_names, get_backend

_log = logging.getLogger("pagedattn")
_requested: ContextVar[str | None] = ContextVar("pagedattn_backend", default=None)
_logged: set[tuple[str, str, str]] = set()

# Per device and phase, best first, by bench/results/h200/backends.json: time of 32 layers and one plan. FLASHINFER is
# fast as well, but is left to those who ask for it: what is not prebuilt it compiles at first use, for minutes, and
# fails there without a compiler.
PRIORITY = {
    "cuda": {"prefill": ("FLASH_ATTN", "TRITON", "TORCH"), "decode": ("TRITON", "FLASH_ATTN", "TORCH")},
    "cpu": {"prefill": ("TORCH",), "decode": ("TORCH",)},
}
# Of absorbed latent attention, in both phases; TRITON leads with its kernel for Hopper (`is_fastest_for`).
LATENT_PRIORITY = {"cuda": ("FLASH_MLA", "FLASH_ATTN", "TRITON", "TORCH"), "cpu": ("TORCH",)}
# Taken for the block size where none is given: a backend that cannot serve it is chosen by name only.
_USUAL_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asked for (None: nothing, choose) per phase, and where it was said."""

    prefill: str | None
    decode: str | None
    source: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Who serves a spec, the block size it wants of a cache, and why every other backend was passed over."""

    spec: AttentionSpec
    prefill: type[AttentionBackend]
    decode: type[AttentionBackend]
    block_size: int
    source: str
    rejections: Mapping[str, tuple[Rejection, ...]]
    scales: str = ""  # where an fp8 cache's scales come from

    @property
    def name(self) -> str:
        """The winner's name, or `prefill=A,decode=B`."""
        if self.prefill is self.decode:
            return self.prefill.name
        return f"prefill={self.prefill.name},decode={self.decode.name}"

    @property
    def served_by(self) -> str:
        """The name, with the library behind it where there are several: `FLASH_ATTN (FA3 via flash_attn_interface)`."""
        prefill, decode = (_with_variant(backend, self.spec) for backend in (self.prefill, self.decode))
        return prefill if self.prefill is self.decode else f"prefill={prefill},decode={decode}"

    def describe(self) -> str:
        """One line on the winner, and one per backend on why it lost."""
        lines = [f"{self.served_by} (chosen by {self.source}, block size {self.block_size})"]
        if self.scales:
            lines.append(f"  scales of the {self.spec.kv_cache_dtype} cache: {self.scales}")
        for name, reasons in self.rejections.items():
            lines.append(f"  not {name}: " + ("; ".join(map(str, reasons)) or why_passed_over(name, self.spec)))
        return "\n".join(lines)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Layers built inside the block use backend `name` (`TRITON`, or `prefill=TRITON,decode=TORCH`)."""
    parse_request(name, "use_backend")
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def current_request(argument: str | None = None) -> Request:
    """Who is asked for right now. Read when a layer is built, never while it runs."""
    for name, source in (
        (argument, "argument"),
        (_requested.get(), "use_backend"),
        (env.backend(), "PAGEDATTN_BACKEND"),
    ):
        if name is not None:
            return parse_request(name, source)
    return Request(None, None, "measured priority")


def parse_request(text: str, source: str) -> Request:
    """`NAME`, or `prefill=NAME,decode=NAME` with either part left out.

    Raises:
        InvalidInputError: an unknown name (says the nearest) or an unknown phase.
    """
    if "=" not in text:
        return Request(_known(text, source), _known(text, source), source)
    phases: dict[str, str] = {}
    for part in text.split(","):
        phase, _, name = (piece.strip() for piece in part.partition("="))
        if phase not in ("prefill", "decode") or phase in phases:
            raise InvalidInputError(source, "NAME, or prefill=NAME,decode=NAME", repr(text))
        phases[phase] = _known(name, source)
    return Request(phases.get("prefill"), phases.get("decode"), source)


def list_backends() -> dict[str, str]:
    """Every known backend and its version here, or why it is unavailable."""
    out = {}
    for name in backend_names():
        try:
            state = get_backend(name).availability()
            out[name] = state.version if state.ok else f"unavailable: {state.reason} ({state.hint})"
        except Exception as error:  # whatever another package's backend raises must not hide the rest
            out[name] = f"unavailable: {_said(error)}"
    return out


def select_backend(spec: AttentionSpec, backend: str | Request | None = None) -> Selection:
    """Choose who serves `spec`.

    Raises:
        NoBackendError: the one asked for cannot (with its reasons), or none can (with those of all).
        InvalidInputError: an unknown name.
    """
    request = backend if isinstance(backend, Request) else current_request(backend)
    rejections = {name: _reasons(name, spec) for name in backend_names()}
    prefill = _pick("prefill", request, spec, rejections)
    decode = _pick("decode", request, spec, rejections)
    if prefill is not decode:
        _check_composite(prefill, decode, spec)
    size = spec.block_size or max(b.preferred_block_size(spec) for b in (prefill, decode))
    losers = {name: reasons for name, reasons in rejections.items() if name not in (prefill.name, decode.name)}
    selection = Selection(spec, prefill, decode, size, request.source, losers)
    _log_once(selection)
    if spec.device_type != "cpu":
        for served in dict.fromkeys((prefill, decode)):
            state = served.availability()
            if state.reason and state.hint:
                _warn_once(f"{served.name}: {state.reason}; {state.hint}")
    return selection


def _pick(
    phase: str, request: Request, spec: AttentionSpec, rejections: Mapping[str, tuple[Rejection, ...]]
) -> type[AttentionBackend]:
    asked = request.prefill if phase == "prefill" else request.decode
    if asked is not None:
        if rejections[asked]:
            reasons = "\n".join(f"  {reason}" for reason in rejections[asked])
            raise NoBackendError(f"backend {asked}, asked for by {request.source}, cannot serve this:\n{reasons}")
        return get_backend(asked)
    usual = spec if spec.block_size else spec.replace(block_size=_USUAL_BLOCK_SIZE)
    for name in _order(phase, spec):
        reasons = rejections[name] or (() if spec.block_size or not spec.uses_cache else _reasons(name, usual))
        if not reasons:
            return get_backend(name)
        if spec.block_size and not _reasons(name, spec.replace(block_size=None)):
            why = next(reason for reason in reasons if reason.feature == "block_size")
            _warn_once(f"block size {spec.block_size} excludes {name}, which is faster: {why}")
    everyone = "\n".join(f"  {name}: " + "; ".join(map(str, why)) for name, why in rejections.items())
    raise NoBackendError(f"no backend can serve {spec}:\n{everyone}")


def _order(phase: str, spec: AttentionSpec) -> list[str]:
    """Backends in the order of a phase's priority. One that was measured to be the fastest at this spec comes first;
    one that rounds queries to fp8 comes last: precision is given up only where that backend is asked for by name, or
    where no other serves."""
    if spec.latent_dim is None:
        names = PRIORITY.get(spec.device_type, PRIORITY["cpu"])[phase]
    else:
        names = LATENT_PRIORITY.get(spec.device_type, LATENT_PRIORITY["cpu"])
    return sorted(names, key=lambda name: (_rounds_queries(name, spec), not _is_fastest(name, phase, spec)))


def why_passed_over(name: str, spec: AttentionSpec) -> str:
    """Why a backend that serves `spec` was not chosen."""
    return "lower priority" + (", as it rounds queries and probabilities to fp8" if _rounds_queries(name, spec) else "")


def _rounds_queries(name: str, spec: AttentionSpec) -> bool:
    return get_backend(name).capabilities().rounds_queries(spec)


def _is_fastest(name: str, phase: str, spec: AttentionSpec) -> bool:
    return get_backend(name).is_fastest_for(phase, spec)


def _check_composite(prefill: type[AttentionBackend], decode: type[AttentionBackend], spec: AttentionSpec) -> None:
    if spec.block_size is None:
        size = max(b.preferred_block_size(spec) for b in (prefill, decode))
        for one in (prefill, decode):
            refused = [str(r) for r in one.rejections(spec.replace(block_size=size)) if r.feature == "block_size"]
            if refused:
                raise NoBackendError(
                    f"prefill={prefill.name} and decode={decode.name} need one block size that both take, but "
                    f"{one.name} refuses {refused[0]}; name a block_size"
                )


def _reasons(name: str, spec: AttentionSpec) -> tuple[Rejection, ...]:
    try:
        return tuple(get_backend(name).rejections(spec))
    except Exception as error:  # whatever another package's backend raises must not take selection down
        return (Rejection("availability", name, _said(error)),)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UnsupportedError) else describe_error(error)


def _known(name: str, source: str) -> str:
    get_backend(name, "backend" if source == "argument" else source)
    return name


def _with_variant(backend: type[AttentionBackend], spec: AttentionSpec) -> str:
    variant = backend.variant(spec)
    return f"{backend.name} ({variant})" if variant else backend.name


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _log_once(selection: Selection) -> None:
    key = (selection.name, selection.source, selection.spec.device_type)
    if key not in _logged:
        _logged.add(key)
        _log.info("attention backend: %s", selection.describe())
