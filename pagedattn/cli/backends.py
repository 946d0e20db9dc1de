"""`pagedattn backends` and `pagedattn why`: what each backend serves, and why one is chosen for a layer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields

from ..backends.base import Availability
from ..backends.flash_attn.versions import VERSIONS
from ..backends.registry import backend_names, get_backend
from ..backends.selector import Selection, current_request, select_backend, why_passed_over
from ..errors import UnsupportedError
from ..layers.mla_forms import LatentDims, LatentForms, expanded_spec, select_forms
from ..spec import AttentionSpec
from ..spec.capabilities import Capabilities, Rejection
from . import display
from .spec_options import latent_dims_of, spec_of
from .terminal import show_matrix, show_rows

# AOTAutograd raises "does not yet handle input mutations on views with different dtypes".
_COMPILE_SCALES = (
    "torch.compile: inductor and aot_eager take no cache of codes with scales, which are two dtypes in one storage "
    "(compile by backend='eager', or take kv_cache_dtype='auto', or fp8 with given scales)"
)
Probed = tuple[Availability, Capabilities | None]  # whether it can run here, and what it serves


def add_backends_options(parser: argparse.ArgumentParser) -> None:
    """Options of `pagedattn backends`."""
    parser.add_argument("--matrix", action="store_true", help="print the support matrix as Markdown, as in docs/")


def backends(args: argparse.Namespace) -> int:
    """What every known backend serves, and whether it can run here."""
    names = backend_names()
    if args.json:
        display.print_json({name: _facts(probe(name)) | _versions_of(name) for name in names})
        return 0
    found = {label: one for name in names for label, one in _by_version(name).items()}
    serving = {label: serves for label, (_, serves) in found.items() if serves is not None}
    if args.matrix:
        print(display.markdown_matrix(serving))
    else:
        show_rows((name, state_of(state)) for name, (state, _) in found.items())
        print()
        show_matrix(serving)
        print("\nA backend may refuse a combination of these: `pagedattn why` says which, with the reason.")
    return 0


def _by_version(name: str) -> dict[str, Probed]:
    """A backend; FLASH_ATTN as each version of its library, whichever is installed."""
    return {f"{name} ({label})": one for label, one in _versions(name).items()} or {name: probe(name)}


def _versions(name: str) -> dict[str, Probed]:
    versions = sorted(VERSIONS, key=lambda one: one.number) if name == "FLASH_ATTN" else ()
    return {one.label: (one.availability(), one.capabilities) for one in versions}


def _versions_of(name: str) -> dict[str, object]:
    versions = {label: _facts(one) for label, one in _versions(name).items()}
    return {"versions": versions} if versions else {}


def _facts(probed: Probed) -> dict[str, object]:
    return {"here": probed[0], "capabilities": probed[1]}


def probe(name: str) -> Probed:
    """Whether a backend can run here, and what it serves; one that cannot be loaded says why."""
    try:
        backend = get_backend(name)
        return backend.availability(), backend.capabilities()
    except Exception as error:  # whatever another package's backend raises must not hide the rest
        return Availability(ok=False, reason=display.one_line(error)), None


def state_of(state: Availability) -> str:
    """The version that is here, or why there is none."""
    said = f"{state.reason} ({state.hint})" if state.hint else state.reason
    if not state.ok:
        return f"no: {said}"
    return f"{state.version}; {said}" if said else state.version


def why(args: argparse.Namespace) -> int:
    """Which backend serves the layer that `args` describe, and why no other; status 1 where none can."""
    spec = spec_of(args)
    dims = latent_dims_of(args, spec)
    specs = {"": spec} if dims is None else {"absorbed": spec, "expanded": expanded_spec(spec, dims)}
    rejections = {form: {name: _rejections(name, one) for name in backend_names()} for form, one in specs.items()}
    selections, facts, error = {}, {}, None
    try:
        if dims is None:
            selections = {"": select_backend(spec, args.backend)}
            facts = _winners(selections[""])
        else:
            forms = select_forms(spec, dims, current_request(args.backend))
            selections, facts = {"absorbed": forms.absorbed, "expanded": forms.expanded}, _winners_of_forms(forms, dims)
    except UnsupportedError as failure:
        error = str(failure)
        for one in specs.values():
            error = error.replace(str(one), "this")
    if args.json:
        told = {_of(form, "rejections"): one for form, one in rejections.items()}
        asked = {one.name: getattr(spec, one.name) for one in fields(spec)} | ({} if dims is None else {"scale": None})
        display.print_json({"spec": asked, **facts, "error": error, **told})
        return int(error is not None)
    print(_told(spec))
    if facts:
        show_rows((name, str(value)) for name, value in facts.items() if value)
    for form, selection in selections.items():
        for drawback in _drawbacks(selection):
            print(display.wrapped(drawback, 4))
        print(_losers(selection, form))
    if error is not None:
        print(error, *_able(rejections), sep="\n")
    return int(error is not None)


def _of(form: str, name: str) -> str:
    """`name` of a form: of the expanded one behind its name."""
    return f"{form}_{name}" if form == "expanded" else name


def _able(rejections: Mapping[str, Mapping[str, list[Rejection]]]) -> list[str]:
    """Lines that say who could serve, by form."""
    able = {form: [name for name, reasons in one.items() if not reasons] for form, one in rejections.items()}
    return [f"who can{f' attend {form}' if form else ''}: {', '.join(names)}" for form, names in able.items() if names]


def _winners(selection: Selection) -> dict[str, object]:
    return {
        "prefill": selection.prefill.name,
        "prefill_variant": selection.prefill.variant(selection.spec),
        "decode": selection.decode.name,
        "decode_variant": selection.decode.variant(selection.spec),
        "block_size": selection.block_size,
        "chosen_by": selection.source,
    }


def _winners_of_forms(forms: LatentForms, dims: LatentDims) -> dict[str, object]:
    absorbed, expanded = forms.absorbed, forms.expanded
    return {
        "absorbed": absorbed.decode.name,
        "absorbed_variant": absorbed.decode.variant(absorbed.spec),
        "expanded": expanded.prefill.name,
        "expanded_variant": expanded.prefill.variant(expanded.spec),
        "expanded_head": f"{dims.nope + dims.rope}/{dims.value}",
        "expanded_from": forms.expanded_from,  # new tokens of a sequence
        "block_size": absorbed.block_size,
        "chosen_by": absorbed.source,
    }


def _drawbacks(selection: Selection) -> list[str]:
    """A line for each backend that serves, but less well than it could, with the remedy; and for what torch lacks."""
    found = {one.name: one.availability() for one in (selection.prefill, selection.decode)}
    kept = {name: state for name, state in found.items() if state.reason and state.hint}
    lines = [f"{name}: {state.reason} ({state.hint})" for name, state in kept.items()]
    return [*lines, _COMPILE_SCALES] if selection.spec.compile and _computes_scales(selection.spec) else lines


def _computes_scales(spec: AttentionSpec) -> bool:
    """Whether the cache keeps scales beside codes, as two tensors of one storage."""
    rows = ((spec.format.key, spec.head_dim), (spec.format.value, spec.value_dim))
    return spec.uses_cache and any(len(one.planes(dim, spec.dtype)) > 1 for one, dim in rows)


def _losers(selection: Selection, form: str) -> str:
    lines = []
    for name, reasons in selection.rejections.items():
        begin = f"{form}, not {name}:" if form else f"not {name}:"
        lines += [begin if reasons else f"{begin} {why_passed_over(name, selection.spec)}"]
        lines += [display.wrapped(f"  {reason}", 4) for reason in reasons]
    return "\n".join(lines)


def _told(spec: AttentionSpec) -> str:
    """What the spec asks for: every field but those that are None, False or GraphLevel.NEVER (which is 0)."""
    pairs = ((one.name, getattr(spec, one.name)) for one in fields(spec))
    if spec.latent_dim is not None:  # whose scale is to be given, and changes nobody's answer
        pairs = ((name, value) for name, value in pairs if name != "scale")
    asked = " ".join(f"{name}={display.text(name, value)}" for name, value in pairs if value not in (None, False))
    if spec.device_type == "cuda" and spec.capability is None:
        asked += " (compute capability unknown, not checked: name one with --capability)"
    return display.wrapped(asked, 2)


def _rejections(name: str, spec: AttentionSpec) -> list[Rejection]:
    try:
        return get_backend(name).rejections(spec)
    except UnsupportedError as error:
        return [Rejection("availability", name, str(error))]
