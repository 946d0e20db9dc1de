"""The command line: everything that is known is shown, reasons come with a status, and nothing else leaks out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import environment, run_python

from pagedattn import AttentionSpec, AttentionType, env
from pagedattn.backends import registry, selector
from pagedattn.backends.base import Availability
from pagedattn.backends.flash_attn import versions
from pagedattn.backends.registry import register_backend
from pagedattn.backends.torch_native import TorchBackend
from pagedattn.cli import command as cli
from pagedattn.cli import env_report as cli_env
from pagedattn.cli.display import WIDTH
from pagedattn.spec import Capabilities, GraphLevel, IntRange
from pagedattn.testing import csrc_status, path_of

ROOT = Path(__file__).parent.parent
LAYER = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--device", "cpu")
# Every field of Capabilities with a value of its own, and how a person reads it. A new field needs a line here.
ODD = {
    "devices": (("cpu", "tpu"), "cpu, tpu"),
    "min_capability": ((7, 5), "7.5"),
    "max_capability": ((9, 1), "9.1"),
    "dtypes": ((torch.float16, torch.bfloat16), "fp16, bf16"),
    "kv_cache_dtypes": (("auto", "fp8_e5m2"), "auto, fp8_e5m2"),
    "kv_scales": (("none", "head"), "none, head"),
    "head_dims": (IntRange(values=(64, 192)), "64, 192"),
    "any_head_dim_v": (True, "yes"),
    "latent_dims": (IntRange(values=(512,)), "512"),
    "rope_dims": (IntRange(values=()), "-"),
    "latent_kv_cache_dtypes": (("auto", "fp8_e4m3"), "auto, fp8_e4m3"),
    "block_sizes": (IntRange(256, 4096, 256), "multiples of 256 in 256..4096"),
    "default_block_size": (512, "512"),
    "cache_layouts": (("HND",), "HND"),
    "gqa_ratios": (IntRange(1, 8), "1..8"),
    "attn_types": ((AttentionType.CROSS,), "cross"),
    "non_causal": (False, "-"),
    "masks": (("sliding_window",), "sliding_window"),
    "softcap": (False, "-"),
    "alibi": (True, "yes"),
    "sinks": (False, "-"),
    "lse": (True, "yes"),
    "rounded_lse": (True, "yes"),
    "rounded_states": (False, "-"),
    "fp8_products": (True, "yes"),
    "fp8_queries": (True, "yes"),
    "context_parallel": (True, "yes"),
    "deterministic": (True, "yes"),
    "compile": (False, "-"),
    "graph_level": (GraphLevel.UNIFORM_SINGLE_TOKEN_DECODE, "uniform single token decode"),
    "needs_clean_cache": (True, "yes"),
}


class OddBackend(TorchBackend):
    name = "ODD"

    @classmethod
    def availability(cls) -> Availability:
        return Availability(ok=False, reason="odd_lib is not installed", hint="pip install odd-lib")

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(**{name: value for name, (value, _) in ODD.items()})  # type: ignore[arg-type]


class AbleBackend(TorchBackend):
    name = "ABLE"

    @classmethod
    def variant(cls, spec: AttentionSpec) -> str:
        return "able-kernel"


class FaultyBackend(TorchBackend):
    name = "FAULTY"

    @classmethod
    def availability(cls) -> Availability:
        raise OSError("libfaulty.so:\nundefined symbol")


@pytest.fixture(autouse=True)
def _known_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(registry, "_backends", {"TORCH": registry._backends["TORCH"]})
    monkeypatch.setattr(
        selector, "PRIORITY", {device: {"prefill": ("TORCH",), "decode": ("TORCH",)} for device in ("cpu", "cuda")}
    )


def known(*names: str) -> None:
    classes = {"ODD": "OddBackend", "ABLE": "AbleBackend", "FAULTY": "FaultyBackend", "BROKEN": "Missing"}
    for name in names:
        register_backend(name, f"{__name__}:{classes.get(name, 'OddBackend')}")


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    assert bool(err) == (status == 2), err
    return out


def test_backends_shows_every_capability(capsys: pytest.CaptureFixture[str]) -> None:
    known("ODD")
    lines = run(capsys, "backends").splitlines()
    assert "ODD    no: odd_lib is not installed (pip install odd-lib)" in lines
    assert f"TORCH  {torch.__version__}" in lines
    header = next(line for line in lines if line.split() == ["TORCH", "ODD"])
    shown = {line.split()[0]: line for line in lines[lines.index(header) + 1 :] if line[:1].strip()}
    assert set(ODD) == {one.name for one in fields(Capabilities)}
    for name, (_, text) in ODD.items():
        assert shown[name][header.index("ODD") :] == text, name
    assert shown["devices"][: header.index("ODD")].split(maxsplit=1)[1].strip() == "cpu, cuda, mps, xpu"


def test_backends_as_json_has_every_capability(capsys: pytest.CaptureFixture[str]) -> None:
    known("ODD")
    found = json.loads(run(capsys, "backends", "--json"))
    assert list(found) == ["TORCH", "ODD"]
    assert found["ODD"]["here"]["reason"] == "odd_lib is not installed" and found["TORCH"]["here"]["ok"] is True
    serves = found["ODD"]["capabilities"]
    assert list(serves) == [one.name for one in fields(Capabilities)]
    assert (serves["dtypes"], serves["min_capability"]) == (["float16", "bfloat16"], [7, 5])
    assert serves["block_sizes"] == {"low": 256, "high": 4096, "multiple_of": 256, "values": None}
    assert (serves["graph_level"], serves["attn_types"]) == ("uniform_single_token_decode", ["cross"])


@pytest.mark.parametrize("installed", [(), (2,), (2, 3)])
def test_flash_attention_2_and_3_are_shown_apart_whichever_are_installed(
    installed: tuple[int, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._backends, "FLASH_ATTN", "pagedattn.backends.flash_attn:FlashAttnBackend")
    monkeypatch.setattr(versions, "release_of", lambda distribution: None)
    probes = {probe for one in versions.VERSIONS if one.number in installed for probe in one.probes}
    monkeypatch.setattr(versions, "_installed", lambda module: module in probes)
    lines = run(capsys, "backends").splitlines()
    header = next(line for line in lines if line.split()[:1] == ["TORCH"] and "(" in line)
    assert header.split() == ["TORCH", "FLASH_ATTN", "(FA2)", "FLASH_ATTN", "(FA3)"]
    capability = next(line.split() for line in lines if line.startswith("min_capability"))
    assert capability == ["min_capability", "any", "8.0", "9.0"]
    found = json.loads(run(capsys, "backends", "--json"))["FLASH_ATTN"]
    for number, hint in ((2, "pip install 'flash-attn"), (3, "hopper folder")):
        told = " ".join(line for line in lines if line.startswith(f"FLASH_ATTN (FA{number})"))
        assert ("no: not installed" in told) == (number not in installed) and (hint in told) == ("no:" in told)
        assert found["versions"][f"FA{number}"]["here"]["ok"] == (number in installed)
        assert found["versions"][f"FA{number}"]["capabilities"]["default_block_size"] == {2: 256, 3: 16}[number]


def test_a_backend_that_cannot_be_loaded_is_listed_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    known("BROKEN", "FAULTY")
    found = json.loads(run(capsys, "backends", "--json"))
    assert found["BROKEN"]["capabilities"] is None and "Missing" in found["BROKEN"]["here"]["reason"]
    assert found["FAULTY"]["here"]["reason"] == "libfaulty.so: undefined symbol"
    assert found["TORCH"]["capabilities"]["softcap"] is True
    assert "no: libfaulty.so: undefined symbol" in run(capsys, "backends")
    assert "no: libfaulty.so: undefined symbol" in run(capsys, "env")


def test_many_backends_and_long_reasons_stay_within_the_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"BACKEND_NUMBER_{i:02}" for i in range(11)]
    known(*names)
    out = run(capsys, "backends")
    assert max(map(len, out.splitlines())) <= WIDTH == 120
    assert all(out.count(name) == 2 for name in names)
    assert out.count("needs_clean_cache") == 3
    hint = "pip install " + " ".join(f"package-number-{i}" for i in range(20))
    monkeypatch.setattr(OddBackend, "availability", lambda: Availability(ok=False, reason="absent", hint=hint))
    for command in (("backends",), ("env",), ("why", *LAYER)):
        out = run(capsys, *command)
        assert max(map(len, out.splitlines())) <= WIDTH and hint in " ".join(out.split())


def test_why_names_the_winner_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    known("ODD")
    lines = run(capsys, "why", *LAYER).splitlines()
    assert {"prefill     TORCH", "decode      TORCH", "block_size  16", "chosen_by   measured priority"} < set(lines)
    assert "num_heads=8" in lines[0] and "dtype=fp32" in lines[0]
    reasons = lines[lines.index("not ODD:") + 1 :]
    assert any("odd_lib is not installed" in line and "pip install odd-lib" in line for line in reasons)
    assert "  dtype=float32 (serves float16, bfloat16): cast the model" in reasons
    assert not any("who can" in line for line in lines)


def test_why_says_who_asked_for_what(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known("ABLE")
    lines = run(capsys, "why", *LAYER, "--backend", "prefill=TORCH,decode=ABLE").splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines if line.startswith(("prefill", "decode", "chosen_by")))
    told = {"prefill": "TORCH", "decode": "ABLE", "decode_variant": "able-kernel", "chosen_by": "argument"}
    assert facts == told
    monkeypatch.setenv("PAGEDATTN_BACKEND", "ABLE")
    answer = json.loads(run(capsys, "why", *LAYER, "--json"))
    assert (answer["prefill"], answer["chosen_by"], answer["error"]) == ("ABLE", "PAGEDATTN_BACKEND", None)
    assert answer["rejections"] == {"TORCH": [], "ABLE": []}
    assert list(answer["spec"]) == [one.name for one in fields(AttentionSpec)]
    assert (answer["spec"]["dtype"], answer["spec"]["graph_level"]) == ("float32", "never")
    assert "not TORCH: lower priority" in run(capsys, "why", *LAYER)


def test_status_1_where_the_one_asked_for_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    known("ODD", "BROKEN")
    out = run(capsys, "why", *LAYER, "--backend", "ODD", status=1)
    assert "backend ODD, asked for by argument, cannot serve this:" in out and "odd_lib" in out
    assert out.endswith("who can: TORCH\n")
    answer = json.loads(run(capsys, "why", *LAYER, "--backend", "ODD", "--json", status=1))
    assert "prefill" not in answer and "asked for by argument" in answer["error"]
    odd = {reason["feature"]: reason for reason in answer["rejections"]["ODD"]}
    assert {"availability", "dtype", "attn_type", "cache_layout", "clean_cache"} <= set(odd)
    assert odd["availability"]["hint"] == "pip install odd-lib"
    assert "Missing" in run(capsys, "why", *LAYER, "--backend", "BROKEN", status=1)


def test_status_1_where_nobody_can(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "why", *LAYER, "--context-parallel", "2", status=1)
    assert "no backend can serve this:\n  TORCH: context_parallel=" in out and "who can" not in out


BAD = {
    "": "COMMAND",
    "whi": "invalid choice",
    "why --heads 8": "--head-dim",
    "why --heads x --head-dim 8": "--heads: invalid int value: 'x'",
    "why --heads 8 --head-dim 64 --kv-heads 3": "a multiple of num_kv_heads=3",
    "why --heads 8 --head-dim 64 --window 0": "sliding_window must be",
    "why --heads 8 --head-dim 64 --softcap nan": "softcap must be",
    "why --heads 8 --head-dim 64 --capability 9": "MAJOR.MINOR",
    "why --heads 8 --head-dim 64 --device gpu": "cuda or cpu, got 'gpu'",
    "why --heads 8 --head-dim 64 --dtype fp9": "bf16",
    "why --heads 8 --head-dim 64 --backend TORHC": "did you mean TORCH?",
    "why --heads 8 --head-dim 64 --backend later=TORCH": "prefill=NAME,decode=NAME",
    "why --heads 8 --head-dim 64 --context-parallel 0": "context_parallel.world",
    "backends --jsn": "unrecognized arguments: --jsn",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_value_is_one_line_and_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("pagedattn: ") and err.count("\n") == 1 and err.endswith("\n")
    assert BAD[line] in err


@pytest.mark.parametrize("name", ["PAGEDATTN_PLUGINS", "PAGEDATTN_LOG"])
def test_a_bad_variable_is_one_line_and_status_2(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "yes")
    for command in (("backends",), ("why", *LAYER), ("env",)):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and name in err


def test_env_shows_the_variables_and_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known("ODD")
    monkeypatch.setenv("PAGEDATTN_BACKEND", "TORCH")
    for secret in ("PAGEDATTN_TOKEN", "HF_TOKEN", "CUDA_SECRET"):
        monkeypatch.setenv(secret, "a5ecr3t")
    out, facts = run(capsys, "env"), json.loads(run(capsys, "env", "--json"))
    assert "a5ecr3t" not in out + json.dumps(facts) and "_TOKEN" not in out + json.dumps(facts)
    assert "PAGEDATTN_BACKEND=TORCH" in out and "PAGEDATTN_CHECK is not set" in out
    assert all(meaning in out for meaning in env.VARIABLES.values())
    assert {name: told["meaning"] for name, told in facts["variables"].items()} == env.VARIABLES
    assert facts["variables"]["PAGEDATTN_BACKEND"]["value"] == "TORCH"
    assert facts["variables"]["PAGEDATTN_LOG"]["value"] is None
    assert facts["torch"] == torch.__version__ and facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["extension"] == csrc_status() != ""
    assert facts["cache_writes"].startswith(f"{path_of('reshape_and_cache', 'cpu')} on cpu") and "block_copies" in out
    assert facts["backends"]["ODD"]["hint"] == "pip install odd-lib" and facts["backends"]["TORCH"]["ok"]
    assert "ODD    no: odd_lib is not installed (pip install odd-lib)" in out


def test_env_shows_gpus_and_driver(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    facts = json.loads(run(capsys, "env", "--json"))
    assert facts["gpus"] == ["NVIDIA H200 (9.0)"] * 2
    assert re.fullmatch(r"(csrc|torch) on cpu, (csrc|triton|torch) on cuda", facts["block_copies"])
    file = tmp_path / "version"
    for kind, driver in (("x86_64 Kernel Module", "570.86.15"), ("Open Kernel Module for x86_64", "580.95")):
        file.write_text(f"NVRM version: NVIDIA UNIX {kind}  {driver}  Thu Jan 23\nGCC 12.3.0\n", encoding="utf-8")
        assert cli_env._driver(file) == driver
    assert cli_env._driver(tmp_path / "absent") is None


def test_importing_and_starting_is_cheap() -> None:
    script = (
        "import sys, pagedattn\n"
        "print('pagedattn.cli' in sys.modules)\n"
        "from pagedattn.cli import main\n"
        "main(['env', '--json']), main(['backends', '--json'])\n"
        "heavy = {'triton', 'flash_attn', 'flashinfer', 'transformers', 'rich', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = run_python("-c", script, env=environment())
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1], done.stderr) == ("False", "[]", "")


def test_python_m_runs_it_and_a_reader_may_leave() -> None:
    command = [sys.executable, "-m", "pagedattn", "backends"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 1
