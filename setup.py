"""Where the packages lie, and how the optional extension is built; everything else is in pyproject.toml.

`python setup.py build_ext --inplace` compiles csrc/ against the torch that it can import: the GPU kernels too where
that torch has CUDA and nvcc is found, else the CPU twins only. Whatever is missing or fails, the installation goes on
without, and a wheel is pure (py3-none-any); pagedattn/_csrc.txt keeps the reason. TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX
and MAX_JOBS are honoured.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
ARCHS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# Only what torch 2.10 promised to keep: one binary serves that version and all later ones.
DEFINES = ("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY")
CHECKOUT_ONLY = "test_|conftest$|gpu_test$|host_cost$|sanitize$|tune_|vllm_"  # modules of bench/
AGAIN = (
    "then build again, not in isolation: pip install --no-build-isolation, "
    "or in a checkout python setup.py build_ext --inplace"
)


class BuildFailed(Exception):
    """Why there will be no extension (or none for the GPU), in words for the user."""


def find_nvcc() -> str | None:
    """The CUDA compiler: of CUDA_HOME, on the PATH, or in its usual place."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = [shutil.which("nvcc", path=f"{home}/bin") for home in homes if home]
    return next(filter(None, [*found, shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]), None)


def find_cxx() -> str | None:
    """The C++ compiler: CXX, or what the PATH has."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)


def gencode(nvcc: str, archs: str | None = None) -> list[str]:
    """Flags for the architectures asked for (TORCH_CUDA_ARCH_LIST), or for those of ARCHS that this nvcc knows.

    The newest one is kept as PTX too, which later GPUs compile for themselves.
    """
    items = re.split(r"[;,\s]+", archs or os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    asked = [item for item in items if item]
    if not asked:
        known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
        asked = [arch for arch in ARCHS if f"compute_{arch.replace('.', '')}" in known]
        asked[-1:] = [f"{arch}+PTX" for arch in asked[-1:]]
    flags = []
    for arch in asked:
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", arch)
        if match is None:
            raise BuildFailed(f"TORCH_CUDA_ARCH_LIST must be like '8.0;9.0', got {arch!r}")
        number = match[1] + match[2]
        codes = f"sm_{number},compute_{number}" if match[3] else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code=[{codes}]")
    return flags


def compile_command(compiler: str, source: Path, include: str, flags: Sequence[str]) -> list[str]:
    """What compiles one source, but for the output; `flags` are the GPU architectures (none in a build for the CPU)."""
    host = ["-fPIC", "-fvisibility=hidden", "-Wall"]
    if source.suffix == ".cu":
        host = [f"-Xcompiler={','.join(host)}", "--threads=0", *flags]
    # Without it torch's headers hide the current CUDA stream, also from host files.
    defines = (*DEFINES, "-DUSE_CUDA") if flags else DEFINES
    return [compiler, "-c", "-O3", "-std=c++20", *host, *defines, "-isystem", include, str(source)]


def sources(cuda: bool) -> list[Path]:
    """The files to compile."""
    return sorted([*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp"), *(CSRC.glob("*.cu") if cuda else ())])


def run(command: Sequence[str]) -> None:
    """Run a compiler, or raise with its first error in the first line and the end of what it said below."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        first = next((line for line in said.splitlines() if "error" in line.lower()), f"status {done.returncode}")
        raise BuildFailed(f"{Path(command[0]).name} failed: {first}\n{' '.join(command)}\n{said[-4000:]}")


def compiled(command: list[str], folder: Path) -> Path:
    """The object of a compile command; one made before from the same texts by the same command and compiler is kept."""
    texts = [Path(command[-1]), *sorted(CSRC.glob("*.h")), *sorted(CSRC.glob("*.cuh"))]
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    parts = [*map(os.fsencode, command), version, *(text.read_bytes() for text in texts)]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    out = folder / f"{Path(command[-1]).name}.{key}.o"
    if not out.exists():
        partial = out.with_suffix(f".{os.getpid()}")
        run([*command, "-o", str(partial)])
        partial.replace(out)
    return out


