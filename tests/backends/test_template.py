"""The template of examples/backend_template, installed as a user would, in processes that know nothing else of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import CHECKOUT, environment, run_python

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = ROOT / "examples" / "backend_template"
LAYER = ("why", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--device", "cpu")
# A backend that lets a token attend to the one after it, under a name of its own.
WRONG = """
from dataclasses import replace

from my_attention import MyBackend, MyMetadataBuilder


class Late(MyMetadataBuilder):
    def build(self, common, into=None, capture=False):
        right = super().build(common, into, capture)
        return replace(right, visible=right.visible | right.visible.roll(1, 2) & right.live[:, None])


class Wrong(MyBackend):
    name, builder = "WRONG", Late
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the template package, its entry points included."""
    for name in ("pip", "setuptools"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not here to install the template with")
    folder, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source") / "template"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True, capture_output=True, timeout=120)
    (folder / "wrong.py").write_text(WRONG, encoding="utf-8")
    return folder


def run(installed: Path, *argv: str, status: int = 0, **variables: str) -> str:
    given = environment(installed, CHECKOUT, without=["PAGEDATTN_"], OMP_NUM_THREADS="1") | variables
    done = run_python(*(argv if argv[0] == "-c" else ("-m", "pagedattn", *argv)), cwd=installed, env=given)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_and_selected(installed: Path) -> None:
    found = json.loads(run(installed, "backends", "--json"))
    assert found["MINE"]["here"] == {"ok": True, "version": "0.1.0", "reason": "", "hint": ""}
    answer = json.loads(run(installed, *LAYER, "--json", PAGEDATTN_BACKEND="MINE"))
    assert (answer["prefill"], answer["decode"], answer["chosen_by"]) == ("MINE", "MINE", "PAGEDATTN_BACKEND")
    refused = run(installed, *LAYER, "--window", "9", status=1, PAGEDATTN_BACKEND="MINE")
    assert "MINE, asked for by PAGEDATTN_BACKEND" in refused and "sliding_window=9 (serves none)" in refused


def test_it_conforms_and_a_wrong_one_does_not(installed: Path) -> None:
    out = run(installed, "conformance", "MINE", "--device", "cpu", "--dtype", "fp32")
    assert out.startswith("MINE on cpu: conforms (91 passed, 0 failed, ") and "sliding_window (" in out
    report = json.loads(run(installed, "conformance", "wrong:Wrong", "--device", "cpu", "--json", status=1))
    assert report["ok"] is False and report["backend"] == "WRONG"
    # Tokens that are their sequence's last have nobody after them: decodes pass, and everything else must not.
    assert len(report["failed"]) >= 40 and len(report["passed"]) >= 10
    assert all("AssertionError" in why for why in report["failed"].values()) and "mixed-float32" in report["failed"]


def test_its_own_test_passes(installed: Path) -> None:
    script = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    assert "1 passed" in run(installed, "-c", script, str(TEMPLATE / "test_my_attention.py"))


def test_it_is_benchmarked_by_name(installed: Path) -> None:
    file = installed / "result.json"
    names = ("--backends", "MINE,TORCH", "--workload", "2q7_3q1s9", "--json", str(file))
    run(installed, "bench", *names, CUDA_VISIBLE_DEVICES="")
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["backend"] for row in rows] == ["TORCH", "MINE"] and not any(row["refused"] for row in rows)
    assert all(row["us"] > 0 and row["error"] < 1e-5 for row in rows)


def test_it_is_short() -> None:
    assert len((TEMPLATE / "my_attention.py").read_text(encoding="utf-8").splitlines()) <= 110
