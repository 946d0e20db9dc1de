"""Times tunings of the decode kernel, taking turns in random order, on workloads that differ in what limits them.

    python -m bench.tune_decode out.json [--cases 1q1s1k,8/1:1q1s32k] [--variants deep=64/4/5/1,tile_overhead=1 ...]

Cases are the table's decodes and `MORE`, named with heads where these are not 32/8. A variant is a name and
block_n/warps/stages/per_sm, then fields of `DecodeTuning` by name. What the library chooses by itself is always timed
too. Given neither cases nor variants, each group of `GROUPS` has its own. A result that differs from the prefill
kernel's is not timed; what does not compile is printed and left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from pagedattn.kernels.decode import kernel
from pagedattn.kernels.decode.plan import FULL, LATENCY, DecodeConfig, DecodeTuning
from pagedattn.kernels.inputs import AttentionInputs
from pagedattn.kernels.prefill import kernel as prefill
from pagedattn.kernels.shape import bounds_of, shape_of
from pagedattn.ops.attention_plan import decode_config_of, plan_attention
from pagedattn.runtime.target import target_of
from pagedattn.runtime.workspace import new_workspace

from .measure import release
from .problem import DEVICE, Problem, make_problem
from .report import meta
from .table import Case, cases
from .timing import capture, elapsed_us


def _name(case: Case) -> str:
    return case.text if (case.heads, case.kv_heads) == (32, 8) else f"{case.heads}/{case.kv_heads}:{case.text}"


# Short sequences, as those behind a shared prefix are, and several tokens each.
MORE = (Case("decode", "512q1s176", 16, 8), *(Case("decode", text) for text in ("256q1s256", "256q1s100", "512q1s512")))
MORE += tuple(Case("decode", text) for text in ("64q16s4k", "64q8s4k", "256q4s1k", "8q16s4k", "1q16s16k"))
# Steps 100, 300, 600 and 900 of the 256 requests that `vllm_compare` times on the shape of Qwen3-0.6B.
_SERVED = ("256q1s200..1124", "200q1s400..1324", "117q1s700..1624", "34q1s1000..1924")
MORE += tuple(Case("decode", text, 16, 8) for text in _SERVED)
CASES = {_name(case): case for case in cases("decode", gpu=DEVICE.type == "cuda")}
CASES |= {_name(case): case for case in MORE} if DEVICE.type == "cuda" else {}
DEFAULT = "default"


class Group(NamedTuple):
    """Variants that only make sense on these cases."""

    cases: Sequence[str]
    variants: Sequence[str]


GROUPS = {
    "latency": Group(
        ("1q1s1k", "1q1s8k", "1q1s32k", "16q1s2k", "8/1:1q1s32k", "8/1:64q1s8k"),
        (
            "loads32=128/4/3/1,reduction_unroll_regs=32",
            "loads64=128/4/3/1,reduction_unroll_regs=64",
            "loads128=128/4/3/1,reduction_unroll_regs=128",
            "fan12=128/4/3/1,reduction_unroll_regs=128,fan_in=12",
            "fan32=128/4/3/1,reduction_unroll_regs=128,fan_in=32",
            "warps8=128/8/3/1,reduction_unroll_regs=64",
            "keys64=64/4/5/1,reduction_unroll_regs=64",
            "keys64warps8=64/8/5/1,reduction_unroll_regs=64",
            "keys64twice=64/4/4/2,reduction_unroll_regs=64,fan_in=17",
            "keys64twicefan12=64/4/4/2,reduction_unroll_regs=128,fan_in=12",
        ),
    ),
    "bandwidth": Group(
        ("64q1s4k", "256q1s1k", "128q1s8k", "64q1s128*1.0906", "1q1s64k+31q1s512"),
        (
            "full=128/4/2/2",
            "fulllead1=128/4/2/2,tile_overhead=1",
            "fulllead2=128/4/2/2,tile_overhead=2",
            "four=64/4/2/4,max_registers=128,prefetch_block_table=0",
            "fourlead2=64/4/2/4,max_registers=128,prefetch_block_table=0,tile_overhead=2",
            "fourahead=64/4/2/4,max_registers=128",
            "three=64/4/3/3,max_registers=168",
            "threelead2=64/4/3/3,max_registers=168,tile_overhead=2",
            "two=64/4/4/2",
            "twolead2=64/4/4/2,tile_overhead=2",
        ),
    ),
    "short": Group(
        ("16/8:512q1s176", "256q1s256", "256q1s100", "512q1s512", "256q1s1k", "64q1s4k", "128q1s8k", "64q1s128*1.0906"),
        (
            "keys32=32/4/4/4,max_registers=128,tile_overhead=2",
            "keys32warps2=32/2/4/4,tile_overhead=2",
            "keys32lead4=32/4/4/4,max_registers=128,tile_overhead=4",
            "keys32ahead0=32/4/4/4,max_registers=128,tile_overhead=2,prefetch_block_table=0",
            "keys32three=32/4/5/3,max_registers=168,tile_overhead=2",
            "three=64/4/3/3,max_registers=168,tile_overhead=2",
        ),
    ),
    "served": Group(
        tuple(f"16/8:{text}" for text in _SERVED),
        (
            "lead0=64/4/4/2",
            "lead1=64/4/4/2,tile_overhead=1",
            "lead4=64/4/4/2,tile_overhead=4",
            "deep=64/4/5/2,tile_overhead=2",
            "three=64/4/3/3,max_registers=168,tile_overhead=2",
            "keys32=32/4/4/4,max_registers=128,tile_overhead=2",
            "keys32three=32/4/5/3,max_registers=168,tile_overhead=2",
            "keys32warps2=32/2/4/4,tile_overhead=2",
            "warps2=64/2/4/2,tile_overhead=2",
            "keys128=128/4/2/2,tile_overhead=1",
        ),
    ),
    "tokens": Group(
        ("64q16s4k", "64q8s4k", "256q4s1k", "8q16s4k", "1q16s16k"),
        (
            "two=64/4/3/2",
            "twoshallow=64/4/2/2",
            "one=64/4/4/1",
            "warps8=64/8/5/1",
            "keys32=32/4/4/2",
            "keys32deep=32/4/5/2",
        ),
    ),
}


class Row(NamedTuple):
    """One measurement. `differs`: from the prefill kernel's output, relative."""

    case: str
    variant: str
    us: float
    fastest_us: float
    gb_s: float
    differs: float
    tuning: str