def build(target: Path, folder: Path) -> str:
    """Compile and link the extension to `target`; returns what was built, for people.

    Raises:
        BuildFailed: there is no torch or no compiler, or compiling fails.
    """
    try:
        import torch
    except Exception as error:  # a broken torch raises anything
        raise BuildFailed(f"torch could not be imported ({error}); install it, {AGAIN}") from error
    if torch.__file__ is None:
        raise BuildFailed(f"torch could not be imported (a folder of that name is no package); install it, {AGAIN}")
    cxx = find_cxx()
    if cxx is None:
        raise BuildFailed(f"no C++ compiler was found; install one (g++), {AGAIN}")
    where = Path(torch.__file__).parent
    folder = folder / str(torch.__version__)
    if torch.version.cuda is None:
        reason = "this torch has no CUDA"
    elif (nvcc := find_nvcc()) is None:
        reason = f"no nvcc was found; set CUDA_HOME, {AGAIN}"
    else:
        try:
            flags = gencode(nvcc)
            link(target, folder, where, cxx, nvcc, flags)
            archs = " ".join(re.findall(r"code=\[(.*?)\]", " ".join(flags)))
            return f"built with torch {torch.__version__} for the CPU and CUDA ({archs})"
        except (BuildFailed, OSError, subprocess.CalledProcessError) as error:
            reason = f"the CUDA build failed: {error}"
    link(target, folder, where, cxx, None, [])
    return f"built with torch {torch.__version__} for the CPU only: {reason}"


def jobs() -> int:
    """How many compilers run at once: MAX_JOBS where that is a positive number, else one per core."""
    asked = os.environ.get("MAX_JOBS", "").strip()
    return (int(asked) if asked.isdecimal() else 0) or os.cpu_count() or 1


def link(target: Path, folder: Path, torch: Path, cxx: str, nvcc: str | None, flags: list[str]) -> None:
    """Compile everything, several files at once, and link it against torch's libraries (and CUDA's runtime, static)."""
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    commands = [
        compile_command(nvcc if nvcc and file.suffix == ".cu" else cxx, file, f"{torch}/include", flags)
        for file in sources(nvcc is not None)
    ]
    with ThreadPoolExecutor(jobs()) as pool:
        objects = [str(one) for one in pool.map(lambda command: compiled(command, folder), commands)]
    libraries = [f"-L{torch}/lib", "-ltorch_cpu", *(["-ltorch_cuda"] if nvcc else [])]
    partial = target.with_suffix(f".{os.getpid()}")
    run([nvcc or cxx, "-shared", *objects, *libraries, "-o", str(partial)])
    partial.replace(target)


class BuildCsrc(build_ext):
    """Builds pagedattn/_csrc.so, or leaves the reason beside it; never fails."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.so"  # loaded by torch, not imported: no Python version in its name

    def run(self) -> None:
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).absolute()
        try:
            if not self.inplace:
                target.unlink(missing_ok=True)  # a build folder is used again
            text = build(target, Path(self.build_temp).absolute())
        except Exception as error:  # whatever it is, the library works without
            text = f"not built: {error}"
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))  # what a compiler says may be in any language
        if not self.inplace and not target.exists():
            self._make_wheel_pure()
        # An editable installation in isolation sees no torch, and must not spoil what was built in place before.
        if text.startswith("built") or not target.exists():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.with_suffix(".txt").write_text(f"{text}\n", encoding="utf-8", errors="replace")
            except OSError as error:
                print(f"the note could not be written: {error!a}")

    def _make_wheel_pure(self) -> None:
        """Without the extension a wheel is for every platform, which its tag and the place of its files must say."""
        self.distribution.ext_modules = []
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        if wheel is not None:
            wheel.root_is_pure = True

    def get_outputs(self) -> list[str]:
        target = Path(self.get_ext_fullpath(self.extensions[0].name))
        return [str(file) for file in (target, target.with_suffix(".txt")) if file.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildPy(build_py):
    """Leaves out what of bench/ runs in a checkout only: its tests and the tools of `make gpu-*`."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [one for one in modules if package != "pagedattn.bench" or not re.match(CHECKOUT_ONLY, one[1])]


library = find_packages(include=["pagedattn", "pagedattn.*"], exclude=["pagedattn.engine*", "pagedattn.bench*"])
engine = ["pagedattn.engine", *(f"pagedattn.engine.{name}" for name in find_packages("engine"))]
if __name__ == "__main__":
    limited = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}
    setup(
        packages=[*library, *engine, "pagedattn.bench"],
        package_dir={"pagedattn.engine": "engine", "pagedattn.bench": "bench"},
        package_data={"pagedattn": ["py.typed"]},
        ext_modules=[Extension("pagedattn._csrc", [])],
        cmdclass={"build_ext": BuildCsrc, "build_py": BuildPy},
        options=limited,
    )
