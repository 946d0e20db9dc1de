"""Engines on the shape of DeepSeek-V2-Lite with random weights: over latent rows, over keys and values of every head,
and vLLM's beside them.

    python -m bench.latent_engine --json FILE [--contender NAME]... [--layers N] [--experts N]

One engine is alive at a time, with the whole device. Greedy tokens of this library's two are compared up to the first
that differs, where both choices must have been about equal. Rows of other contenders, or of other numbers of layers and
experts, that FILE has already are kept: vLLM may be installed for another Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedattn.errors import PagedAttnError

from .agreement import common_prefix, largest_gap
from .engine_cases import DEEPSEEK_V2_LITE, TINY_DEEPSEEK, EngineCase, common
from .latent_contenders import OWN, VLLM, Contender, start, versions
from .measure import reason, release
from .ratios import Row
from .report import ResultFile

_CHECKED, _CHECKED_TOKENS = 32, 64  # requests whose log-probabilities are compared, and tokens of each at most
# Of log-probabilities of one token, where caches differ only in how they round. bfloat16: as answers of a real model.
_LARGEST_GAP = {"bfloat16": 0.25, "float32": 1e-3}


def make_case(layers: int | None, experts: int | None, longest: int) -> EngineCase:
    """The model and the engine's options; a tiny one without a GPU."""
    sizes = {"num_hidden_layers": layers, "n_routed_experts": experts}
    changed = {name: size for name, size in sizes.items() if size is not None}
    if not torch.cuda.is_available():
        options: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 256, "num_kv_blocks": 200}
        options["graph_sizes"] = [1, 4, 8]
        shape = {**TINY_DEEPSEEK, **changed}
        return EngineCase("latent_engine", "tiny-deepseek", shape, lambda: common(8, longest), options)
    options = {"max_model_len": 4096, "max_num_seqs": 256, "block_size": 64}
    shape = {**DEEPSEEK_V2_LITE, **changed}
    return EngineCase("latent_engine", "DeepSeek-V2-Lite", shape, lambda: common(256, longest), options)


def measure(engine: Contender, counts: Sequence[int], longest: int, rounds: int) -> Row:
    """Output tokens per second of each number of requests, round by round with other prompts, after one that is not
    counted, whose requests end after a few tokens."""
    workloads: list[Row] = []
    for count in counts:
        prompts, params = common(count, longest, rounds)
        _ask(engine, prompts, [min(8, one.max_tokens or 1) for one in params])
        speeds: list[float] = []
        for seed in range(rounds):
            prompts, params = common(count, longest, seed)
            wanted = [one.max_tokens or 1 for one in params]
            speeds.append(round(sum(wanted) / _ask(engine, prompts, wanted)["seconds"], 1))
        workloads.append({"requests": count, "longest": longest, "tok_s": speeds})
        workloads[-1]["median_tok_s"] = statistics.median(speeds)
    return {"workloads": workloads}


def checked(engine: Contender, longest: int) -> Row:
    """Greedy tokens and their log-probabilities of requests that are the same for each contender."""
    prompts, params = common(_CHECKED, longest, seed=1 << 16)
    return _ask(engine, prompts, [min(_CHECKED_TOKENS, one.max_tokens or 1) for one in params], logprobs=1)


def _ask(engine: Contender, prompts: Sequence[list[int]], wanted: Sequence[int], logprobs: int | None = None) -> Row:
    answer = engine.ask(prompts, wanted, logprobs)
    if [len(tokens) for tokens in answer["tokens"]] != [*wanted]:
        raise RuntimeError("the engine gave another number of tokens than asked for")
    return answer


