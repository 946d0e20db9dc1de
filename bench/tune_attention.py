"""Times launch configurations of the Triton attention kernel: `python -m bench.tune_attention WORKLOAD...`.

Prints the best first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch

from pagedattn.ops.attention_inputs import AttentionInputs
from pagedattn.ops.kernels import attention, merge_states
from pagedattn.ops.launch import AttentionConfig

from .contenders import contenders
from .problem import Problem, make_problem
from .table import Case, case_of
from .timing import time_us

_HEADS = {"llama8b": (32, 8), "llama70b-tp8": (8, 1), "qwen3-0.6b": (16, 8)}


def candidates(rows: int, heads: int, decode: bool) -> Iterator[AttentionConfig]:
    """Configurations worth a try for `rows` packed rows per sequence, `heads` query heads to a KV head."""
    if decode:
        for n, splits, stages, registers in itertools.product((64, 128), (1, 2, 4, 16), (2, 3), (128, None)):
            yield AttentionConfig(max(16, rows), n, heads, splits, True, 4, stages, registers)
    else:
        for m, n, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3)):
            yield AttentionConfig(m, n, heads, 1, False, warps, stages)


def launcher(problem: Problem, config: AttentionConfig, index: int):
    """One layer's attention with `config`, the merge of split keys included."""
    cache, common = problem.paged().layer(index), problem.paged().common
    query, scale = problem.queries[index], problem.case.dim**-0.5
    out = torch.empty_like(query)
    split = config.splits > 1
    target = torch.empty(config.splits, *query.shape, dtype=torch.float32, device=query.device) if split else out
    lse = torch.empty(config.splits, *query.shape[:2], dtype=torch.float32, device=query.device) if split else None
    args = (query, cache.key, cache.value, common.block_table, common.query_start_loc, common.seq_lens)
    bounds = (common.max_query_len, common.max_seq_len, common.num_decodes, False)
    inputs = AttentionInputs(*args, None, None, None, None, target, lse, scale, 1.0, True, 0, 0.0, *bounds)

    def run() -> None:
        attention.launch(config, inputs, None)
        if lse is not None:
            merge_states.launch(target, lse, out, None)

    return run, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", help="such as llama8b:64q1s4k")
    for text in parser.parse_args().workloads:
        model, _, shape = text.partition(":")
        heads, kv_heads = _HEADS[model]
        case = Case(*case_of(shape, gpu=True)[:2], heads, kv_heads)
        problem, rows = make_problem(case), max(case.work.query_lens) * heads // kv_heads
        ours = contenders("TRITON")[0].run(problem)
        want, timed = ours.attend(0).float(), []
        for config in candidates(1 << (rows - 1).bit_length(), heads // kv_heads, rows <= 64):
            try:
                run, out = launcher(problem, config, 0)
                run()
            except Exception as error:  # a configuration that does not fit this GPU
                print(text, tuple(config), type(error).__name__)
                continue
            wrong = float((out.float() - want).norm() / want.norm())
            calls = [launcher(problem, config, i)[0] for i in range(problem.layers)]
            timed.append((time_us(calls), wrong, config))
        today = time_us([partial(ours.attend, i) for i in range(problem.layers)])
        print(text, f"today: {today:.1f} us")
        for us, wrong, config in sorted(timed)[:6]:
            print(f"  {us:.1f} us  differs by {wrong:.1e}  {config}")


if __name__ == "__main__":
    main()
