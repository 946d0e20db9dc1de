"""Who is compared: each backend through our layer, the layer's own choice, and the other libraries called directly.

Of latent attention (MLA) the backends run as its layer calls them, between the projections.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pagedattn import Attention, AttentionCall, AttentionSpec, StepMetadata, plan_step
from pagedattn.backends.flash_attn.versions import VERSIONS
from pagedattn.backends.registry import backend_names, get_backend
from pagedattn.backends.selector import select_backend
from pagedattn.errors import InvalidInputError, UnsupportedError

from . import flash_mla_library
from .latent_layer import FORMS, through_latent_layer
from .latent_peers import fa3_qv, flash_mla, flashinfer_mla
from .peers import FP8_TOLERANCE, fa3, flashinfer_persistent, flashinfer_wrappers
from .problem import DEVICE, Problem
from .ratios import TRITON_AUTO, Row
from .run import Run
from .table import LATENT, Case
from .vllm_turboquant import turboquant

_VERSION, _USUAL_BLOCK_SIZE = "PAGEDATTN_FLASH_ATTN", 16
# How contenders begin that call one of them.
_LIBRARIES = ("FLASH_ATTN", "FLASH_MLA", "FLASHINFER", "FA3", "FlashMLA", "FlashInfer", "vllm")


@dataclass(frozen=True)
class Contender:
    """One line of a comparison. A peer is another library, called without ours between.

    `backend`: ours, or for a peer the one over the same library; None is the layer's own choice. `version`: what
    PAGEDATTN_FLASH_ATTN says while a layer is built. `block_size`, `kv_cache_dtype`: of its caches, whatever the case
    says (None: the case's). `deterministic`: its layers are. `form`: of a latent layer, which that takes (None: it runs
    absorbed kernels, or is no latent one). `by_name`: it is measured only where it is asked for.
    """

    name: str
    prepare: Callable[[Contender, Problem], Run]
    backend: str | None = None
    version: str | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    deterministic: bool = False
    peer: bool = False
    by_name: bool = False
    form: str | None = None

    def takes(self, case: Case) -> bool:
        """Whether a case is of what it runs: a latent layer with its projections, or attention alone."""
        return (self.form is not None) == case.by_layer

    def run(self, problem: Problem) -> Run:
        """Ready to plan and attend; whatever it raises is the reason why it cannot take part."""
        usual = problem.case.latent or problem.case.block_size == _USUAL_BLOCK_SIZE
        if self.block_size not in (None, problem.case.block_size) and not usual:
            raise UnsupportedError(f"it is measured with blocks of {self.block_size} only")
        if problem.case.packed and problem.case.kv_cache_dtype != "auto":
            raise UnsupportedError("packed keys are in the model's dtype: no cache stores them")
        return self.prepare(self, problem)

    def available(self) -> bool:
        """Whether its library is here."""
        if self.version is not None:
            return any(one.module() is not None for one in VERSIONS if str(one.number) == self.version)
        return self.backend is None or get_backend(self.backend).availability().ok


@contextmanager
def chosen(version: str | None) -> Iterator[None]:
    """PAGEDATTN_FLASH_ATTN set to `version`, where that is not None."""
    before = os.environ.get(_VERSION)
    if version is not None:
        os.environ[_VERSION] = version
    try:
        yield
    finally:
        if version is not None:
            os.environ.pop(_VERSION)
            if before is not None:
                os.environ[_VERSION] = before


def through_layer(contender: Contender, problem: Problem) -> Run:
    """Attention through our layer, without the cache write, as the kernels are compared."""
    case = problem.case
    form = contender.kv_cache_dtype or case.kv_cache_dtype
    size = contender.block_size or case.size_of_blocks(form)
    with chosen(contender.version):
        attention = Attention(
            *(case.heads, case.dim, case.kv_heads),
            head_dim_v=case.dim_v or None,
            kv_cache_dtype=form,
            block_size=None if case.packed else size,
            backend=contender.backend,
            clean_cache=True,
            deterministic=contender.deterministic,
            sliding_window=case.window or None,
            softcap=case.softcap or None,
            sinks=problem.sinks,
            dtype=case.torch_dtype,
            device=DEVICE,
        )
        paged = problem.paged(size, form)  # only now: a backend that cannot serve the format needs no caches
        common = problem.packed_common() if case.packed else paged.common
        metadata: list[StepMetadata] = [plan_step([attention], common)]

    def plan() -> None:
        metadata[0] = plan_step([attention], common)

    def step() -> None:
        for built in metadata[0].by_key.values():
            attention.builder.device_update(built)

    def attend(layer: int) -> torch.Tensor:
        given = (*problem.rows(layer), None) if case.packed else (None, None, paged.layer(layer))
        return attention(problem.queries[layer], *given, metadata[0])

    # FlashAttention's build is nothing but device work (FA3's tile schedule), so that it belongs into the graph.
    in_graph = plan if "FLASH_ATTN" in attention.selection.name else step
    chosen_ones = {attention.selection.prefill, attention.selection.decode}
    rounds = any(one.capabilities().rounds_queries(attention.spec) for one in chosen_ones)
    tolerance = FP8_TOLERANCE if rounds else 0.0
    return Run(plan, in_graph, attend, lambda: metadata[0].describe(), size, form, tolerance)


def through_backend(contender: Contender, problem: Problem) -> Run:
    """Absorbed latent attention by a backend's kernels and metadata, without the projections around them."""
    case, size = problem.case, contender.block_size or problem.case.block_size
    form = contender.kv_cache_dtype or case.kv_cache_dtype
    spec = AttentionSpec(
        num_heads=case.heads,
        head_dim=case.dim,
        latent_dim=case.latent,
        dtype=case.torch_dtype,
        device_type=DEVICE.type,
        capability=torch.cuda.get_device_capability(DEVICE) if DEVICE.type == "cuda" else None,
        block_size=size,
        scale=case.scale,
        mask=case.mask,
        kv_cache_dtype=form,
        clean_cache=True,
    )
    with chosen(contender.version):
        selection = select_backend(spec, contender.backend)
        backend = selection.decode
        builder, impl = backend.builder(selection.spec, DEVICE), backend.impl(selection.spec)
    paged = problem.paged(size, form)
    metadata = [builder.build(paged.common)]

    def plan() -> None:
        metadata[0] = builder.build(paged.common)

    def step() -> None:
        builder.device_update(metadata[0])

    def attend(layer: int) -> torch.Tensor:
        return impl.forward(AttentionCall(problem.queries[layer], paged.layer(layer)), metadata[0])

    # What these build is made on the device, so that it belongs into the graph.
    in_graph = plan if backend.name in ("FLASH_ATTN", "FLASH_MLA") else step
    return Run(plan, in_graph, attend, lambda: metadata[0].describe(), size, form)


