"""The wheel: what is in it, what it is called, and that it works where there is no checkout."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import environment, run_python

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "tiny-qwen3"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


# In place of a C++ compiler: it answers and leaves an empty file, for the extension has tests of its own.
COMPILER = """#!{python}
import sys
from pathlib import Path
if "-o" in sys.argv:
    Path(sys.argv[sys.argv.index("-o") + 1]).touch()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where no compiler is found."""
    return build(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"), CXX="none")


def build(source: Path, out: Path, **variables: str) -> Path:
    """The wheel of a copy of the checkout, which `source` becomes, in the empty folder `out`."""
    for name in ("pip", "setuptools"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not here to build with")
    left_out = shutil.ignore_patterns("__pycache__", "_csrc.*", "build", "*.egg-info", "results")
    for name in ("pagedattn", "engine", "bench", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    # No architecture: where there is CUDA, its half is left out.
    variables = {**os.environ, "PATH": str(out), "TORCH_CUDA_ARCH_LIST": "none", **variables}
    command = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run(command, env=variables, check=True, capture_output=True, timeout=300)
    (found,) = out.glob("*.whl")
    return found


def contents(wheel: Path) -> tuple[list[str], Message, Message]:
    """What a wheel has: names, METADATA and WHEEL."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found = [next(name for name in names if name.endswith(f".dist-info/{one}")) for one in ("METADATA", "WHEEL")]
        metadata, tags = (email.message_from_bytes(archive.read(name)) for name in found)
    return names, metadata, tags


def test_one_with_the_extension_is_for_this_platform(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(python=sys.executable), encoding="utf-8")
    compiler.chmod(0o755)
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    wheel = build(tmp_path / "source", tmp_path / "out", CXX=str(compiler))
    names, _, tags = contents(wheel)
    assert re.fullmatch(r"pagedattn-[\d.]+-cp310-abi3-(?!any)\w+\.whl", wheel.name)
    assert tags["Root-Is-Purelib"] == "false" and f"-{tags['Tag']}.whl" in wheel.name
    assert {"pagedattn/_csrc.so", "pagedattn/_csrc.txt", "pagedattn/engine/api/llm.py"} <= {*names}


def test_what_is_in_it(wheel: Path) -> None:
    assert re.fullmatch(r"pagedattn-[\d.]+-py3-none-any\.whl", wheel.name)
    names, metadata, tags = contents(wheel)
    assert (tags["Root-Is-Purelib"], tags["Tag"]) == ("true", "py3-none-any") and "pagedattn/_csrc.so" not in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"pagedattn"}
    parts = {name.split("/")[1] for name in names}
    assert {
        "engine",
        "bench",
        "backends",
        "ops",
        "testing",
        "integrations",
        "py.typed",
    } <= parts and "tests" not in parts
    assert not [name for name in names if re.search(r"(^|/)(test_|conftest|bench/vllm_)|\.json$|\.cu$", name)]
    with zipfile.ZipFile(wheel) as archive:
        points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "[vllm.general_plugins]\npagedattn = pagedattn.integrations.vllm:register\n" in points
    assert {"cli", "docs", "engine", "hf", "bench", "dev"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_source_distribution_has_no_piece_of_the_tests(tmp_path: Path) -> None:
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not here to build with")
    for name in ("tests", "csrc", "pagedattn", "engine", "bench"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_it.py").touch()
    (tmp_path / "csrc" / "op.cu").touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=tmp_path, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "csrc/op.cu", "CHANGELOG.md"} <= names and not [name for name in names if "tests" in name]


def test_it_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    variables = environment(target)

    def run(*argv: str) -> str:
        done = run_python(*argv, cwd=tmp_path, env=variables)
        done.check_returncode()
        return done.stdout

    facts = json.loads(run("-m", "pagedattn", "env", "--json"))
    assert facts["pagedattn"] == wheel.name.split("-")[1] and facts["extension"].startswith(
        "not built: no C++ compiler"
    )
    generate = ("generate", str(MODEL), "A block table", "--max-tokens", "4", "--device", "cpu", "--json")
    command = [sys.executable, "-m", "pagedattn", *generate]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert len(told["outputs"][0]["token_ids"]) == 4
    where = "import pagedattn, pagedattn.engine as e; print(pagedattn.__file__, e.__file__)"
    files = run("-c", where).split()
    assert len(files) == 2 and all(Path(file).is_relative_to(target) for file in files)
