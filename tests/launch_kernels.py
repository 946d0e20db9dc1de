"""Launches without a GPU: what the library's own launcher passes on, beside what Triton's dispatch does. Prints JSON.

It runs in a process without TRITON_INTERPRET, which is read when the kernels are imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import fake_gpu
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedattn import Attention, CommonAttentionMetadata, LayerCache, PagedKVCache, StepMetadata, plan_step
from pagedattn.kernels.decode import cascade, kernel
from pagedattn.runtime import op_registry
from pagedattn.runtime.launcher import Launch, Launcher, Replay

FUNCTION, CHAINED, ARGUMENTS = 4, 6, 13  # positions in a launch's line
WRITTEN, READ = (
    [ARGUMENTS + kernel._decode_kernel.arg_names.index(name) for name in names]
    for names in (("out", "lse_out"), ("prior", "lse_out"))
)
launched = fake_gpu.launched
reshape: Any = sys.modules["pagedattn.ops.reshape_and_cache"]


@triton.jit(do_not_specialize=["count"])
def _toy(x, y, count, stride, scale, WIDTH: tl.constexpr):
    index = tl.arange(0, WIDTH)
    value = tl.load(x + index * stride, mask=index < count) * scale
    if y is not None:
        tl.store(y + index, value, mask=index < count)
    tl.store(x + index * stride, value, mask=index < count)


@triton.jit
def _described(y, x, WIDTH: tl.constexpr):
    tl.store(y + tl.arange(0, WIDTH), x.load([0]))


BUFFER = torch.zeros(1 << 12)
ALIGNED, OTHER, ODD = BUFFER[:64], BUFFER[64:128], BUFFER[1:65]
TOY: dict[str, tuple[Any, ...]] = {
    "plain": (ALIGNED, OTHER, 7, 3, 0.5),
    "other tensors": (OTHER, ALIGNED, 7, 3, 0.25),
    "unaligned": (ODD, OTHER, 7, 3, 0.5),
    "None": (ALIGNED, None, 7, 3, 0.5),
    "stride 1": (ALIGNED, OTHER, 7, 1, 0.5),
    "stride 16": (ALIGNED, OTHER, 7, 16, 0.5),
    "stride 32": (ALIGNED, OTHER, 7, 32, 0.5),
    "count 1": (ALIGNED, OTHER, 1, 3, 0.5),
    "count 16": (ALIGNED, OTHER, 16, 3, 0.5),
    "count int64": (ALIGNED, OTHER, 1 << 40, 3, 0.5),
    "dtype": (ALIGNED.half(), OTHER, 7, 3, 0.5),
    "True for 1": (ALIGNED, OTHER, 7, True, 0.5),
}


def toys() -> dict[str, Any]:
    """Each call twice by the launcher: the function, and the arguments, that Triton takes for it."""
    launcher, found = Launcher(_toy, ("x", "y", "scale")), {}
    toy: Any = _toy
    for name, args in TOY.items():
        want = toy[(2,)](*args, WIDTH=16, num_warps=4, enable_fp_fusion=True).function
        lines = []
        for _ in range(2):
            launched.clear()
            launcher((2,), args, {"WIDTH": 16}, num_warps=4)
            lines.append(launched[-1])
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
        found[name] = {
            "function": lines[1][FUNCTION],
            "same": [line[FUNCTION] for line in lines] == [want, want],
            "values": list(lines[1][ARGUMENTS : ARGUMENTS + len(args)]) == values,
            "grid": lines[1][:3] == (2, 1, 1),
        }
    return found


def replays() -> dict[str, Any]:
    """A launch made again: with other values, then where it must not be."""
    launcher = Launcher(_toy, ("x", "y", "scale"))
    launcher((2,), (ALIGNED, OTHER, 7, 3, 0.5), {"WIDTH": 16})
    first = launcher((2,), (ALIGNED, OTHER, 7, 3, 0.5), {"WIDTH": 16})
    line = launched[-1]
    odd = launcher((2,), (ODD, OTHER, 7, 3, 0.5), {"WIDTH": 16})
    assert isinstance(first, Launch) and isinstance(odd, Launch)
    replay = Replay([first])
    launched.clear()
    new = (OTHER.data_ptr(), ALIGNED.data_ptr(), 0.125)
    done = replay(new[0] | new[1], new)
    refused = replay(ODD.data_ptr(), (ODD.data_ptr(), *new[1:]))
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    hooked = replay(new[0] | new[1], new), launcher((2,), (ALIGNED, OTHER, 7, 3, 0.5), {"WIDTH": 16})
    knobs.runtime.launch_enter_hook.remove(hook)
    again = launched[0]
    return {
        "repeatable": [first.repeatable(), odd.repeatable()],
        "done": done,
        "values": again[ARGUMENTS : ARGUMENTS + 5] == (*new[:2], 7, 3, new[2]),
        "rest": again[:ARGUMENTS] == line[:ARGUMENTS],
        "refused": refused,
        "hooked": hooked == (False, None),
        "launches": len(launched),  # the replay, and what Triton launched under the hook
    }


def described() -> dict[str, bool]:
    """A launch with a tensor descriptor, made again for another tensor, beside one that Triton makes for that."""
    launcher, lines = Launcher(_described, ("y", "x")), []
    x, other = (TensorDescriptor.from_tensor(one, [16]) for one in (ALIGNED, OTHER))
    for made in (x, x, other):
        launched.clear()
        launch = launcher((1,), (OTHER, made), {"WIDTH": 16})
        lines.append(launched[-1])
    assert isinstance(launch, Launch) and launch.repeatable()
    launched.clear()
    replay = Replay([launch])
    replay(0, (OTHER.data_ptr(), ALIGNED.data_ptr()))
    replay(0, (OTHER.data_ptr(), OTHER.data_ptr()))
    return {"same": launched == lines[1:], "differ": lines[1] != lines[2]}


HEADS, KV_HEADS, DIM, SIZE, SEQS = 8, 2, 64, 16, 4
HALF = torch.float16
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and cap": {"sliding_window": 9, "softcap": 30.0},
    "sinks and slopes": {"sinks": True, "alibi_slopes": True},
    "fp8, host scales": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.25},
    "fp8, a scale per head": {"kv_cache_dtype": "fp8_e4m3", "k_scale": True, "v_scale": True},
    "int8, with sinks": {"kv_cache_dtype": "int8", "sinks": True},
    "deterministic": {"deterministic": True},
    "shared keys": {"head_dim_v": 32, "write_value": False},
}
ONCE = {name: LAYERS[name] for name in ("plain", *(name for name in LAYERS if "fp8" in name))} | {
    "sinks": {"sinks": True}
}


def layers(options: dict[str, Any], flat: bool, queries: list[int], writer: str, shared: int = 0) -> dict[str, Any]:
    """Three layers of a kind: whether what the second and third repeat is what a call with all checks does."""
    reshape.choose = lambda path, device, op: writer if op else "triton"  # the extension has not every format
    models = [_model(options, index) for index in range(3)]
    caches = [_cache(options) for _ in models]
    table = torch.arange(SEQS * 2, dtype=torch.int32).view(SEQS, 2)
    common = CommonAttentionMetadata.from_lengths(queries, [20] * SEQS, table, block_size=SIZE)
    step = plan_step(models, common.replace(shared_prefix_len=shared))
    (metadata,) = step.by_key.values()
    assert metadata.plan is not None
    calls = metadata.plan.calls
    same, careful, repeated, once = True, [], ([], []), "attended once" in step.describe()
    for model, cache in zip(models, caches, strict=True):
        call = _call_of(model, cache, step, flat, sum(queries))
        if model is models[0]:
            call()  # Triton's own launch, with other arguments before the kernel's
            calls.clear()
            call()
        checked = []
        counted = lambda *args, run=model._call, checked=checked: (checked.append(1), run(*args))[1]  # noqa: E731
        vars(model)["_call"] = counted
        repeated = lines_of(call, once), stored(cache)
        careful.append(len(checked))
        kept = dict(calls)
        calls.clear()
        same = same and len(repeated[0]) > 0 and repeated == (lines_of(call, once), stored(cache)) and len(checked) == 1
        calls.update(kept)
        cache.key.view(torch.uint8).zero_()
    chained = [line[CHAINED] for line in repeated[0]][writer == "triton" or "int8" in options.values() :]
    return {"same": same, "careful": careful, "kept": len(calls), "chained": chained, "once": once}


def _model(options: dict[str, Any], index: int) -> Attention:
    made = {name: value for name, value in options.items() if name != "write_value"}
    for name in ("sinks", "alibi_slopes", "k_scale", "v_scale"):
        if made.get(name) is True:
            made[name] = torch.rand(KV_HEADS if "scale" in name else HEADS) + 0.5
        elif name in made:
            made[name] *= index + 1
    made.setdefault("backend", "TRITON")
    return Attention(HEADS, DIM, KV_HEADS, block_size=SIZE, dtype=torch.float16, **made)


def _cache(options: dict[str, Any]) -> LayerCache:
    stored = options.get("kv_cache_dtype", "auto")
    cache = PagedKVCache(1, 16, SIZE, KV_HEADS, DIM, dtype=torch.float16, kv_cache_dtype=stored).layer(0)
    return cache if options.get("write_value", True) else LayerCache(cache.key, cache.key[..., : DIM // 2])


def _call_of(model: Attention, cache: LayerCache, step: StepMetadata, flat: bool, tokens: int) -> Callable[[], object]:
    """A call with queries, keys and an output of its own."""
    spec = model.spec
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (HEADS, spec.value_dim)]
    query, key, out = (torch.randn(tokens, *((h * d,) if flat else (h, d))).half() for h, d in shapes)
    value = None if cache.value.data_ptr() == cache.key.data_ptr() else key + 1
    return lambda: model(query, key, value, cache, step, out)


def stored(cache: LayerCache) -> list[list[float]]:
    """What a cache holds, in which the extension's writes are seen."""
    return [x.float().flatten().tolist() for x in cache.planes]


