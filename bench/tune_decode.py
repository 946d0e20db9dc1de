"""Times launch configurations of the decode kernel, taking turns, on workloads that differ in what limits them.

    python -m bench.tune_decode out.json [--workloads 1q1s1k,8/1:] [--configs 64,128/4/2,3/1,2/0/16/1/1 ...]

Workloads are the table's decodes, named by heads where these are not 32/8: `64q1s4k`, `8/1:1q1s32k`. A configuration is
block_n/warps/stages/per_sm/registers/fan_in/ahead/chained, 0 registers for no limit; alternatives are separated by
commas. Each result is compared with the prefill kernel's before it is timed. What does not compile or fit is printed
and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from pagedattn.ops.attention_inputs import AttentionInputs
from pagedattn.ops.kernels import attention, decode
from pagedattn.ops.launch import FULL, LATENCY, DecodeConfig, DecodeTuning
from pagedattn.ops.paged_attention import decode_config_of, new_workspace, prefill_config_of

from .problem import DEVICE, Problem, make_problem
from .table import Case, cases
from .timing import capture, time_replays


def _name(case: Case) -> str:
    return case.text if (case.heads, case.kv_heads) == (32, 8) else f"{case.heads}/{case.kv_heads}:{case.text}"


WORKLOADS = {_name(case): case for case in cases("decode", gpu=DEVICE.type == "cuda")}
# Several programs per SM, with and without loads ahead; and one or two with deep loads of their own.
CONFIGS = (
    "64/4/2/4/128/16/0,1/1",
    "64/4/3/2,3/168/16/1/1",
    "64/4/4/2/0/16/1/1",
    "64/4/6/1/0/16/1/1",
    "128/4/2,3/1/0/8,16/1/1",
)


class Candidate(NamedTuple):
    """A configuration to try; None is what the library chooses."""

    tuning: DecodeTuning | None
    chained: bool = True

    @property
    def name(self) -> str:
        return "default" if self.tuning is None else "/".join(str(int(x or 0)) for x in (*self.tuning, self.chained))


class Row(NamedTuple):
    """One measurement."""

    workload: str
    config: str
    us: float
    gb_s: float
    differs: float
    chosen: str


def candidates(texts: Sequence[str]) -> Iterator[Candidate]:
    for text in texts:
        fields = [[int(n) for n in part.split(",")] for part in text.split("/")]
        for block_n, warps, stages, per_sm, registers, fan_in, ahead, chained in itertools.product(*fields):
            tuning = DecodeTuning(block_n, warps, stages, per_sm, registers or None, fan_in, bool(ahead))
            yield Candidate(tuning, bool(chained))


def inputs_of(problem: Problem, index: int) -> AttentionInputs:
    """One layer's call, with an output of its own."""
    cache, common, query = problem.paged().layer(index), problem.paged().common, problem.queries[index]
    args = (query, cache.key, cache.value, common.block_table, common.query_start_loc, common.seq_lens)
    bounds = (common.max_query_len, common.max_seq_len, common.num_decodes, False)
    extras = (None, None, None, None, torch.zeros_like(query), None, problem.case.dim**-0.5, 1.0, True, 0, 0.0)
    return AttentionInputs(*args, *extras, *bounds)


def config_of(inputs: AttentionInputs, candidate: Candidate) -> DecodeConfig:
    config = decode_config_of(inputs, candidate.tuning)
    return config._replace(chained=config.chained and candidate.chained)


def reference(inputs: AttentionInputs) -> torch.Tensor:
    """The prefill kernel's result, which shares no loop with the decode kernel."""
    attention.launch(prefill_config_of(inputs), inputs, None)
    return inputs.out.float()


