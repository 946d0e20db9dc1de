"""Conversations that take turns over a cache too small for all: hits and time to first token, by what keeps prefixes.

    python -m bench.prefix_turns --json turns.json

Each conversation asks twice, after all others have asked; the second prompt is the first and a few tokens more. With
`prefix_space` evicted blocks are read back from host memory, without they are computed again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedattn.engine import LLM

from .engine_cases import LLAMA_8B, TINY, EngineCase, equal
from .report import ResultFile

_NEW = 64  # tokens of a second turn


def measure(case: EngineCase, space: int) -> dict[str, Any]:
    """Both turns of all conversations, one request after another: what the second turns found, and how long they took.

    `generated` is what they generated, to be the same whatever keeps the prefixes.
    """
    prompts, (params, *_) = case.requests()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(case.write(Path(folder)), load_format="dummy", prefix_space=space, **case.options)
        llm.generate([prompts[0][::-1]], params, progress=False)  # compiles what is not captured
        seconds: list[list[float]] = []
        for new in ([], list(range(_NEW))):
            before = llm.stats().counters
            outputs = [llm.generate([prompt + new], params, progress=False)[0] for prompt in prompts]
            seconds.append([output.time_to_first_token or 0.0 for output in outputs])
        after = llm.stats().counters
        llm.close()
    asked = after.queried_tokens - before.queried_tokens
    return {
        "suite": "prefix_turns",
        "model": case.model,
        "conversations": len(prompts),
        "tokens": len(prompts[0]),
        "prefix_space": space,
        "options": dict(case.options),
        "hit_rate": round((after.cached_tokens - before.cached_tokens) / asked, 4),
        "first_turn_ms": round(1e3 * statistics.median(seconds[0]), 3),
        "second_turn_ms": round(1e3 * statistics.median(seconds[1]), 3),
        "blocks_read_back": after.swapped_in_blocks - before.swapped_in_blocks,
        "generated": [list(output.token_ids) for output in outputs],
    }


def chosen() -> tuple[EngineCase, int]:
    """A model with first prompts, and the host memory that holds them all; tiny ones without a GPU."""
    if not torch.cuda.is_available():
        small = {"max_model_len": 512, "max_num_batched_tokens": 512, "num_kv_blocks": 60, "max_num_seqs": 1}
        return EngineCase("turns", "tiny", TINY, lambda: equal(8, 240, 4), small), 1 << 22
    large = {**LLAMA_8B, "max_position_embeddings": 16384}
    options = {"max_model_len": 16384, "num_kv_blocks": 8 * 520, "max_num_seqs": 1, "enforce_eager": True}
    return EngineCase("turns", "Llama-8B", large, lambda: equal(64, 8192, 4), options), 72 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Measure with and without; 1 where their tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args(argv)
    case, space = chosen()
    rows = [measure(case, one) for one in (0, space)]
    generated = [row.pop("generated") for row in rows]
    result = ResultFile(arguments.json, {}, [])
    for row in rows:
        result.add_plain({**row, "same_tokens": generated[0] == generated[1]})
        print(
            f"prefix_space {row['prefix_space']}: {row['hit_rate']:.1%} of the second turns' tokens hit, first token "
            f"after {row['second_turn_ms']:.2f} ms (first turns {row['first_turn_ms']:.2f} ms)"
        )
    return int(generated[0] != generated[1])


if __name__ == "__main__":
    raise SystemExit(main())