def compared(ours: Row, reference: Row, dtype: str) -> Row:
    """How far greedy tokens agree with the first contender's.

    Raises:
        ArithmeticError: log-probabilities up to the first token that differs are no rounding apart.
    """
    same = [common_prefix(one, other) for one, other in zip(ours["tokens"], reference["tokens"], strict=True)]
    gap, most = largest_gap(ours, reference), _LARGEST_GAP[dtype]
    if gap > most:
        raise ArithmeticError(f"log-probabilities differ by {gap:.4g} from those of the other cache, {most} at most")
    total = sum(map(len, ours["tokens"]))
    return {"same_prefix": round(sum(same) / total, 4), "largest_logprob_difference": round(gap, 6)}


class Results:
    """Rows of the contenders that run, in the place of those that the file had of them."""

    def __init__(self, path: Path | None) -> None:
        old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path is not None and path.exists() else []
        self.file = ResultFile(path, {}, [])
        self.about = {name: self.file.meta[name] for name in ("commit", "gpu", "date")}
        self.file.rows = old

    def add(self, row: Row) -> None:
        """Keep a row and print it."""
        self.file.rows = [old for old in self.file.rows if _key(old) != _key(row)]
        self.file.add_plain(row | self.about)
        print("\n".join(lines(row)), flush=True)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("contender", "model", "layers", "experts"))


def lines(row: Row) -> list[str]:
    """A row as text."""
    title = f"{row['model']} of {row['layers']} layers and {row['experts']} experts, {row['contender']}"
    if row["refused"]:
        return [f"{title}: refused: {row['refused']}"]
    out = [f"{title}: start-up {row['start_up_s']} s"]
    if "cache_bytes_per_token" in row:
        fit = ", ".join(f"{count} of {length} tokens" for length, count in row["sequences_that_fit"].items())
        out.append(f"  {row['cache_bytes_per_token']:.0f} bytes a token, sequences that fit: {fit}")
    out += [f"  {one['requests']} requests: {one['median_tok_s']:.0f} output tokens/s" for one in row["workloads"]]
    if "same_prefix" in row:
        gap = f"log-probabilities within {row['largest_logprob_difference']}"
        out.append(f"  {row['same_prefix']:.1%} of tokens before the first that differs, {gap}")
    return out


def run(names: Sequence[str], case: EngineCase, arguments: argparse.Namespace, results: Results) -> int:
    """All contenders, one after another; how many were refused or gave something wrong."""
    reference, failed = None, 0
    for name in names:
        row: Row = {"suite": case.name, "contender": name, "model": case.model, "refused": None}
        row |= {"layers": case.shape["num_hidden_layers"], "experts": case.shape["n_routed_experts"]}
        row |= {"shape": dict(case.shape), "options": dict(case.options), "versions": versions(name)}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / case.model
            folder.mkdir()
            try:
                engine = start(name, case, case.write(folder))
                try:
                    row |= engine.facts | measure(engine, arguments.requests, arguments.longest, arguments.rounds)
                    row |= engine.profile() if arguments.profile else {}
                    if name in OWN:
                        answer = checked(engine, arguments.longest)
                        row |= {} if reference is None else compared(answer, reference, case.shape["dtype"])
                        reference = reference or answer
                finally:
                    engine.close()
            except (PagedAttnError, RuntimeError, ArithmeticError) as error:
                row["refused"] = reason(error)
                print(f"{name}: {error}", file=sys.stderr)  # the end of its log, where a process failed
            engine = None
        release()
        failed += row["refused"] is not None
        results.add(row)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a contender was refused, or latent and expanded tokens are no rounding apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result; rows of others in it are kept")
    parser.add_argument("--contender", action="append", choices=[*OWN, *VLLM], help=f"default: {', '.join(OWN)}")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--experts", type=int, help="fewer routed experts than the model has")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256] if torch.cuda.is_available() else [8])
    parser.add_argument("--longest", type=int, default=512 if torch.cuda.is_available() else 24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where a step's time goes, too")
    arguments = parser.parse_args(argv)
    case = make_case(arguments.layers, arguments.experts, arguments.longest)
    failed = run(arguments.contender or [*OWN], case, arguments, Results(arguments.json))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