def compile_one(job: tuple[Case, int, Candidate]) -> str:
    """Compile for a case's layer and a number of sequences, into Triton's cache on disk; why it failed, or nothing."""
    case, num_seqs, candidate = job
    kind = {"dtype": case.torch_dtype, "device": DEVICE}
    query = torch.zeros(num_seqs, case.heads, case.dim, **kind)
    cache = torch.zeros(2, 2, case.block_size, case.kv_heads, case.dim, **kind)
    starts, lens = (torch.arange(num_seqs + n, dtype=torch.int32, device=DEVICE) for n in (1, 0))
    table = torch.zeros(num_seqs, 64, dtype=torch.int32, device=DEVICE)
    extras = (None, None, None, None, torch.empty_like(query), None, 1.0, 1.0, True, 0, 0.0, 1, 1, num_seqs, False)
    inputs = AttentionInputs(query, cache[:, 0], cache[:, 1], table, starts, lens.clamp(max=1), *extras)
    try:
        config = config_of(inputs, candidate)
        decode.launch(config, inputs, new_workspace(config.workspace, DEVICE))
        reference(inputs)
        return ""
    except Exception as error:
        return f"{candidate.name}: {type(error).__name__}: {str(error)[:200]}"


def compile_all(names: Sequence[str], tried: Sequence[Candidate]) -> None:
    """All kernels that will be timed, in several processes: one at a time, compiling would take most of the run."""
    every = [one for one in tried if one.tuning is not None] + [Candidate(FULL), Candidate(LATENCY)]
    kinds: dict[tuple[str, int], Case] = {}
    for case in (WORKLOADS[name] for name in names):
        num_seqs = 1 if len(case.work.seq_lens) <= 32 else 64
        kinds.setdefault((case.layer, num_seqs), case)
    jobs = [(case, num_seqs, one) for (_, num_seqs), case in kinds.items() for one in every]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        for problem in sorted({text for text in pool.map(compile_one, jobs) if text}):
            print(problem, flush=True)


def replay_of(problem: Problem, candidate: Candidate, want: torch.Tensor) -> tuple[Callable[[], object], float, str]:
    """All layers' calls in one graph, how much the first one's result differs from `want`, and what was chosen."""
    every = [inputs_of(problem, i) for i in range(problem.layers)]
    config = config_of(every[0], candidate)
    workspace = new_workspace(config.workspace, DEVICE)
    decode.launch(config, every[0], workspace)
    differs = float((every[0].out.float() - want).norm() / want.norm())
    replay = capture([partial(decode.launch, config, one, workspace) for one in every])
    return replay, differs, Candidate(config.tuning, config.chained).name


def tune(name: str, tried: Sequence[Candidate], repeats: int) -> list[Row]:
    case = WORKLOADS[name]
    problem = make_problem(case)
    want = reference(inputs_of(problem, 0))
    replays, facts = {}, {}
    for one in tried:
        try:
            replays[one.name], *facts[one.name] = replay_of(problem, one, want)
        except Exception as error:
            print(f"{name} {one.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    wrong = {one for one, (differs, _) in facts.items() if not differs < 1e-2}
    for one in wrong:
        print(f"{name} {one}: WRONG, differs by {facts[one][0]:.1e}; not timed", flush=True)
    right = {one: replay for one, replay in replays.items() if one not in wrong}
    times = time_replays(right, dict.fromkeys(right, problem.layers), repeats)
    moved = case.work.bytes_read(case.kv_heads, case.dim, case.torch_dtype.itemsize)
    return [Row(name, one, round(us, 2), round(moved / us / 1e3), *facts[one]) for one, us in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", default="", help="comma-separated names or parts of names; all where not given")
    parser.add_argument("--configs", nargs="*", default=CONFIGS)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100.0, help="start no workload after so many")
    args = parser.parse_args()
    started = time.perf_counter()
    names = [name for name in WORKLOADS if any(word in name for word in args.workloads.split(","))]
    tried = [Candidate(None), *dict.fromkeys(candidates(args.configs))]
    if DEVICE.type == "cuda":
        compile_all(names, tried)
    print(f"{len(tried)} configurations compiled in {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[Row] = []
    for name in names:
        if time.perf_counter() - started > args.seconds:
            print(f"no time left for {name}")
            continue
        found = sorted(tune(name, tried, args.repeats), key=lambda row: row.us)
        rows += found
        for row in found[:3] + [row for row in found[3:] if row.config == "default"]:
            note = f"= {row.chosen}" if row.config == "default" else ""
            print(f"{name:22} {row.us:8.1f} us {row.gb_s:5.0f} GB/s  {row.config} {note}", flush=True)
        args.out.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
