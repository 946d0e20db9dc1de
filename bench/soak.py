"""A long run of random requests: memory, blocks and objects must stay what they are after its first part.

    python -m bench.soak --tokens 1000000 --json soak.json

Sampled on a tiny model, over a cache too small for all of them: preempted and swapped, forked, aborted, with prefixes
that are cached, evicted and read back from host memory. After each tenth the engine runs empty and is looked at.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from pagedattn.engine import LLM, SamplingParams

from .engine_cases import TINY, EngineCase, equal
from .report import ResultFile

_PARTS, _ALIVE, _VOCAB = 10, 96, 512
_GROWTH = 0.02  # of resident memory and of objects, from the second part to the last
_OPTIONS: dict[str, Any] = {
    **{"max_model_len": 512, "max_num_batched_tokens": 1024, "max_num_seqs": 64, "num_kv_blocks": 400},
    **{"preemption": "swap", "swap_space": 1 << 20, "prefix_space": 1 << 20},
}
_KINDS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0},
    {"top_p": 0.9, "top_k": 50},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"n": 2, "logprobs": 2},
)


def run(tokens: int) -> list[dict[str, Any]]:
    """A row a part: what was generated, how fast, and what is left when nothing runs."""
    case, draw = EngineCase("soak", "tiny", {**TINY, "vocab_size": _VOCAB}, lambda: equal(1, 1, 1), _OPTIONS), Random(0)
    beginnings = [[draw.randrange(_VOCAB) for _ in range(160)] for _ in range(24)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(case.write(Path(folder)), load_format="dummy", **case.options)
        for part in range(_PARTS):
            begun, before = time.perf_counter(), llm.stats().counters
            names: list[str] = []
            while llm.stats().counters.generated_tokens < tokens * (part + 1) // _PARTS:
                while len(names) < _ALIVE:
                    names.append(_add(llm, draw, beginnings))
                if draw.random() < 0.02:
                    llm.abort(names.pop(draw.randrange(len(names))))
                ended = {output.request_id for output in llm.step()}
                names = [name for name in names if name not in ended]
            while llm.has_unfinished:
                llm.step()
            rows.append(_look(llm, before, time.perf_counter() - begun))
        llm.close()
    return rows


def _add(llm: LLM, draw: Random, beginnings: Sequence[list[int]]) -> str:
    beginning = draw.choice(beginnings)[: draw.randrange(1, 161)] if draw.random() < 0.7 else []
    prompt = beginning + [draw.randrange(_VOCAB) for _ in range(draw.randrange(1, 80))]
    params = {"max_tokens": draw.randrange(1, 200), "ignore_eos": draw.random() < 0.7, **draw.choice(_KINDS)}
    return llm.add_request(prompt, SamplingParams(**params))


def _look(llm: LLM, before: Any, seconds: float) -> dict[str, Any]:
    gc.collect()
    stats = llm.stats()
    now = stats.counters
    generated, asked = now.generated_tokens - before.generated_tokens, now.queried_tokens - before.queried_tokens
    return {
        "suite": "soak",
        "generated_tokens": generated,
        "tok_s": round(generated / seconds),
        "preemptions": now.preemptions - before.preemptions,
        "swapped_in_blocks": now.swapped_in_blocks - before.swapped_in_blocks,
        "hit_rate": round((now.cached_tokens - before.cached_tokens) / max(1, asked), 3),
        "blocks_held": stats.num_blocks - stats.num_free_blocks,
        "host_blocks_held": stats.num_swap_blocks - stats.num_free_swap_blocks - stats.num_prefix_copies,
        "resident_mib": round(_resident() / 2**20, 1),
        "device_mib": round(torch.cuda.memory_allocated() / 2**20, 1) if torch.cuda.is_available() else None,
        "objects": len(gc.get_objects()),
    }


def _resident() -> int:
    """Bytes of this process in memory now; where the system does not say, the most that ever were."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, which counts bytes


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What did not stay as it was."""
    held = ("blocks_held", "host_blocks_held")
    out = [f"part {at}: {row[name]} {name}" for at, row in enumerate(rows) for name in held if row[name]]
    for name in ("resident_mib", "objects"):
        first, last = rows[1][name], rows[-1][name]
        if last > first * (1 + _GROWTH):
            out.append(f"{name} grew from {first} to {last}")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """1 where something grew or was not given back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows, result = run(arguments.tokens), ResultFile(arguments.json, {}, [])
    for row in rows:
        result.add_plain(row)
        print({name: value for name, value in row.items() if name != "suite"})
    wrong = faults(rows)
    print("\n".join(wrong) or "nothing grew, and nothing was kept")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