def variant_of(text: str) -> tuple[str, DecodeTuning]:
    """Name and tuning of `name=block_n/warps/stages/per_sm[,field=number...]`; 0 registers are no limit."""
    name, _, rest = text.partition("=")
    shape, *fields = rest.split(",")
    block_n, warps, stages, per_sm = map(int, shape.split("/"))
    tuning = DecodeTuning(block_n, warps, stages, per_sm)
    for field, _, value in (one.partition("=") for one in fields):
        number: int | bool | None = int(value)
        if field == "prefetch_block_table":
            number = bool(number)
        elif field == "max_registers":
            number = number or None
        tuning = tuning._replace(**{field: number})
    return name, tuning


def inputs_of(problem: Problem, index: int) -> AttentionInputs:
    """One layer's call, with an output of its own."""
    cache, common, query = problem.paged().layer(index), problem.paged().common, problem.queries[index]
    args = (query, cache.key, cache.value, common.block_table, common.query_start_loc, common.seq_lens)
    bounds = (common.max_query_len, common.max_seq_len, common.num_decodes, False)
    extras = (None, None, None, None, torch.zeros_like(query), None, problem.case.dim**-0.5, 1.0, (1, 0), 0.0)
    return AttentionInputs(*args, *extras, *bounds)


def config_of(inputs: AttentionInputs, tuning: DecodeTuning | None) -> DecodeConfig:
    """How the decode kernel serves a call; `tuning` None is what the library chooses."""
    return decode_config_of(shape_of(inputs), bounds_of(inputs), target_of(DEVICE), tuning=tuning)


def reference(inputs: AttentionInputs) -> torch.Tensor:
    """The prefill kernel's result, which shares no loop with the decode kernel."""
    shape = shape_of(inputs)._replace(deterministic=True)  # in one launch
    (launch,) = plan_attention(shape, bounds_of(inputs), DEVICE, not_sm90="the portable kernel is asked for").launches
    prefill.launch(launch.config, inputs, None)  # type: ignore[arg-type]
    return inputs.out.float()


def compile_one(job: tuple[Case, int, DecodeTuning | None]) -> str:
    """Compile for a case's layer and a number of sequences, into Triton's cache on disk; why it failed, or nothing."""
    case, num_seqs, tuning = job
    tokens, kind = max(case.work.query_lens), {"dtype": case.torch_dtype, "device": DEVICE}
    query = torch.zeros(num_seqs * tokens, case.heads, case.dim, **kind)
    cache = torch.zeros(2, 2, case.block_size, case.kv_heads, case.dim, **kind)
    starts, lens = (torch.arange(num_seqs + n, dtype=torch.int32, device=DEVICE) * tokens for n in (1, 0))
    table = torch.zeros(num_seqs, 64, dtype=torch.int32, device=DEVICE)
    extras = (None, None, None, None, torch.empty_like(query), None, 1.0, 1.0, (1, 0), 0.0, tokens, tokens, 0, False)
    inputs = AttentionInputs(query, cache[:, 0], cache[:, 1], table, starts, lens.clamp(max=tokens), *extras)
    try:
        if tuning is None:
            reference(inputs)
        else:
            config = config_of(inputs, tuning)
            kernel.launch(config, inputs, new_workspace(config.workspace, DEVICE))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tuning}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(plans: Mapping[str, Mapping[str, DecodeTuning | None]], processes: int) -> None:
    """All kernels that will be timed, in several processes: one at a time, compiling would take most of the run."""
    jobs: dict[tuple[str, int, int, DecodeTuning | None], Case] = {}
    for name, variants in plans.items():
        case = CASES[name]
        count = len(case.work.seq_lens)
        # What the kernel is compiled anew for.
        num_seqs = 1 if count == 1 else 2 if count <= 32 else 64 if count <= 256 else 257
        for tuning in (*variants.values(), FULL, LATENCY):
            jobs.setdefault((case.layer, max(case.work.query_lens), num_seqs, tuning), case)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        work = [(case, num_seqs, tuning) for (_, _, num_seqs, tuning), case in jobs.items()]
        for problem in sorted({text for text in pool.map(compile_one, work) if text}):
            print(problem, flush=True)


