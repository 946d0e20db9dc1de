"""What make vllm-test keeps of vLLM's wheels, and which of them a Python can run."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import vllm_sources


def test_only_text_is_kept_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    kept = {"vllm/__init__.py", "vllm/configs/one.json", "vllm-1.0.dist-info/METADATA"}
    kept.add("vllm-1.0.dist-info/entry_points.txt")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in kept | {"vllm/_C.abi3.so", "vllm/third_party/kernel.cuh"}:
            archive.writestr(name, "")
    vllm_sources.unpack(wheel, tmp_path / "vllm")
    found = {
        path.relative_to(tmp_path / "vllm").as_posix() for path in (tmp_path / "vllm").rglob("*") if path.is_file()
    }
    assert found == kept


@pytest.mark.parametrize(
    ("needs", "python", "text"),
    [
        ("<3.15,>=3.11", (3, 10), "vllm-1.0 needs Python 3.11 or newer, this is 3.10: left out"),
        ("<3.15,>=3.11", (3, 11), ""),
        (">=3.9", (3, 10), ""),
    ],
)
def test_a_python_that_is_too_old_is_told(tmp_path: Path, needs: str, python: tuple[int, int], text: str) -> None:
    folder = tmp_path / "vllm-1.0" / "vllm-1.0.dist-info"
    folder.mkdir(parents=True)
    lines = "Metadata-Version: 2.4", "Name: vllm", f"Requires-Python: {needs}"
    (folder / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    assert vllm_sources.too_new(folder.parent, python) == text