def unkept() -> dict[str, Any]:
    """Calls that are more than a plan's launches: what is kept of them, and how often a write of its own ran."""
    reshape.choose = lambda *args: "triton"
    model, other, cache = _model({}, 0), _model({"sliding_window": 9}, 0), _cache({})
    table = torch.arange(SEQS * 2, dtype=torch.int32).view(SEQS, 2)
    common = CommonAttentionMetadata.from_lengths([1] * SEQS, [20] * SEQS, table, block_size=SIZE)
    query = torch.randn(SEQS, HEADS, DIM).half()
    foreign, mine, writes = model.build(common), model.build(common), []
    assert foreign.plan is not None and mine.plan is not None
    for _ in range(2):
        other(query, None, None, cache, foreign)

    class Writer(type(model._impl)):  # type: ignore[misc]
        def write_kv(self, *args: Any, **scales: Any) -> None:
            writes.append(1)
            super().write_kv(*args, **scales)

    model._impl.__class__ = Writer
    for _ in range(3):
        model(query, query[:, :KV_HEADS], query[:, :KV_HEADS], cache, mine)
    kept = [one.write is None for one in mine.plan.calls.values()]
    return {"foreign": len(foreign.plan.calls), "writes": len(writes), "kept": kept, "many": many(other, cache, common)}


