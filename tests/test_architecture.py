"""The house keeps its shape: imports run one way, files and functions stay small, nothing unsafe is called."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pagedattn
from pagedattn import runtime
from pagedattn.integrations import transformers as transformers_integration

ROOT = Path(__file__).parent.parent
LIBRARY, ENGINE = ROOT / "pagedattn", ROOT / "engine"

# What each folder of the library may import, on the floors below its own. A file at the top is a folder of its own.
_VALUES = ("errors", "env", "formats", "spec")
_KERNELS = (*_VALUES, "call", "runtime", "kernels")
_OPS = (*_KERNELS, "ops")
_BACKENDS = (*_OPS, "cache", "step", "backends")
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "env": ("errors",),
    "formats": ("errors", "formats"),
    "spec": ("errors", "formats", "spec"),
    "call": ("errors", "spec", "formats"),
    "runtime": (*_VALUES, "call", "runtime"),
    "kernels": _KERNELS,
    "ops": _OPS,
    "cache": (*_OPS, "cache"),
    "step": (*_OPS, "step"),
    "backends": _BACKENDS,
    "layers": (*_BACKENDS, "layers"),
    "testing": (*_BACKENDS, "layers", "testing"),
    "integrations": ("", "errors", "env", "ops", "backends.releases", "integrations"),  # "" is the public names
    "cli": (*_BACKENDS, "layers", "testing", "integrations", "engine", "bench", "cli"),
    "__main__": ("cli",),
}
# Folders whose members are apart: `kernels/decode` imports what lies in `kernels/` itself, never `kernels/prefill`.
APART = ("kernels", "backends")
# The same of the engine, whose own folders run one way too; imports for type checking count.
_NOUNS = (
    *("config", "garbage", "kv_group", "pdl", "request", "runner_protocol", "sampling_params", "scheduler_output"),
    "transfer",
)
_WORKER = (*_NOUNS, "models", "sampling", "worker")
ENGINE_ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("config", "garbage", "kv_group", "pdl", "sampling_params", "transfer"), ()),
    "request": ("sampling_params",),
    "scheduler_output": ("request",),
    "runner_protocol": ("kv_group", "scheduler_output"),
    "kv": (*_NOUNS, "kv"),
    "scheduler": (*_NOUNS, "kv", "scheduler"),
    "models": (*_NOUNS, "models"),
    "sampling": (*_NOUNS, "models", "sampling"),
    "worker": _WORKER,
    "parallel": (*_WORKER, "parallel"),
    "api": (*_WORKER, "kv", "scheduler", "parallel", "api"),
}
# Third-party packages, at the top of a module or inside its functions.
ANYWHERE = {"torch", "numpy", "xxhash"}
ONLY_IN = {
    "triton": ("formats", "kernels", "runtime.launcher", "runtime.launch_abi", "runtime.interpreter"),
    "transformers": ("integrations",),
    "flashinfer": ("backends.flashinfer.metadata",),
    "flash_mla": ("backends.flash_mla.metadata",),
    "vllm": ("integrations.vllm",),
    "rich": ("cli.terminal",),
}
# What the engine may import of the library, by module.
PUBLIC = {
    "pagedattn": pagedattn.__all__,
    "pagedattn.errors": vars(pagedattn.errors),
    "pagedattn.runtime": runtime.__all__,
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


def module_of(path: Path, root: Path = LIBRARY) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources(LIBRARY)}
ENGINE_MODULES = {module_of(path, ENGINE): path for path in sources(ENGINE)}


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
        elif isinstance(node, ast.Call) and (
            name_of(node.func).endswith("import_module") or name_of(node.func) == "load"
        ):
            prefix = "pagedattn." if name_of(node.func) == "load" else ""  # of `runtime.op_registry`
            yield from (f"{prefix}{arg.value}" for arg in node.args[:1] if isinstance(arg, ast.Constant))


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in packages)


def member(module: str) -> tuple[str, str]:
    """The folder of a module, and which of the folder's parts that are apart it belongs to ("" where none)."""
    folder, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return folder, part if folder in APART and (LIBRARY / folder / part).is_dir() else ""


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_imports_run_one_way(module: str) -> None:
    folder, part = member(module)
    for name in imports(module, MODULES[module]):
        if name.split(".")[0] == "pagedattn":
            used = name.removeprefix("pagedattn").lstrip(".")
            assert inside(used, ALLOWED[folder]), f"{module} imports {used or 'the public names'}"
            if folder == member(used)[0] and part:
                assert member(used)[1] in ("", part), f"{module} imports {used}"


def test_every_folder_has_its_row() -> None:
    there = {path.stem for path in LIBRARY.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(ALLOWED) == there - {"__init__", "engine", "bench"}
    assert {"kernels.prefill.kernel", "backends.triton.backend", "layers.attention"} <= set(MODULES)
    assert {member(module) for module in MODULES} >= {("kernels", "decode"), ("backends", "triton"), ("ops", "")}


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
    assert {"triton", "transformers", "vllm", "rich"} <= seen


def engine_imports(module: str) -> Iterator[str]:
    """Modules of the engine that one of them imports."""
    path = ENGINE_MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            for alias in node.names:
                full = ".".join(filter(None, [*origin, alias.name]))
                yield full if full in ENGINE_MODULES else ".".join(filter(None, origin))


@pytest.mark.parametrize("module", sorted(set(ENGINE_MODULES) - {""}))
def test_the_engines_imports_run_one_way(module: str) -> None:
    for name in engine_imports(module):
        assert inside(name, ENGINE_ALLOWED[module.partition(".")[0]]), f"{module} imports {name}"


def test_every_folder_of_the_engine_has_its_row_and_no_modules_import_each_other() -> None:
    assert {module.partition(".")[0] for module in ENGINE_MODULES} - {""} == set(ENGINE_ALLOWED)
    graph = {module: {name for name in engine_imports(module) if name != module} for module in ENGINE_MODULES if module}
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert sum(map(len, graph.values())) > 100


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
        if not path.is_relative_to(LIBRARY / "testing") and not path.is_relative_to(LIBRARY / "kernels"):
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
        assert lines <= 400, f"{path}: {lines} lines"


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
