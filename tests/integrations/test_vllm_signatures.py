"""Our backend for vLLM against recorded signatures of vLLM's base classes, which need no vLLM (see vllm_record.py)."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm_real
import vllm_record

from pagedattn.integrations.vllm import releases

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "pagedattn" / "integrations" / "vllm"
RECORDS: dict[str, Any] = {
    path.stem.rpartition("_")[2]: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(HERE.glob("vllm_signatures_*.json"))
}
OURS = {
    "AttentionBackend": ("backend.py", "PagedAttentionBackend"),
    "AttentionImpl": ("impl.py", "PagedAttentionImpl"),
    "AttentionMetadataBuilder": ("builder.py", "PagedAttentionBuilder"),
}
CASES = [(release, base) for release in RECORDS for base in OURS]


class Signature(NamedTuple):
    """Parameters besides `self` and `cls`: names, how many have no default, and whether any keyword is taken."""

    names: list[str]
    required: int
    takes_any: bool


def tree_of(file: str) -> ast.Module:
    return ast.parse((SOURCES / file).read_text(encoding="utf-8"))


def members_of(base: str) -> dict[str, Signature | None]:
    """What our class over `base` defines: methods with their signatures, attributes with None."""
    file, name = OURS[base]
    (cls,) = (node for node in tree_of(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    assert base in {ast.unparse(one).partition("[")[0] for one in cls.bases}
    found: dict[str, Signature | None] = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = signature_of(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
    return found


def signature_of(function: ast.FunctionDef) -> Signature:
    assert not (function.args.posonlyargs or function.args.kwonlyargs or function.args.vararg)
    names = [one.arg for one in function.args.args]
    static = "staticmethod" in {ast.unparse(one) for one in function.decorator_list}
    names = names if static else names[1:]
    return Signature(names, len(names) - len(function.args.defaults), function.args.kwarg is not None)


def objections(ours: Signature, theirs: list[list[Any]]) -> Iterator[str]:
    """Calls that the recorded parameters allow and ours do not."""
    for i, (name, kind, has_default) in enumerate(theirs):
        if kind == "VAR_KEYWORD":
            if not ours.takes_any:
                yield f"takes no **{name}"
        elif kind != "POSITIONAL_OR_KEYWORD":
            yield f"{name} is {kind}, which is not looked at here"
        elif i >= len(ours.names):
            if not ours.takes_any:
                yield f"takes no {name}"
        elif ours.names[i] != name:
            yield f"has {ours.names[i]} where {name} is expected"
        elif has_default and i < ours.required:
            yield f"demands {name}"
    yield from (f"demands {name}" for name in ours.names[len(theirs) : ours.required])


def test_both_ends_of_what_is_served_are_recorded() -> None:
    assert set(RECORDS) == {releases.SERVED.oldest, releases.SERVED.newest}
    assert all(record["release"].startswith(f"{name}.") for name, record in RECORDS.items())
    assert all(set(record["classes"]) == set(OURS) for record in RECORDS.values())


@pytest.mark.parametrize(("release", "base"), CASES)
def test_every_abstract_member_is_defined(release: str, base: str) -> None:
    members = RECORDS[release]["classes"][base]
    abstract = {name for name, member in members.items() if member["abstract"]}
    assert abstract and abstract <= set(members_of(base))


@pytest.mark.parametrize(("release", "base"), CASES)
def test_every_call_that_vllm_may_make_is_accepted(release: str, base: str) -> None:
    theirs = RECORDS[release]["classes"][base]
    for name, signature in members_of(base).items():
        if name in theirs:
            expected = theirs[name]["parameters"]
            assert (signature is None) == (expected is None), f"{name} is a method of one, an attribute of the other"
            if signature is not None:
                assert not (found := list(objections(signature, expected))), f"{name}: {found}"


@pytest.mark.parametrize("base", OURS)
def test_nothing_is_defined_that_no_release_asks_for(base: str) -> None:
    """A member that was renamed would else never be called; names with an underscore are our own."""
    known = {name for record in RECORDS.values() for name in record["classes"][base]}
    ours = {name for name in members_of(base) if not name.startswith("_")}
    assert not ours - known


@pytest.mark.parametrize("base", OURS)
def test_no_private_name_of_vllm_is_taken_by_accident(base: str) -> None:
    file, name = OURS[base]
    (cls,) = (node for node in tree_of(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    own = {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    own = {name for name in own | set(members_of(base)) if name.startswith("_")} - {"__init__", "_cudagraph_support"}
    known = {name for record in RECORDS.values() for name in record["classes"][base]}
    assert own.isdisjoint(known) or (base == "AttentionBackend" and not own)


def attributes_of(file: str, variables: set[str]) -> set[str]:
    """What a file reads of vLLM's objects: of parameters so named that are annotated `Any`."""
    found = set()
    for function in (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)):
        of_vllm = {one.arg for one in function.args.args if one.annotation and ast.unparse(one.annotation) == "Any"}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in of_vllm & variables:
                    found.add(node.attr)
    return found


