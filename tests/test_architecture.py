"""The house keeps its shape: imports run one way, files and functions stay small, nothing unsafe is called."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pagedattn
from pagedattn.integrations import transformers as transformers_integration

ROOT = Path(__file__).parent.parent
LIBRARY, ENGINE = ROOT / "pagedattn", ROOT / "engine"

# What a module of the library may import of the library: module names, or packages (`ops` is all of it).
LEAVES = ("errors", "spec", "env", "block_contents", "block_pool", "capabilities", "cache_spec")
FLASHINFER = ("backends.flashinfer_pages", "backends.flashinfer_plan")
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "spec": ("errors",),
    "env": ("errors",),
    "block_contents": (),
    "block_pool": ("errors", "block_contents"),
    "capabilities": ("spec",),
    "cache_spec": ("errors", "spec"),
    "ops": ("errors", "ops"),
    "ops.kernels": (
        *(
            "env",
            "ops.attention_inputs",
            "ops.attention_replay",
            "ops.hopper_list",
            "ops.launch",
            "ops.library",
            "ops.kernels",
            "ops.triton_versions",
        ),
    ),
    "metadata": (*LEAVES, "ops"),
    "block_table": (*LEAVES, "ops"),
    "kv_cache": (*LEAVES, "ops"),
    "scales": ("errors", "spec"),
    "checks": (*LEAVES, "kv_cache", "metadata"),
    "backends": (),
    "backends.base": (*LEAVES, "checks", "kv_cache", "metadata", "ops"),
    "backends.registry": (*LEAVES, "backends.base"),
    "backends.op_backend": (*LEAVES, "kv_cache", "metadata", "ops", "backends.base"),
    "backends.torch_native": (*LEAVES, "kv_cache", "metadata", "ops", "backends.base", "backends.op_backend"),
    "backends.triton_metadata": (*LEAVES, "metadata", "ops", "backends.base", "backends.op_backend"),
    "backends.triton": (
        *(*LEAVES, "kv_cache", "metadata", "ops", "backends.base", "backends.op_backend"),
        "backends.triton_metadata",
    ),
    "backends.releases": (),
    "backends.flash_attn_versions": (*LEAVES, "backends.releases"),
    "backends.flash_attn_metadata": (
        *LEAVES,
        "metadata",
        "ops.packing",
        "backends.base",
        "backends.flash_attn_versions",
    ),
    "backends.flash_attn_calls": (*LEAVES, "backends.flash_attn_metadata"),
    "backends.flash_attn": (
        *(*LEAVES, "kv_cache", "metadata", "backends.base"),
        *("backends.flash_attn_calls", "backends.flash_attn_metadata", "backends.flash_attn_versions"),
    ),
    "backends.flashinfer_pages": (*LEAVES, "metadata", "ops.packing"),
    "backends.flashinfer_plan": (*LEAVES,),
    "backends.flashinfer_metadata": (*LEAVES, "metadata", "ops.packing", "backends.base", *FLASHINFER),
    "backends.flashinfer": (
        *(*LEAVES, "kv_cache", "backends.base", "backends.releases", *FLASHINFER),
        "backends.flashinfer_metadata",
    ),
    "selector": (*LEAVES, "backends.base", "backends.registry"),
    "composite": (*LEAVES, "kv_cache", "metadata", "ops", "backends.base"),
    "step": (*LEAVES, "metadata", "backends.base"),
    "layer_call": (*LEAVES, "kv_cache", "ops"),
    "layer": (
        *(*LEAVES, "kv_cache", "metadata", "ops", "backends.base", "checks", "composite", "layer_call", "scales"),
        *("selector", "step"),
    ),
    "integrations": ("", "errors", "ops", "integrations"),  # "" is the public names
    "functional": (*LEAVES, "kv_cache", "metadata", "backends.base", "checks", "composite", "scales", "selector"),
    "display": ("capabilities", "spec"),
    "terminal": ("capabilities", "display"),
    "spec_options": ("spec",),
    "checkout": (),
    "cli_backends": (
        *(*LEAVES, "backends.base", "backends.flash_attn_versions", "backends.registry", "display", "selector"),
        *("spec_options", "terminal"),
    ),
    "cli_env": ("env", "backends.registry", "cli_backends", "display", "ops.library", "terminal"),
    "cli_device": (),
    "cli_conformance": ("cli_device", "display", "spec_options", "terminal", "testing"),
    "cli_generate": ("errors", "checkout", "cli_device", "display", "spec_options", "terminal", "engine"),
    "cli_chat": ("errors", "cli_generate", "display"),
    "cli": (
        *("errors", "env", "checkout", "display", "spec_options", "terminal", "bench"),
        *("cli_backends", "cli_chat", "cli_conformance", "cli_env", "cli_generate"),
    ),
    "__main__": ("cli",),
    "testing": (*LEAVES, "kv_cache", "metadata", "backends.base", "backends.registry", "testing"),
}
# Third-party packages, at the top of a module or inside its functions.
ANYWHERE = {"torch", "numpy", "xxhash"}
ONLY_IN = {
    "triton": ("ops.kernels",),
    "transformers": ("integrations",),
    "flashinfer": ("backends.flashinfer_metadata",),
    "rich": ("terminal",),
}
# What the engine may import of the library, by module.
PUBLIC = {
    "pagedattn": pagedattn.__all__,
    "pagedattn.errors": vars(pagedattn.errors),
    "pagedattn.ops.kernels.launcher": ["Launcher"],
    "pagedattn.integrations.transformers": transformers_integration.__all__,
}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "os.system", "os.popen"}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(*folders: Path) -> list[Path]:
    found = [path for folder in folders for path in folder.rglob("*.py") if "pagedattn/engine" not in path.as_posix()]
    assert found
    return sorted(found)


def module_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources(LIBRARY)}


def imports(module: str, path: Path) -> Iterator[str]:
    """Absolute names of what a module of the library imports, `import_module` of a constant included."""
    package = ["pagedattn", *module.split(".")] if module else ["pagedattn"]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{origin}.{alias.name}".removeprefix("pagedattn.")
                yield f"pagedattn.{full}" if full in MODULES and origin.startswith("pagedattn") else origin
        elif isinstance(node, ast.Call) and name_of(node.func).endswith("import_module"):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def rule_of(module: str) -> str:
    """The longest entry of ALLOWED that is the module or a package around it."""
    while module not in ALLOWED:
        module = module.rpartition(".")[0]
    return module


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in packages)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_imports_run_one_way(module: str) -> None:
    for name in imports(module, MODULES[module]):
        if name.split(".")[0] == "pagedattn":
            used = name.removeprefix("pagedattn").lstrip(".")
            assert inside(used, ALLOWED[rule_of(module)]), f"{module} imports {used or 'the public names'}"


def test_every_entry_is_of_a_module_that_is_there() -> None:
    there = {*MODULES, *(path.name for path in LIBRARY.iterdir() if path.is_dir())}
    assert set(ALLOWED) <= there
    assert {"ops.kernels.attention", "backends.triton", "layer"} <= set(MODULES)


def test_third_party_packages_stay_where_they_belong() -> None:
    seen = set()
    for module, path in MODULES.items():
        for name in imports(module, path):
            package = name.split(".")[0]
            if package in ONLY_IN:
                assert inside(module, ONLY_IN[package]), f"{module} imports {package}"
                seen.add(package)
            elif package != "pagedattn" and package not in ANYWHERE:
                assert package in sys.stdlib_module_names, f"{module} imports {package}"
    assert {"triton", "transformers", "rich"} <= seen


def test_the_engine_uses_public_names_only() -> None:
    used = 0
    for path in sources(ENGINE):
        typing_only = {node for block in ast.walk(parse(path)) if _is_type_checking(block) for node in ast.walk(block)}
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and not node.level and node not in typing_only:
                if (node.module or "").split(".")[0] == "pagedattn":
                    assert node.module in PUBLIC, f"{path.name} imports {node.module}"
                    names = PUBLIC[node.module]
                    assert {alias.name for alias in node.names} <= set(names), path.name
                    used += 1
            elif isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "pagedattn" for alias in node.names), path.name
    assert used > 5


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and name_of(node.test).endswith("TYPE_CHECKING")


@pytest.mark.parametrize("word", ["request", "scheduler", "config"])
def test_the_library_knows_no_engine_module(word: str) -> None:
    assert not [module for module in MODULES if module.split(".")[-1] == word]


def test_assert_is_no_validation() -> None:
    for path in sources(LIBRARY, ENGINE):
        if not path.is_relative_to(LIBRARY / "testing") and not path.is_relative_to(LIBRARY / "ops/kernels"):
            found = [node.lineno for node in ast.walk(parse(path)) if isinstance(node, ast.Assert)]
            assert not found, f"{path}: {found}"


def test_nothing_unsafe_is_imported_or_called() -> None:
    for path in sources(LIBRARY, ENGINE):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                assert not UNSAFE_MODULES & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in UNSAFE_MODULES, path
            elif isinstance(node, ast.Call):
                where = f"{path}:{node.lineno}"
                assert name_of(node.func) not in UNSAFE_CALLS, where
                shell = [word.value for word in node.keywords if word.arg == "shell"]
                assert not any(isinstance(value, ast.Constant) and value.value for value in shell), where


def test_files_are_short() -> None:
    for path in sources(LIBRARY, ENGINE, ROOT / "tests", ROOT / "bench"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = 400 if path.is_relative_to(LIBRARY / "ops/kernels") else 300
        assert lines <= limit, f"{path}: {lines} lines"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of statements: a signature with one argument per line, and a docstring, are no length."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    jitted, long = 0, []
    for path in sources(LIBRARY, ENGINE):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any(name_of(getattr(one, "func", one)).endswith(".jit") for one in node.decorator_list)
                jitted += kernel
                if body_lines(node) > (150 if kernel else 40):
                    long.append(f"{path.relative_to(ROOT)} {node.name}: {body_lines(node)}")
    assert jitted >= 8
    assert not long, long
