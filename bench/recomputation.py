"""Whether rows of important tokens are worth computing anew over a quantised cache: a simulation in torch.

    python -m bench.recomputation MODEL [--formats int4 turboquant4] [--tokens 2048] [--ahead 512] [--json FILE]

Rows that come while earlier ones are read quantised are a little off themselves, so that some propose to compute those
of important tokens anew from time to time. Three pasts are compared, all encoded: rows as such a cache gets them, a
block at a time; with the rows of the tenth of the tokens that the last 256 attend to most computed exactly; and with
all rows computed exactly, which nobody's choice of tokens can beat. What is counted is the loss of the tokens behind
them, beside a past that is not encoded. MODEL is a folder, as `pagedattn fetch smollm2` makes one.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import pagedattn.integrations.transformers as hf
from pagedattn.formats.registry import format_of

from .accuracy import documents
from .ratios import Row
from .report import ResultFile

BLOCK = 32  # tokens that are encoded together
SHARE = 0.1  # of tokens whose rows are computed anew
LAST = 256  # queries that say which are important
Rows = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer keys and values [1, H, T, D]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every format on every document, print a line each."""
    given = _arguments().parse_args(arguments)
    transformers = hf.import_transformers()
    folder = given.model.resolve(strict=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    result = ResultFile(given.json, {}, [])
    result.meta |= {"transformers": transformers.__version__, "model": folder.name, "dtype": "float32"}
    for title, text in documents(given.text):
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : given.tokens + given.ahead]
        for row in losses(model, ids, given.tokens // BLOCK * BLOCK, given.formats):
            result.add_plain({"suite": "recomputation", "document": title} | row)
            words = f"loss {row['delta_nll']:+.4f}, KL {row['kl']:.5f}"
            print(f"{title:>14} {row['kv_cache_dtype']:>12}, {row['rows']}: {words}", flush=True)
    return 0


@torch.inference_mode()
def losses(model: Any, ids: torch.Tensor, count: int, formats: Sequence[str]) -> list[Row]:
    """A row per format and past, of `count` tokens of ids [1, T]."""
    cache = model(ids[:, : count - LAST], use_cache=True).past_key_values
    seen = model(ids[:, count - LAST : count], past_key_values=cache, output_attentions=True).attentions
    exact, (ahead, wanted) = rows_of(cache), (ids[:, count:-1], ids[0, count + 1 :, None])
    # Attention to a token from those behind it, of all layers and heads; LAST of them do not see all the same.
    received = torch.stack([one[0].sum((0, 1)) for one in seen]).sum(0)
    important = torch.zeros(count, dtype=torch.bool)
    important[received[: count - LAST].topk(int(count * SHARE)).indices] = True
    want = _log_probabilities(model, cache, ahead)
    found: list[Row] = []
    for name in formats:
        came = rows_that_come(model, ids[:, :count], name)
        anew = important[:, None]
        some = [
            (torch.where(anew, k, as_it_came[0]), torch.where(anew, v, as_it_came[1]))
            for (k, v), as_it_came in zip(exact, came, strict=True)
        ]
        for kind, rows in (("as they came", came), ("a tenth anew", some), ("all anew", exact)):
            past = copy.deepcopy(cache)
            for layer, sides in zip(past.layers, rows, strict=True):
                layer.keys, layer.values = encoded(sides, name)
            got = _log_probabilities(model, past, ahead)
            kl = float((want.exp() * (want - got)).sum(-1).mean())
            delta = float((want - got).gather(1, wanted).mean())
            found.append(
                {
                    "kv_cache_dtype": name,
                    "rows": kind,
                    "tokens": count,
                    "ahead": len(want),
                    "kl": kl,
                    "delta_nll": delta,
                }
            )
    return found


def rows_of(cache: Any) -> Rows:
    """What a cache holds now."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def rows_that_come(model: Any, ids: torch.Tensor, name: str) -> Rows:
    """Rows before they are encoded, of tokens that come a block at a time and read those before encoded."""
    cache, came = None, []
    for start in range(0, ids.shape[1], BLOCK):
        cache = model(ids[:, start : start + BLOCK], past_key_values=cache, use_cache=True).past_key_values
        came.append(
            [(layer.keys[:, :, -BLOCK:].clone(), layer.values[:, :, -BLOCK:].clone()) for layer in cache.layers]
        )
        for layer, sides in zip(cache.layers, came[-1], strict=True):
            layer.keys[:, :, -BLOCK:], layer.values[:, :, -BLOCK:] = encoded(sides, name)
    of_layers = zip(*came, strict=True)
    return [(torch.cat([k for k, _ in blocks], 2), torch.cat([v for _, v in blocks], 2)) for blocks in of_layers]


def encoded(sides: tuple[torch.Tensor, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, H, T, D] as a cache of a format gives them back, T a multiple of BLOCK."""
    form, back = format_of(name), []
    for side, rows in zip((form.key, form.value), sides, strict=True):
        blocks = rows[0].unflatten(1, (-1, BLOCK)).permute(1, 2, 0, 3)  # [blocks, BLOCK, H, D]
        read = side.decode(side.encode(blocks.contiguous()), rows.shape[-1], torch.float32)
        back.append(read.permute(2, 0, 1, 3).flatten(1, 2)[None])
    return back[0], back[1]


def _log_probabilities(model: Any, past: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the tokens behind each of ids, [n, vocab]; the past is left as it is."""
    return model(ids, past_key_values=copy.deepcopy(past)).logits[0].log_softmax(-1)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model folder")
    parser.add_argument("--formats", nargs="+", default=["int4", "turboquant4"])
    parser.add_argument("--tokens", type=int, default=2048, help="of the past, of each document")
    parser.add_argument("--ahead", type=int, default=512, help="tokens behind them whose loss is counted")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE", help="documents, in place of Python's"
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
