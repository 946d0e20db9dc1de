"""A model folder is untrusted: its paths, pickles, code and templates."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import environment, run_python
from safetensors.torch import save_file
from test_loader import empty_model, load, refused, split_in_two, write_index
from tiny_models import hf_model, save

from pagedattn.engine.models.config import load_model_config
from pagedattn.engine.models.folder import ModelFolder, UnsafePathError
from pagedattn.engine.models.loader import load_weights
from pagedattn.errors import SecurityError, UnsupportedError, WeightsError

OPENED: list[str] = []
RECORDING: list[bool] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and RECORDING:
        OPENED.append(str(args[0]))


sys.addaudithook(_audit)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Paths that Python opens during the test."""
    OPENED.clear()
    RECORDING.append(True)
    yield OPENED
    RECORDING.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(hf_model("qwen2", torch.float32, num_hidden_layers=1), tmp_path / "model")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A valid weights file beside the model folder."""
    file = tmp_path / "outside.safetensors"
    save_file({"model.norm.weight": torch.zeros(64)}, file)
    return file


class TestPaths:
    @pytest.mark.parametrize("kind", ["parent", "absolute", "link", "folder-link", "fifo", "folder", "nul", "missing"])
    def test_a_shard_outside_or_irregular_is_refused_unopened(
        self, kind: str, folder: Path, outside: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight_map = split_in_two(folder)
        name = {"parent": f"../{outside.name}", "absolute": str(outside), "nul": "a\0.safetensors"}.get(
            kind, "x.safetensors"
        )
        if kind == "link":
            (folder / name).symlink_to(outside)
        elif kind == "folder-link":
            (folder / "sub").symlink_to(folder.parent)
            name = f"sub/{outside.name}"
        elif kind == "fifo":
            os.mkfifo(folder / name)
        elif kind == "folder":
            (folder / name).mkdir()
        write_index(folder, {**weight_map, "model.norm.weight": name})
        native: list[str] = []
        real = sys.modules["pagedattn.engine.models.loader"].safe_open
        monkeypatch.setattr(
            "pagedattn.engine.models.loader.safe_open", lambda path, **k: native.append(str(path)) or real(path, **k)
        )
        start = time.monotonic()
        refused(folder)
        assert time.monotonic() - start < 1
        touched = [path for path in (*opened, *native) if outside.name in path or "x.safetensors" in path]
        assert touched == []
        write_index(folder, weight_map)
        load(folder)
        assert any("a.safetensors" in path for path in native), "a good shard must be seen, or nothing was tested"
        assert any("a.safetensors" in path for path in opened)

    def test_the_error_is_both_of_weights_and_of_safety(self, folder: Path, outside: Path) -> None:
        with pytest.raises(UnsafePathError) as caught:
            ModelFolder(folder).find("../outside.safetensors")
        assert isinstance(caught.value, SecurityError)
        assert isinstance(caught.value, WeightsError)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
    def test_json_files_are_checked_too(self, name: str, folder: Path, tmp_path: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        start = time.monotonic()
        with pytest.raises(UnsafePathError, match="pipe"):
            load(folder)
        assert time.monotonic() - start < 1
        (folder / name).unlink()
        secret = tmp_path / "secret.json"
        secret.write_text("{}", encoding="utf-8")
        (folder / name).symlink_to(secret)
        with pytest.raises(UnsafePathError, match="inside"):
            load(folder)

    def test_links_to_blobs_of_the_same_cache_entry_are_followed(self, folder: Path, tmp_path: Path) -> None:
        entry = tmp_path / "models--a--b"
        snapshot, blobs = entry / "snapshots" / "0123", entry / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for index, file in enumerate(sorted(folder.iterdir())):
            (blobs / str(index)).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(index))
        load(snapshot)
        weights = snapshot / "model.safetensors"
        weights.resolve().write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(WeightsError, match=f"^{re.escape(str(weights))} is not a safetensors file"):
            load(snapshot)
        other = tmp_path / "models--c--d" / "blobs"
        other.mkdir(parents=True)
        (other / "0").write_bytes((folder / "config.json").read_bytes())
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(other / "0")
        with pytest.raises(UnsafePathError):
            load(snapshot)

    def test_a_link_to_the_folder_itself_is_fine(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "latest").symlink_to(folder)
        load(tmp_path / "latest")

    def test_huge_json_is_refused(self, folder: Path) -> None:
        with (folder / "config.json").open("wb") as file:
            file.truncate(1 << 30)
        with pytest.raises(UnsafePathError, match="bytes"):
            load_model_config(ModelFolder(folder))


class Bomb:
    """Writes a marker file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


class TestPickles:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.ckpt", "x.pth", "x.pkl"])
    def test_refused_by_suffix(self, name: str, folder: Path, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        weight_map = split_in_two(folder)
        torch.save({"model.norm.weight": Bomb(marker)}, folder / name)
        write_index(folder, {**weight_map, "model.norm.weight": name})
        refused(folder, name, "safetensors")
        assert not marker.exists()

    @pytest.mark.parametrize("kind", ["zip", "pickle", "legacy", "gguf"])
    def test_refused_by_magic(self, kind: str, folder: Path, tmp_path: Path) -> None:
        marker, file = tmp_path / "marker", folder / "model.safetensors"
        if kind == "gguf":
            file.write_bytes(b"GGUF" + bytes(100))
        elif kind == "pickle":
            file.write_bytes(pickle.dumps(Bomb(marker)) + bytes(100))
        else:
            torch.save({"w": Bomb(marker)}, file, _use_new_zipfile_serialization=kind == "zip")
        refused(folder, {"zip": "zip", "gguf": "GGUF"}.get(kind, "Python object"))
        assert not marker.exists()
        if kind == "pickle":
            pickle.loads(file.read_bytes())
            assert marker.exists(), "the bomb must work, or nothing was tested"


class TestRemoteCode:
    def test_auto_map_is_refused_before_any_import(self, folder: Path, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        (folder / "modeling_x.py").write_text(
            f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n", encoding="utf-8"
        )
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for model_type in ("qwen2", "x"):
            config.update(model_type=model_type, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            with pytest.raises(SecurityError, match="auto_map"):
                empty_model(folder)
        assert not marker.exists()
        assert "modeling_x" not in sys.modules

    def test_an_unknown_model_type_lists_the_supported(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
        with pytest.raises(UnsupportedError, match=r"mamba.*llama, mistral, qwen2, qwen3"):
            empty_model(folder)

    def test_loading_imports_no_transformers(self, folder: Path) -> None:
        code = (
            "import sys, torch\n"
            "from pagedattn.engine.worker.runner import ModelRunner\n"
            "from pagedattn.engine.config import EngineConfig\n"
            f"ModelRunner(EngineConfig(model={str(folder)!r}, device='cpu', num_kv_blocks=4))\n"
            "print('transformers' in sys.modules)"
        )
        done = run_python("-c", code, env=environment())
        assert done.stdout.strip() == "False", done.stderr


def test_load_weights_of_a_pickle_named_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    with pytest.raises(WeightsError):
        load_weights(empty_model(folder), ModelFolder(folder), torch.device("cpu"))