def many(model: Attention, cache: LayerCache, common: CommonAttentionMetadata) -> dict[str, Any]:
    """Calls of 70 layouts, then one of the first layout that is not aligned: how many are kept, and whether the first
    still is."""
    metadata = model.build(common)
    assert metadata.plan is not None
    calls, first = metadata.plan.calls, []
    for extra in range(70):
        model(torch.randn(SEQS, HEADS, DIM + 16 * extra).half()[..., :DIM], None, None, cache, metadata)
        first = first or [*calls.items()]
    model(torch.randn(SEQS * HEADS * DIM + 1).half()[1:].view(SEQS, HEADS, DIM), None, None, cache, metadata)
    return {"kept": len(calls), "first": [*calls.items()][:1] == first}


def ways() -> dict[str, list[list[str]]]:
    """From the first layer of a step, and from the next."""
    reshape.choose = lambda *args: "triton"
    model, caches = _model({}, 0), [_cache({}), _cache({})]
    table = torch.arange(SEQS * 2, dtype=torch.int32).view(SEQS, 2)
    common = CommonAttentionMetadata.from_lengths([1] * SEQS, [20] * SEQS, table, block_size=SIZE)
    plan_step([model], common)
    _call_of(model, caches[0], plan_step([model], common), False, SEQS)()  # Triton compiles, by another way
    step = plan_step([model], common)
    first, later = (fake_gpu.files_to_a_launch(_call_of(model, cache, step, False, SEQS)) for cache in caches)
    return {"first": first, "later": later}