def through_form(contender: Contender, problem: Problem) -> Run:
    """Latent attention by its layer in one form. A peer's expanded attention is the library's, all else is ours."""
    absorbed_by = "TRITON" if contender.peer else contender.backend
    with chosen(contender.version):
        asked = f"prefill={contender.backend},decode={absorbed_by}"
        return through_latent_layer(problem, contender.form or "expanded", asked)


def _peer(call: Callable[[Problem], Run]) -> Callable[[Contender, Problem], Run]:
    return lambda _, problem: call(problem)


ALL = (
    Contender("TRITON", through_layer, "TRITON"),
    Contender("TRITON deterministic", through_layer, "TRITON", deterministic=True, by_name=True),
    Contender("auto", through_layer),
    Contender("FLASH_ATTN (FA3)", through_layer, "FLASH_ATTN", "3"),
    Contender("FLASH_ATTN (FA2)", through_layer, "FLASH_ATTN", "2", block_size=256),
    Contender("FLASHINFER", through_layer, "FLASHINFER"),
    Contender("TORCH", through_layer, "TORCH"),
    Contender("FA3", _peer(fa3), "FLASH_ATTN", "3", peer=True),
    Contender("FlashInfer (wrappers)", _peer(flashinfer_wrappers), "FLASHINFER", peer=True),
    Contender("FlashInfer (persistent)", _peer(flashinfer_persistent), "FLASHINFER", peer=True),
    Contender("vllm TURBOQUANT", _peer(turboquant), peer=True, by_name=True),
)
LATENT_ALL = (
    Contender("TRITON", through_backend, "TRITON"),
    Contender("auto", through_backend),
    Contender("FLASH_MLA", through_backend, "FLASH_MLA", block_size=64),
    Contender("FLASH_ATTN (FA3)", through_backend, "FLASH_ATTN", "3"),
    Contender("FLASHINFER", through_backend, "FLASHINFER"),
    Contender("TORCH", through_backend, "TORCH"),
    Contender("FlashMLA", _peer(flash_mla), "FLASH_MLA", peer=True),
    Contender("FA3 (qv)", _peer(fa3_qv), "FLASH_ATTN", "3", peer=True),
    Contender("FlashInfer (MLA)", _peer(flashinfer_mla), "FLASHINFER", peer=True),
)
LATENT_FORMS = (
    *(Contender(f"{name} ({form})", through_form, name, form=form) for name in ("TRITON", "TORCH") for form in FORMS),
    Contender("FA3 (expanded)", through_form, "FLASH_ATTN", "3", peer=True, form="expanded"),
)
AUTO = Contender(TRITON_AUTO, through_layer, "TRITON", kv_cache_dtype="auto")
LATENT_AUTO = Contender(TRITON_AUTO, through_backend, "TRITON", kv_cache_dtype="auto")


