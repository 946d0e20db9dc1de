"""The extension keeps to the stable interface, compiles for GPUs not here, and a failed build spoils nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from processes import environment

from pagedattn.runtime import op_registry

ROOT = Path(__file__).parent.parent
CUDA_SOURCES = {"copy_blocks", "gather_kv", "reshape_and_cache", "reshape_and_cache_classic", "swap_blocks"}
CPU_ONLY = {"decode_attention"}  # a GPU's are Triton kernels


def _setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pagedattn_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = _setup()


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept between runs, where the checkout can be written: the same text is not compiled again by the same command."""
    kept = ROOT / "build" / "test"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    return kept if os.access(kept, os.W_OK) else tmp_path_factory.mktemp("objects")


@pytest.fixture
def nvcc() -> str:
    found = SETUP.find_nvcc()
    if found is None:
        pytest.skip("no nvcc")
    return found


def test_it_uses_nothing_but_the_stable_interface() -> None:
    if op_registry.path_of("copy_blocks", "cpu") != "csrc" or shutil.which("nm") is None:
        pytest.skip(f"{op_registry.csrc_status()}; nm: {shutil.which('nm')}")
    listed = subprocess.run(["nm", "-D", "--undefined-only", op_registry._EXTENSION], capture_output=True, text=True)
    names = re.findall(r" U (\S+)", listed.stdout)
    assert sum(name.startswith(("aoti_torch_", "torch_")) for name in names) > 10
    # C++ names of torch's libraries; the Python interface.
    assert not [name for name in names if re.match(r"_ZN?K?(2at|3c10|5torch)|_?Py", name)]


@pytest.mark.parametrize("name", sorted(CUDA_SOURCES))
def test_a_cuda_source_compiles_without_a_spill(nvcc: str, objects: Path, name: str) -> None:
    if SETUP.find_cxx() is None:
        pytest.skip("no C++ compiler, which nvcc needs")
    include = str(Path(torch.__file__).parent / "include")
    # For the GPU alone: the host's half takes twice as long, and its CPU twin is what runs here.
    flags = [*SETUP.gencode(nvcc, "9.0"), "-Xptxas=-warn-spills,-Werror"]
    command = [
        "-cubin" if one == "-c" else one
        for one in SETUP.compile_command(nvcc, ROOT / "csrc" / f"{name}.cu", include, flags)
    ]
    assert SETUP.compiled(command, objects).stat().st_size > 1000


def test_every_cuda_source_is_compiled_and_has_a_cpu_twin() -> None:
    assert {path.stem for path in (ROOT / "csrc").glob("*.cu")} == CUDA_SOURCES
    assert {path.stem for path in (ROOT / "csrc" / "cpu").glob("*.cpp")} == CUDA_SOURCES | CPU_ONLY


def test_architectures_asked_for(nvcc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0; 9.0a+PTX")
    wanted = ["-gencode=arch=compute_80,code=[sm_80]", "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]"]
    assert SETUP.gencode(nvcc) == wanted
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "; 8.0;9.0a+PTX;")
    assert SETUP.gencode(nvcc) == wanted
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SETUP.BuildFailed, match="TORCH_CUDA_ARCH_LIST must be like"):
        SETUP.gencode(nvcc)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    default = SETUP.gencode(nvcc)
    assert "-gencode=arch=compute_90,code=[sm_90]" in default and "compute_" in default[-1].partition("code=")[2]


@pytest.mark.parametrize(
    ("compiler", "match"),
    [
        (None, "no C\\+\\+ compiler was found; install one"),
        (shutil.which("false"), "false failed: status 1\n.* -std=c\\+\\+20"),
    ],
)
def test_a_build_that_cannot_be_says_why(monkeypatch, tmp_path, compiler, match) -> None:
    monkeypatch.setattr(SETUP, "find_cxx", lambda: compiler)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SETUP.BuildFailed, match=match):
        SETUP.build(tmp_path / "_csrc.so", tmp_path / "objects")
    assert not (tmp_path / "_csrc.so").exists()


def test_a_cuda_build_that_fails_leaves_the_cpu_build(monkeypatch, tmp_path, objects) -> None:
    if SETUP.find_cxx() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(SETUP, "find_nvcc", lambda: shutil.which("false"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    sources = SETUP.sources
    monkeypatch.setattr(SETUP, "sources", lambda cuda: [*SETUP.CSRC.glob("*.cu")] if cuda else sources(cuda))
    # The CPU's objects are those of the checkout's own extension, where it has one.
    built = next(ROOT.glob("build/temp.*"), objects)
    text = SETUP.build(tmp_path / "_csrc.so", built if os.access(built, os.W_OK) else objects)
    assert "for the CPU only: the CUDA build failed: false failed" in text and (tmp_path / "_csrc.so").exists()


@pytest.mark.parametrize("raised", ["ImportError", "RuntimeError"])
def test_without_torch_the_installation_goes_on_and_the_reason_is_kept(tmp_path: Path, raised: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {raised}('there is none here')\n", encoding="utf-8")
    command = ["setup.py", "-q", "build_ext", f"--build-lib={tmp_path / 'lib'}", f"--build-temp={tmp_path / 'temp'}"]
    variables = environment(tmp_path)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    note = (tmp_path / "lib/pagedattn/_csrc.txt").read_text(encoding="utf-8")
    assert note.startswith("not built: torch could not be imported (there is none here); install it")
    assert "pip install --no-build-isolation" in note
    assert not (tmp_path / "lib/pagedattn/_csrc.so").exists()


def test_a_folder_named_torch_is_no_torch(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__file__", None)
    with pytest.raises(SETUP.BuildFailed, match="a folder of that name is no package"):
        SETUP.build(tmp_path / "_csrc.so", tmp_path / "objects")


def test_a_note_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('\u00fc')\n", encoding="utf-8")
    (tmp_path / "lib").write_text("a file where a folder should be", encoding="utf-8")
    command = ["setup.py", "-q", "build_ext", f"--build-lib={tmp_path / 'lib'}", f"--build-temp={tmp_path / 'temp'}"]
    variables = environment(tmp_path, PYTHONIOENCODING="ascii")
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the note could not be written" in done.stdout


def test_max_jobs_that_is_no_number_is_one_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for asked in ("3", "0", "auto", "-1", ""):
        monkeypatch.setenv("MAX_JOBS", asked)
        counts.append(SETUP.jobs())
    assert counts == [3, *[os.cpu_count()] * 4]


def _compiler(path: Path, version: str, body: str) -> str:
    """A script that says a version, and otherwise does what `body` says with the output file ($last)."""
    path.write_text(f"#!/bin/sh\nif [ $1 = --version ]; then echo {version}; exit; fi\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_an_object_of_another_compiler_version_is_not_taken(tmp_path: Path) -> None:
    command = ["", "-c", str(ROOT / "csrc" / "registration.cpp")]
    objects = set()
    for version in ("1.0", "1.0", "2.0"):
        command[0] = _compiler(tmp_path / "cc", version, 'for last; do :; done; : > "$last"')
        objects.add(SETUP.compiled(command, tmp_path))
    assert len(objects) == 2


def test_what_a_compiler_says_may_be_undecodable(tmp_path: Path) -> None:
    compiler = _compiler(tmp_path / "cc", "1", "printf 'error: \\377\\n' >&2; exit 1")
    with pytest.raises(SETUP.BuildFailed, match="cc failed: error: "):
        SETUP.run([compiler, "-c"])
