"""A vLLM engine in a process of its own that generates when it is asked: a JSON object a line in, one out.

Answers go to the file descriptor in RESULTS: vLLM prints what it likes on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

vllm: Any = import_module("vllm")


def main() -> None:
    with os.fdopen(int(os.environ["RESULTS"]), "w", encoding="utf-8") as answers:

        def answer(values: dict[str, Any]) -> None:
            answers.write(json.dumps(values) + "\n")
            answers.flush()

        llm = vllm.LLM(**json.loads(sys.argv[1]))
        answer({"ready": True})
        for line in sys.stdin:
            answer(generate(llm, json.loads(line)))


def generate(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of `prompts` (lists of ids), `max_tokens` each, how many of each prompt's were not computed but
    found in a cache, and seconds."""
    options: dict[str, Any] = {
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": asked.get("logprobs"),
    }
    params = [vllm.SamplingParams(max_tokens=count, **options) for count in asked["max_tokens"]]
    prompts: Any = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    found = [one.outputs[0] for one in outputs]
    out: dict[str, Any] = {"seconds": seconds, "tokens": [[*one.token_ids] for one in found]}
    out["cached"] = [one.num_cached_tokens or 0 for one in outputs]
    if asked.get("logprobs") is not None:
        pairs = [zip(one.logprobs or [], one.token_ids, strict=True) for one in found]
        out["logprobs"] = [[step[token].logprob for step, token in pair] for pair in pairs]
    return out


if __name__ == "__main__":
    main()