def names_after(file: str, cls: str) -> set[str]:
    """Members of a class that a file names: X of `cls.X`."""
    nodes = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == cls}


@pytest.mark.parametrize("release", RECORDS)
def test_only_recorded_fields_and_members_are_read(release: str) -> None:
    record = RECORDS[release]
    fields = {
        name for file in ("step.py", "builder.py") for name in attributes_of(file, {"common", "common_attn_metadata"})
    }
    assert {"seq_lens", "slot_mapping"} <= fields <= set(record["fields"]["CommonAttentionMetadata"])
    for cls, file in (("AttentionBackendEnum", "plugin.py"), ("AttentionCGSupport", "builder.py")):
        named = names_after(file, cls)
        assert named and named <= set(record["enums"][cls])


@pytest.mark.parametrize("release", RECORDS)
def test_the_backend_is_registered_by_position(release: str) -> None:
    calls = [node for node in ast.walk(tree_of("plugin.py")) if isinstance(node, ast.Call)]
    calls = [node for node in calls if ast.unparse(node.func) == "register_backend"]
    assert calls and all(len(call.args) == 2 and not call.keywords for call in calls)
    parameters = RECORDS[release]["functions"]["register_backend"]
    assert [name for name, *_ in parameters[:2]] == ["backend", "class_path"]
    assert all(has_default for _, _, has_default in parameters[2:])


@pytest.mark.parametrize("release", RECORDS)
def test_variables_for_rays_workers_are_vllms(release: str) -> None:
    assert RECORDS[release]["variables"] == [releases.RAY_PREFIXES, releases.RAY_NAMES]


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (Signature(["a"], 1, False), [["b", "POSITIONAL_OR_KEYWORD", False]], "has a where b is expected"),
        (Signature([], 0, False), [["a", "POSITIONAL_OR_KEYWORD", True]], "takes no a"),
        (Signature(["a"], 1, False), [["a", "POSITIONAL_OR_KEYWORD", True]], "demands a"),
        (Signature(["a", "b"], 2, False), [["a", "POSITIONAL_OR_KEYWORD", False]], "demands b"),
        (Signature(["a", "b"], 1, False), [["a", "POSITIONAL_OR_KEYWORD", False]], ""),
        (Signature([], 0, True), [["a", "POSITIONAL_OR_KEYWORD", False]], ""),
        (Signature([], 0, False), [["more", "VAR_KEYWORD", False]], "takes no **more"),
    ],
)
def test_what_would_not_be_accepted_is_noticed(ours: Signature, theirs: list[list[Any]], text: str) -> None:
    assert list(objections(ours, theirs)) == ([text] if text else [])


def test_the_record_is_what_this_release_has() -> None:
    series = "{}.{}".format(*vllm_real.release())
    if series not in RECORDS:
        pytest.skip(f"vLLM {series} is not recorded")
    here = vllm_record.record()
    assert {**here, "release": ""} == {**RECORDS[series], "release": ""}
