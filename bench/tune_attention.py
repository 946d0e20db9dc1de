"""Times launch configurations of the Triton attention kernel on one workload each; prints the best first."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import torch
from contenders import Contender
from problem import MODELS, Layers, make_layers
from timing import time_us
from workload import parse

from pagedattn.ops.attention_inputs import AttentionInputs
from pagedattn.ops.kernels import attention, merge_states
from pagedattn.ops.launch import AttentionConfig


def candidates(rows: int, heads: int, decode: bool) -> Iterator[AttentionConfig]:
    """Configurations worth a try for `rows` packed rows per sequence, `heads` query heads to a KV head."""
    if decode:
        for n, splits, stages, registers in itertools.product((64, 128), (1, 2, 4, 16), (2, 3), (128, None)):
            yield AttentionConfig(max(16, rows), n, heads, splits, True, 4, stages, registers)
    else:
        for m, n, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3)):
            yield AttentionConfig(m, n, heads, 1, False, warps, stages)


def launcher(layers: Layers, config: AttentionConfig, index: int):
    """One layer's attention with `config`, the merge of split keys included."""
    spec, cache, common = layers.attention.spec, layers.caches.layer(index), layers.common
    query = layers.queries[index]
    out = torch.empty_like(query)
    split = config.splits > 1
    target = torch.empty(config.splits, *query.shape, dtype=torch.float32, device=query.device) if split else out
    lse = torch.empty(config.splits, *query.shape[:2], dtype=torch.float32, device=query.device) if split else None
    args = (query, cache.key, cache.value, common.block_table, common.query_start_loc, common.seq_lens)
    bounds = (common.max_query_len, common.max_seq_len, common.num_decodes, False)
    inputs = AttentionInputs(*args, None, None, None, None, target, lse, spec.softmax_scale, 1.0, True, 0, 0.0, *bounds)

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
        work, (heads, kv_heads, _) = parse(shape), MODELS[model]
        layers = make_layers(work, model, Contender("TRITON", "TRITON"), torch.bfloat16)
        want, rows = layers.attend(0).float(), max(work.query_lens) * heads // kv_heads
        timed = []
        for config in candidates(1 << (rows - 1).bit_length(), heads // kv_heads, rows <= 64):
            try:
                run, out = launcher(layers, config, 0)
                run()
            except Exception as error:  # a configuration that does not fit this GPU
                print(text, tuple(config), type(error).__name__)
                continue
            wrong = float((out.float() - want).norm() / want.norm())
            calls = [launcher(layers, config, i)[0] for i in range(layers.caches.num_layers)]
            timed.append((time_us(calls, 8), wrong, config))
        today = time_us([lambda i=i, layers=layers: layers.attend(i) for i in range(layers.caches.num_layers)], 8)
        print(text, f"today: {today:.1f} us")
        for us, wrong, config in sorted(timed)[:6]:
            print(f"  {us:.1f} us  differs by {wrong:.1e}  {config}")


if __name__ == "__main__":
    main()