def beside_auto(chosen: Sequence[Contender], case: Case) -> Sequence[Contender]:
    """With TRITON over the rows as they were before a format stored them, where TRITON is measured over that format."""
    compared = case.kv_cache_dtype != "auto" and not case.by_layer and any(one.backend == "TRITON" for one in chosen)
    return [*chosen, LATENT_AUTO if case.latent else AUTO] if compared else chosen


def contenders(names: str | None, suite: str | None = None) -> list[Contender]:
    """Those that a comma-separated list names: FLASH_ATTN is both of its versions, FlashInfer both of its ways.

    A backend that another package registered is named as it is there, and runs through our layer like ours. `suite`:
    whose they are; None for attention with keys and values.
    Without a list, all whose library is here but those `by_name`: on a GPU without TORCH, which takes seconds,
    elsewhere TORCH alone.

    Raises:
        InvalidInputError: a name that no contender has.
    """
    listed, prepare = ((*LATENT_ALL, *LATENT_FORMS), through_backend) if suite == LATENT else (ALL, through_layer)
    if suite == LATENT:
        flash_mla_library.provide()
    if names is None:
        gpu = torch.cuda.is_available()
        usual = (one for one in listed if (one.backend != "TORCH") == gpu and not one.by_name)
        return [one for one in usual if one.available()]
    wanted = [name.strip() for name in names.split(",")]
    taken = {name for one in listed for name in _names(one)}
    others = [Contender(name, prepare, name) for name in backend_names() if name not in taken]
    known = [*listed, *others]
    for name in wanted:
        if not any(name in _names(one) for one in known):
            raise InvalidInputError("--backends", f"of {', '.join(one.name for one in known)}", repr(name))
    return [one for one in known if _names(one) & {*wanted}]


def by_own_kernels(row: Row) -> bool:
    """Whether what a row measured is this library's or a registered backend's, and not that of FlashAttention,
    FlashInfer or vLLM, called directly or through our layer."""
    return not row["backend"].startswith(_LIBRARIES)


def _names(one: Contender) -> set[str]:
    return {one.name, one.name.partition(" (")[0]}
