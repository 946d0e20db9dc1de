"""Tools of `bench/` that measure on a GPU: what their options mean, as far as a machine without one can tell."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.bench import host_cost, sanitize
from pagedattn.kernels.decode.plan import DecodeTuning
from pagedattn.testing import has_triton, interpreted, path_of

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="what they do on a machine without a GPU")
needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")


@CPU_ONLY
@needs_triton
def test_host_cost_counts_sequences_and_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`builds` runs, each call once; the rest needs a process without the interpreter."""
    asked: dict[str, int] = {}
    fake = type(sys)("fake_gpu")
    vars(fake).update(install=lambda: None, launched=type("Launched", (), {"keep": True})())
    built, usual = list[Any](), "1" if interpreted() else "0"
    real = host_cost.common_of

    def common_of(seqs: int, keys: int, device: torch.device) -> Any:
        built.append(real(seqs, keys, device))
        return built[-1]

    def stages(seqs: int) -> dict[str, float]:
        asked["seqs"] = seqs
        monkeypatch.setenv("TRITON_INTERPRET", usual)  # backends keep what they find
        return {"layer call": 1.5}

    monkeypatch.setitem(sys.modules, "fake_gpu", fake)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, value in {"stages": stages, "launches": dict, "common_of": common_of}.items():
        monkeypatch.setattr(host_cost, name, value)
    monkeypatch.setattr(host_cost, "host_us", lambda call, calls=1: (call(), 2.0)[1])
    file = tmp_path / "host.json"
    monkeypatch.setattr(sys, "argv", ["host_cost.py", "--seqs", "3", "--requests", "5", "--json", str(file)])
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # main() removes it
    host_cost.main()
    assert asked == {"seqs": 3} and [one.num_seqs for one in built] == [5]
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert rows["layer call"] == 1.5 and rows["CommonAttentionMetadata.from_lengths"] == rows["build, TORCH"] == 2.0
    assert f"{'layer call':48} {1.5:8.2f} us" in capsys.readouterr().out


@CPU_ONLY
@pytest.mark.parametrize("words", [[], ["--paths", "csrc"], ["--paths", "triton"]], ids=str)
def test_sanitize_takes_the_paths_asked_for(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU by torch's path: each op's results are compared there too, but for copies, which pin memory."""
    if path_of("copy_blocks", "cpu") != "csrc":
        pytest.skip("the extension is not built")
    taken: list[str] = []
    real = sanitize.gathers

    def gathers(path: str) -> int:
        taken.append(path)
        return real("torch")

    monkeypatch.setattr(sanitize, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, value in {"gathers": gathers, "copies": lambda path: 10, "attention": lambda: 100}.items():
        monkeypatch.setattr(sanitize, name, value)
    writes = sanitize.writes
    monkeypatch.setattr(sanitize, "writes", lambda path: writes("torch"))
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *words])
    sanitize.main()
    paths = words[1].split(",") if words else ["csrc", "triton"]
    done = len(paths) * (12 + 10 + 4) + 100 * ("triton" in paths)
    assert taken == paths and capsys.readouterr().out == f"{done} calls by {' and '.join(paths)} checked\n"


def tuned(monkeypatch: pytest.MonkeyPatch, file: Path, *words: str) -> dict[str, dict[str, DecodeTuning | None]]:
    """What would be timed: variants by case."""
    from pagedattn.bench import tune_decode

    plans: dict[str, dict[str, DecodeTuning | None]] = {}

    def tune(name: str, variants: dict[str, DecodeTuning | None], rounds: int) -> list[tune_decode.Row]:
        plans[name] = variants
        return [tune_decode.Row(name, one, 10.0 + at, 9.0, 1, 0.0, "") for at, one in enumerate(variants)] * rounds

    monkeypatch.setattr(tune_decode, "tune", tune)
    monkeypatch.setattr(sys, "argv", ["tune_decode.py", str(file), *words])
    tune_decode.main()
    return plans


@CPU_ONLY
@needs_triton
def test_what_the_decode_kernel_is_tuned_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedattn.bench import tune_decode

    file, every = tmp_path / "out.json", [*tune_decode.CASES]
    given = (
        "--variants",
        "deep=64/4/5/1,reduction_unroll_regs=64,prefetch_block_table=0",
        "free=32/2/4/4,max_registers=0,tile_overhead=2",
    )
    plans = tuned(monkeypatch, file, "--cases", f"nobody,{every[1]}", *given, "--groups", "short", "--rounds", "2")
    deep = DecodeTuning(64, 4, 5, 1)._replace(reduction_unroll_regs=64, prefetch_block_table=False)
    free = DecodeTuning(32, 2, 4, 4)._replace(max_registers=None, tile_overhead=2)
    assert plans == {every[1]: {"default": None, "deep": deep, "free": free}}
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2 * 3 and {row["case"] for row in rows} == {every[1]}
    assert "10.00*" in capsys.readouterr().out

    group = dict(map(tune_decode.variant_of, tune_decode.GROUPS["tokens"].variants))
    plans = tuned(monkeypatch, file, "--groups", "tokens")
    assert [*plans] == every and all(one == {"default": None, **group} for one in plans.values())
    assert tuned(monkeypatch, file, "--seconds", "-1") == {}
    assert f"no time left for {every[0]}\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tuned(monkeypatch, file, "--groups", "nobody")
    for name in tune_decode.GROUPS:
        for text in tune_decode.GROUPS[name].variants:
            assert tune_decode.variant_of(text)[1].block_n in (32, 64, 128)