JOINT = PagedKVCache(1, 16, SIZE, 2, DIM, dtype=HALF).layer(0).key
WRONG: dict[str, dict[str, Any]] = {
    "query heads": {"query": torch.zeros(SEQS, HEADS + 2, DIM).half()},
    "query rows": {"query": torch.zeros(SEQS - 1, HEADS, DIM).half()},
    "query dtype": {"query": torch.zeros(SEQS, HEADS, DIM)},
    "query strides": {"query": torch.zeros(SEQS, HEADS, 2 * DIM).half()[..., ::2]},
    "query device": {"query": torch.zeros(SEQS, HEADS, DIM, device="meta").half()},
    "key heads": {"key": torch.zeros(SEQS, HEADS, DIM).half()},
    "key rows": {"key": torch.zeros(SEQS - 1, KV_HEADS, DIM).half()},
    "no value": {"value": None},
    "value dtype": {"value": torch.zeros(SEQS, KV_HEADS, DIM)},
    "out": {"out": torch.zeros(SEQS, HEADS, DIM - 1).half()},
    "out of other rank": {"out": torch.zeros(SEQS, HEADS * DIM + 1).half()},
    "scale": {"k_scale": 0.5},
    "cache heads": {"kv_cache": PagedKVCache(1, 16, SIZE, 2 * KV_HEADS, DIM, dtype=torch.float16).layer(0)},
    "cache dtype": {"kv_cache": PagedKVCache(1, 16, SIZE, KV_HEADS, DIM).layer(0)},
    "cache blocks": {"kv_cache": PagedKVCache(1, 16, 8, KV_HEADS, DIM, dtype=torch.float16).layer(0)},
    "cache device": {"kv_cache": PagedKVCache(1, 16, SIZE, KV_HEADS, DIM, dtype=torch.float16, device="meta").layer(0)},
    "values that are keys": {"kv_cache": LayerCache(JOINT, JOINT)},
    "metadata": {"long": True},
}


def wrong() -> dict[str, list[str]]:
    """What is said of a wrong argument after a right call was kept, and what a first call says."""
    model, cache = _model({}, 0), _cache({})
    table = torch.arange(SEQS * 2, dtype=torch.int32).view(SEQS, 2)
    common = CommonAttentionMetadata.from_lengths([1] * SEQS, [20] * SEQS, table, block_size=SIZE)
    too_long = common.replace(seq_lens_cpu=torch.full((SEQS,), 33, dtype=torch.int32))
    right: dict[str, Any] = {"query": torch.zeros(SEQS, HEADS, DIM).half(), "kv_cache": cache}
    right |= {name: torch.zeros(SEQS, KV_HEADS, DIM).half() for name in ("key", "value")}
    found = {}
    for name, changes in WRONG.items():
        kept, said = model.build(common), []
        model(**right, metadata=kept)
        assert kept.plan is not None and len(kept.plan.calls) == 1
        if changes.get("long"):
            kept, changes = too_long, {}
        for metadata in (kept, kept if kept is too_long else model.build(common)):
            try:
                model(**{**right, **changes}, metadata=metadata)
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        found[name] = said
    return found


def lines_of(call: Callable[[], object], once: bool = False) -> list[list[Any]]:
    """What a call launches; `once` without the addresses of what one launch leaves to the next."""
    launched.clear()
    call()
    lines = [list(line) for line in launched]
    for before, after in zip(WRITTEN, READ, strict=True) if once else ():
        assert lines[-2][before] == lines[-1][after] is not None
        lines[-2][before] = lines[-1][after] = None
    return lines


def main() -> None:
    fake_gpu.install()
    hooked = set[str]()
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: hooked.add(fn.name)  # which Triton writes JSON for
    writers = ("csrc", "triton") if op_registry.path_of("reshape_and_cache", "cpu") == "csrc" else ("triton",)
    steps = {"decodes": [1] * SEQS, "mixed": [1, 1, 5, 20]}
    found = {
        f"{name}, {'flat' if flat else 'heads'}, {kind}, {writer}": layers(options, flat, queries, writer)
        for name, options in LAYERS.items()
        for flat in (False, True)
        for kind, queries in steps.items()
        for writer in writers
    }
    two = {"backend": "prefill=TRITON,decode=TORCH"}
    found["two backends, heads, prompts"] = layers(two, False, [5, 5, 20, 20], writers[0])
    cascade.SAVED_BYTES = -(1 << 62)
    found |= {f"{name}, once": layers(options, False, [1] * SEQS, writers[0], SIZE) for name, options in ONCE.items()}
    parts = {
        "toys": toys(),
        "replays": replays(),
        "described": described(),
        "wrong": wrong(),
        "unkept": unkept(),
        "ways": ways(),
        "hooked": sorted(hooked),
    }
    print(json.dumps({**parts, "layers": found}))


if __name__ == "__main__":
    main()
