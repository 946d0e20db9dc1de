"""`python -m bench.op_paths` on a CPU: every case's builder, and a file that also tells of paths that failed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from pagedattn.bench import cache_ops, op_paths, op_problems, op_table
from pagedattn.bench.op_problems import OpCalls
from pagedattn.bench.op_table import OpCase, op_cases
from pagedattn.runtime import op_registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny table is for machines without a GPU")
BUILDERS = {
    "reshape_and_cache": partial(op_problems.write, tokens=3),
    "reshape_and_cache fp8": partial(op_problems.write, tokens=3, kv_cache_dtype="fp8"),
    "reshape_and_cache_classic": partial(op_problems.write_classic, tokens=3),
    "concat_and_cache_mla": partial(op_problems.write_latent, tokens=3),
    "concat_and_cache_mla fp8_e4m3": partial(op_problems.write_latent, tokens=3, kv_cache_dtype="fp8_e4m3"),
    "concat_and_cache_mla fp8_ds_mla": partial(op_problems.write_latent, tokens=3, kv_cache_dtype="fp8_ds_mla"),
    "copy_blocks": partial(op_problems.copy, pairs=2, block_bytes=64),
    "swap_blocks": partial(op_problems.swap, blocks=2, into_device=True),
    "gather_kv": partial(op_problems.gather, seqs=2, length=32),
    "merge_attn_states": partial(op_problems.merge, states=3, tokens=2),
    "compute_slot_mapping": partial(op_problems.slot_mapping, seqs=2, new=3),
}


@pytest.mark.parametrize("op", BUILDERS)
def test_every_path_is_right_and_a_wrong_result_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = OpCase(op, "", 1, BUILDERS[op])
    for path in op_table.paths_of(case):
        case.make(path).check()
    made = case.make("torch")
    called = getattr(op_problems.ops, case.name)
    # The op does all of its work but the last row's, block's or state's.
    shortened = {
        "copy_blocks": lambda caches, pairs, **rest: called(caches, pairs[:-1], **rest),
        "swap_blocks": lambda source, target, pairs, **rest: called(source, target, pairs[:-1], **rest),
        "gather_kv": lambda *args, **rest: (called(*args, **rest)[0].index_fill(0, torch.tensor(63), 0), None),
        "merge_attn_states": lambda outputs, lses, **rest: called(outputs[:-1], lses[:-1], **rest),
        "compute_slot_mapping": lambda table, *rest, **more: called(table.clone().fill_(1), *rest, **more),
    }
    write = lambda *args, **rest: called(*args[:-1], args[-1][:-1], **rest)  # noqa: E731
    monkeypatch.setattr(op_problems.ops, case.name, shortened.get(case.name, write))
    broken = case.make("torch") if case.name in ("copy_blocks", "swap_blocks") else made
    with pytest.raises(ArithmeticError):
        broken.check()


def test_the_table_has_small_and_large_calls_of_every_op() -> None:
    ops = [case.op for case in op_cases()]
    assert {*ops} == {*BUILDERS, "swap_blocks on the host", "paged_attention decode", "paged_attention prefill"} - {
        "swap_blocks"
    }
    assert all(ops.count(op) >= 2 for op in ops) and len({(case.op, case.size) for case in op_cases()}) == len(ops)


def test_paths_take_turns_and_a_failing_one_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: str) -> OpCalls:
        if path == "triton":
            raise RuntimeError("no kernel\nfor this")
        made = BUILDERS["gather_kv"](path)
        return made if path == "torch" else made._replace(check=lambda: op_problems.same(torch.ones(1), torch.zeros(1)))

    monkeypatch.setattr(op_paths, "op_cases", lambda: [OpCase("gather_kv", "2 x 32 tokens", 4096, make)])
    monkeypatch.setattr(op_paths, "paths_of", lambda case: ["csrc", "triton", "torch"])
    file = tmp_path / "paths.json"
    assert op_paths.main(["--json", str(file), "--seconds", "0.001"]) == 1  # a wrong result
    rows = {row["backend"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    assert rows["triton"]["refused"] == "no kernel for this" and rows["csrc"]["refused"].startswith("wrong: ")
    right = rows["torch"]
    assert right["us"] > 0 and right["host_us"] > 0 and right["stream_us"] > 0 and right["timed"] == "wall"
    assert right["gb_s"] == pytest.approx(4.096 / right["us"], abs=0.1)
    assert (right["suite"], right["op"], right["case"]) == ("ops", "gather_kv", "gather_kv, 2 x 32 tokens")
    assert right["default"] == op_registry.path_of("gather_kv", "cpu")
    out = capsys.readouterr().out
    assert "triton: no kernel for this" in out and "torch us" in out


def test_paths_that_no_graph_holds_are_compared_as_they_are_enqueued() -> None:
    row = {"us": 1.0, "stream_us": 9.0, "timed": "graph", "backend": "csrc"}
    other = {"us": 5.0, "stream_us": 5.0, "timed": "stream", "backend": "triton"}
    assert op_paths.fastest([row, other]) == "triton"
    assert op_paths.fastest([row, other | {"timed": "graph"}]) == "csrc"
    assert op_paths.fastest([row | {"us": None}]) is None


def test_the_suite_of_cache_ops_writes_latent_rows_in_every_format() -> None:
    rows = list(cache_ops.latent_writes())
    assert [row["refused"] for row in rows] == [None] * len(rows) and {row["suite"] for row in rows} == {"cache"}
    assert {row.get("kv_cache_dtype", "auto") for row in rows} == {"auto", "fp8_e4m3", "fp8_ds_mla"}
    assert all((row["head_dim"], row["block_size"], row["us"] > 0) == (576, 64, True) for row in rows)
    moved = [op_problems.latent_bytes(8, form) for form in ("auto", "fp8_e4m3", "fp8_ds_mla")]
    assert moved == [8 * (576 * 4 + stored) for stored in (576 * 4, 576, 656)]
    assert cache_ops.latent_writes in cache_ops.OPS