def replay_of(
    problem: Problem, tuning: DecodeTuning | None, want: torch.Tensor
) -> tuple[Callable[[], object], float, str]:
    """All layers' calls in one graph, how much the first one's result differs from `want`, and what was launched."""
    every = [inputs_of(problem, i) for i in range(problem.layers)]
    config = config_of(every[0], tuning)
    workspace = new_workspace(config.workspace, DEVICE)
    kernel.launch(config, every[0], workspace)
    differs = float((every[0].out.float() - want).norm() / want.norm())
    replay = capture([partial(kernel.launch, config, one, workspace) for one in every])
    return replay, differs, "/".join(str(int(x or 0)) for x in (*config.tuning, config.programs))


def tune(name: str, variants: Mapping[str, DecodeTuning | None], rounds: int) -> list[Row]:
    """Times of a case's variants, each round in another random order."""
    problem = make_problem(CASES[name])
    want = reference(inputs_of(problem, 0))
    replays, facts = {}, {}
    for variant, tuning in variants.items():
        try:
            replay, differs, chosen = replay_of(problem, tuning, want)
        except Exception as error:
            print(f"{name} {variant}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        if differs < 1e-2:
            replays[variant], facts[variant] = replay, (differs, chosen)
        else:
            print(f"{name} {variant}: WRONG, differs by {differs:.1e}; not timed", flush=True)
    for replay in replays.values():
        replay()  # the first replay of a graph uploads it
    order, shuffled = [], random.Random(0)
    for _ in range(rounds):
        order += shuffled.sample([*replays], len(replays))
    times: dict[str, list[float]] = {variant: [] for variant in replays}
    for variant, us in zip(order, elapsed_us([replays[variant] for variant in order]), strict=True):
        times[variant].append(us / problem.layers)
    work = CASES[name].bytes_read("auto")
    rows = []
    for variant, found in times.items():
        us = statistics.median(found)
        rows.append(Row(name, variant, round(us, 2), round(min(found), 2), round(work / us / 1e3), *facts[variant]))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """A line per variant, a column per case; the fastest of a case is marked."""
    names, variants = (list(dict.fromkeys(getattr(row, of) for row in rows)) for of in ("case", "variant"))
    times = {(row.case, row.variant): row.us for row in rows}
    best = {name: min(us for (case, _), us in times.items() if case == name) for name in names}
    lines = [" " * 18 + "".join(f"{name[-15:]:>17}" for name in names)]
    for variant in variants:
        found = [times.get((name, variant)) for name in names]
        cells = (
            "" if us is None else f"{us:.2f}{'*' if us == best[name] else ' '}"
            for name, us in zip(names, found, strict=True)
        )
        lines.append(f"{variant:18}" + "".join(f"{cell:>17}" for cell in cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", default="", help="comma-separated names; those of the groups where not given")
    parser.add_argument("--variants", nargs="*", default=[], help="in place of the groups'")
    parser.add_argument("--groups", nargs="*", default=[*GROUPS], choices=[*GROUPS])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=100.0, help="start no case after this number of seconds")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    args = parser.parse_args()
    started = time.perf_counter()
    given, chosen = dict(map(variant_of, args.variants)), [name for name in args.cases.split(",") if name]
    plans: dict[str, dict[str, DecodeTuning | None]] = {}
    for group in (GROUPS[name] for name in args.groups):
        variants = given or dict(map(variant_of, group.variants))
        for name in group.cases if DEVICE.type == "cuda" else CASES:
            if not chosen or name in chosen:
                plans.setdefault(name, {DEFAULT: None}).update(variants)
    if DEVICE.type == "cuda":
        compile_all(plans, args.processes)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[Row] = []
    for name, variants in plans.items():
        if time.perf_counter() - started > args.seconds:
            print(f"no time left for {name}", flush=True)
            continue
        rows += tune(name, variants, args.rounds)
        release()
        args.out.write_text(
            json.dumps({"meta": meta(), "rows": [row._asdict() for row in rows]}, indent=1) + "\n", encoding="utf-8"
        )
    for group in (GROUPS[name] for name in args.groups):
        print("\n".join(table([row for row in rows if row.case in group.cases] or rows)), flush=True)
    print(f"done in {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
