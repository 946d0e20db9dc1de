"""What a cache format costs a model: loss, agreement and recall over a paged cache, beside one of the model's dtype.

    python -m bench.accuracy MODEL [--formats int8 fp8] [--tokens 4096] [--text FILE ...] [--json FILE]

Text goes in chunks, through `hf.enable`: each query reads stored entries, its own included (a whole prompt that
attended to exact keys would show no loss). `--chunk 1 --tokens 1024` is token by token, as decodes are. Every format
sees the same tokens, in turns with the exact cache, so that what is kept of a step is its logits alone. MODEL is a
folder, as `pagedattn fetch smollm2` makes one, `--kv-scales` a file of `pagedattn calibrate`. `share_in_16_bit` is
of the keys that a row's queries read, those that were not encoded: of open blocks, windows and first tokens.
TurboQuant has its window of 64 unless a name says another (`turboquant4:window=0`).
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import pagedattn.integrations.transformers as hf
from pagedattn import KVCacheDtype
from pagedattn.formats.registry import format_of

from .ratios import Row
from .report import ResultFile

EXACT = "auto"
BUCKETS = (512, 1024, 2048, 4096, 8192)  # positions up to each are averaged apart
TOPICS = ("specialnames", "compound", "types")  # long pages of the language reference, which every Python carries
FACTS = (("Amber", "48213"), ("Cobalt", "90617"), ("Saffron", "35082"))  # told near the beginning, the middle, the end
_DEPTHS = (0.05, 0.5, 0.95)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every format on every document, print a line each."""
    given = _arguments().parse_args(arguments)
    transformers = hf.import_transformers()
    folder = given.model.resolve(strict=True)
    dtype = getattr(torch, given.dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(given.device)
    formats = [str(KVCacheDtype.of_model(one)) for one in given.formats]
    models = enabled(model, [EXACT, *formats], given.backend, given.kv_scales)
    result = ResultFile(given.json, {}, [])
    result.meta |= {"transformers": transformers.__version__, "model": folder.name, "dtype": given.dtype}
    result.meta |= {"calibrated": given.kv_scales is not None}
    for title, text in documents(given.text):
        ids = tokenizer(text, return_tensors="pt").input_ids[0, : given.tokens]
        for row in [*losses(models, ids, given.chunk), *recall(models, tokenizer, ids, given.chunk)]:
            row["kv_cache_dtype"] = row["kv_cache_dtype"].replace(":window=0", "")  # a row is named as ops name formats
            result.add_plain({"suite": "accuracy", "document": title, "tokens": len(ids), "chunk": given.chunk} | row)
            print(f"{title:>14} {line(row)}", flush=True)
    return 0


def documents(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Names and texts: of the files, or else of Python's own reference."""
    if files:
        yield from ((file.name, file.read_text(encoding="utf-8")) for file in files)
        return
    from pydoc_data.topics import topics

    yield from ((name, topics[name]) for name in TOPICS)


def enabled(model: Any, formats: Sequence[str], backend: str | None, kv_scales: Path | None = None) -> dict[str, Any]:
    """The model over a cache of each format; all have the same weights. The scales are for those of fp8."""
    shared = {id(parameter): parameter for parameter in (*model.parameters(), *model.buffers())}
    models = {name: copy.deepcopy(model, dict(shared)) for name in formats}
    for name, one in models.items():
        scales = kv_scales if name.startswith("fp8") else None
        hf.enable(one, kv_cache_dtype=name, backend=backend, kv_scales=scales)
    return models


def new_caches(models: Mapping[str, Any]) -> dict[str, Any]:
    """An empty cache of each format."""
    return {name: hf.new_cache(model) for name, model in models.items()}


@torch.inference_mode()
def logits_of(
    models: Mapping[str, Any], caches: Mapping[str, Any], ids: torch.Tensor, chunk: int
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """The first index and the logits [n, vocab] of each chunk of ids [T], by format, in float32."""
    for start in range(0, len(ids), chunk):
        part = ids[None, start : start + chunk]
        yield (
            start,
            {
                name: model(input_ids=part.to(model.device), past_key_values=caches[name]).logits[0].float()
                for name, model in models.items()
            },
        )


def losses(models: Mapping[str, Any], ids: torch.Tensor, chunk: int) -> list[Row]:
    """A row per format and range of positions: differences of the loss with their standard error, KL, and agreement."""
    sums: dict[tuple[str, int], Row] = {}
    for start, logits in logits_of(models, new_caches(models), ids, chunk):
        wanted = ids[start + 1 : start + 1 + chunk].to(logits[EXACT].device)
        exact = logits.pop(EXACT)[: len(wanted)].log_softmax(-1)
        for name, one in logits.items():
            found = one[: len(wanted)].log_softmax(-1)
            delta = (exact - found).gather(1, wanted[:, None])[:, 0].double().cpu()
            divergence = (exact.exp() * (exact - found)).sum(-1).double().cpu()
            same = (exact.argmax(-1) == found.argmax(-1)).double().cpu()
            for at in range(len(wanted)):
                bucket = next((end for end in BUCKETS if start + at < end), BUCKETS[-1])
                row = sums.setdefault((name, bucket), {"n": 0, "delta": 0.0, "square": 0.0, "kl": 0.0, "same": 0.0})
                row["n"] += 1
                row["delta"] += float(delta[at])
                row["square"] += float(delta[at]) ** 2
                row["kl"] += float(divergence[at])
                row["same"] += float(same[at])
    starts: dict[int, int] = dict(zip(BUCKETS, (0, *BUCKETS), strict=False))
    return [
        _average(name, bucket, row) | share_in_16_bit(models[name], name, starts[bucket], row["n"])
        for (name, bucket), row in sorted(sums.items())
    ]


def share_in_16_bit(model: Any, kv_cache_dtype: str, start: int, count: int) -> Row:
    """A row's part for the queries at `count` positions from `start` on: which share of the keys that they read, in all
    layers together, lies in the model's dtype. It does not depend on chunks."""
    stored, positions = KVCacheDtype.of(kv_cache_dtype), range(start, start + count)
    names, size = stored.of_layers(model.config.get_text_config().num_hidden_layers), stored.block_size(None)
    native = {name: sum(format_of(name).native_keys(at, size) for at in positions) for name in {*names}}
    keys = len(names) * sum(at + 1 for at in positions)
    return {"share_in_16_bit": round(sum(native[name] for name in names) / keys, 5)}


def _average(name: str, bucket: int, row: Row) -> Row:
    count, mean = row["n"], row["delta"] / row["n"]
    variance = max(row["square"] / count - mean**2, 0.0)
    return {
        "kv_cache_dtype": name,
        "positions_below": bucket,
        "positions": count,
        "delta_nll": round(mean, 6),
        "delta_nll_error": round(math.sqrt(variance / count), 6),
        "kl": round(row["kl"] / count, 6),
        "top1": round(row["same"] / count, 5),
    }


def recall(models: Mapping[str, Any], tokenizer: Any, ids: torch.Tensor, chunk: int) -> list[Row]:
    """A row per format and fact: the loss of a number that was told in the text, asked for behind it.

    The text is read once; each question is asked of a fork of its cache.
    """
    cuts = [int(len(ids) * depth) for depth in _DEPTHS]
    told = [tokenizer(f"\nThe number of {name} is {number}.\n").input_ids for name, number in FACTS]
    pieces = [ids[a:b].tolist() for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = [token for piece, fact in zip(pieces, [*told, []], strict=True) for token in (*piece, *fact)]
    read, rows = new_caches(models), []
    for _ in logits_of(models, read, torch.tensor(text), chunk):
        pass
    for (name, number), depth in zip(FACTS, _DEPTHS, strict=True):
        question, answer = tokenizer(f"\nThe number of {name} is").input_ids, tokenizer(f" {number}").input_ids
        asked = torch.tensor([*question, *answer])
        last: dict[str, list[torch.Tensor]] = {one: [] for one in models}
        for start, logits in logits_of(models, copy.deepcopy(read), asked, chunk):
            for one, part in logits.items():
                keep = max(len(asked) - len(answer) - 1 - start, 0)
                last[one].append(part[keep:])
        nll = {}
        for one, parts in last.items():
            scores = torch.cat(parts)[: len(answer)].log_softmax(-1).cpu()
            nll[one] = (
                -float(scores.gather(1, torch.tensor(answer)[:, None]).mean()),
                scores.argmax(-1).tolist() == answer,
            )
        rows += [
            {
                "kv_cache_dtype": one,
                "fact_at": depth,
                "recalled": found,
                "recalled_exact": nll[EXACT][1],
                "delta_nll": round(loss - nll[EXACT][0], 6),
                **share_in_16_bit(models[one], one, len(text) + len(asked) - len(answer) - 1, len(answer)),
            }
            for one, (loss, found) in nll.items()
            if one != EXACT
        ]
    return rows


def line(row: Row) -> str:
    """The row as text."""
    if "fact_at" in row:
        said = "recalled" if row["recalled"] else "not recalled"
        return f"{row['kv_cache_dtype']:>15} a fact at {row['fact_at']:.0%}: {said}, loss {row['delta_nll']:+.4f}"
    return (
        f"{row['kv_cache_dtype']:>15} below {row['positions_below']:>5}: loss {row['delta_nll']:+.5f} "
        f"(standard error {row['delta_nll_error']:.5f}), KL {row['kl']:.5f}, the same token {row['top1']:.2%}"
    )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model folder")
    parser.add_argument("--formats", nargs="+", default=["int8", "k8v4", "fp8", "fp8_e5m2"])
    parser.add_argument("--tokens", type=int, default=4096, help="of each document")
    parser.add_argument("--chunk", type=int, default=32, help="tokens that go in at a time")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE", help="documents, in place of Python's"
    )
    parser.add_argument("--kv-scales", type=Path, metavar="FILE", help="of `pagedattn calibrate`, for fp8 formats")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--backend", help="attention backend; the library chooses unless given")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
