"""Host microseconds of an eager TRITON layer call, stage by stage, and of `build` for 256 requests by every backend.

    python bench/host_cost.py [--json FILE] [--seqs 8]

Without a GPU, launches end in a stub (`fake_gpu`): what is left out is then the C launcher and the driver, 2 to 3 us a
launch. On one, loops are short enough that the device's queue never fills.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pagedattn
from pagedattn import Attention, AttentionCall, CommonAttentionMetadata, PagedKVCache, StepMetadata, plan_step
from pagedattn.errors import PagedAttnError
from pagedattn.formats.native.format import NATIVE
from pagedattn.layers import replay
from pagedattn.layers.validation import check_call
from pagedattn.ops import paged_attention, reshape_and_cache

GPU = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if GPU else "cpu"), torch.bfloat16 if GPU else torch.float16
HEADS, KV_HEADS, DIM, SIZE = 32, 8, 128, 16
_CALLS, _LOOPS = 200, 15


def host_us(call: Callable[[], object], calls: int = _CALLS) -> float:
    """Median microseconds a call, over loops of `calls` after each of which the device is waited for."""
    times = []
    for _ in range(_LOOPS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        if GPU:
            torch.cuda.synchronize()
    return round(statistics.median(times[2:]), 2)


def common_of(seqs: int, keys: int, device: torch.device) -> CommonAttentionMetadata:
    """Decodes of `seqs` sequences over `keys` keys each."""
    columns = -(-keys // SIZE)
    table = torch.randperm(seqs * columns).to(torch.int32).view(seqs, columns).to(device)
    return CommonAttentionMetadata.from_lengths([1] * seqs, [keys] * seqs, table, block_size=SIZE)


def layer_of(backend: str) -> Attention:
    """A layer of Llama 8B's shape."""
    options = {"block_size": SIZE, "clean_cache": True, "dtype": DTYPE, "device": DEVICE}
    return Attention(HEADS, DIM, KV_HEADS, backend=backend, **options)


def stages(seqs: int) -> dict[str, float]:
    """A decode step's layer calls, and what they are made of."""
    layer, common = layer_of("TRITON"), common_of(seqs, 512, DEVICE)
    caches = PagedKVCache(32, seqs * 32, SIZE, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE)
    cache, step = caches.layer(0), plan_step([layer], common)
    (metadata,) = step.by_key.values()
    assert metadata.plan is not None
    calls = metadata.plan.calls
    query, key, value = (torch.randn(seqs, h, DIM, device=DEVICE).to(DTYPE) for h in (HEADS, KV_HEADS, KV_HEADS))
    flat = [x.flatten(1) for x in (query, key, value)]
    fused = torch.cat(flat, 1).split([x.shape[1] for x in flat], 1)

    def model(step: StepMetadata) -> None:
        for index in range(32):
            layer(query, key, value, caches.layer(index), step)

    def careful() -> None:
        calls.clear()
        layer(query, key, value, cache, step)

    found = {
        "layer call": host_us(lambda: layer(query, key, value, cache, step)),
        "layer call, flat slices of a fused projection": host_us(lambda: layer(*fused, cache, step)),
        "layer call, nothing to write": host_us(lambda: layer(query, None, None, cache, step)),
        "layer call under autograd": _with_gradients(lambda: layer(query, key, value, cache, step)),
        "layer call, 32 layers of a new step": host_us(lambda: model(plan_step([layer], common)), 10) / 32,
        "layer call, the first of a step": host_us(careful),
    }
    layer(query, key, value, cache, step)
    (call,) = calls.values()
    impl, spec, slots, given = layer._impl, layer.spec, common.slot_mapping, AttentionCall(query, cache, key, value)
    out = torch.empty_like(query)
    bounds = {"max_query_len": 1, "max_seq_len": 512, "num_decodes": seqs, "scale": 0.1, "path": "triton"}
    tables = common.block_table, common.query_start_loc, common.seq_lens
    write = call.write
    if write is not None:  # on a CPU, the extension or torch writes
        found["write, repeated"] = host_us(lambda: replay._write_again(write, given, cache, slots))
    return {
        **found,
        "checks": host_us(lambda: check_call(spec, given, common)),
        "layout": host_us(lambda: replay.layout_of(layer._kind, given)),
        "output": host_us(lambda: call.empty(query)),
        "write, op": host_us(lambda: reshape_and_cache(key, value, cache.key, cache.value, slots)),
        "write, op by Triton": host_us(
            lambda: reshape_and_cache(key, value, cache.key, cache.value, slots, path="triton")
        ),
        "attention, repeated": host_us(lambda: call.again(impl, given._replace(key=None, out=out), slots)),
        "attention, op": host_us(lambda: paged_attention(query, cache.key, cache.value, *tables, **bounds)),
    }


def _with_gradients(call: Callable[[], object]) -> float:
    with torch.enable_grad():
        return host_us(call)


def launches() -> dict[str, float]:
    """One launch of the cache write's kernel, by Triton, by our launcher, and repeated."""
    from pagedattn.kernels.cache_write import kernel as module
    from pagedattn.runtime.launcher import Replay

    rows, slots = (
        torch.zeros(1, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE),
        torch.zeros(1, dtype=torch.int64).to(DEVICE),
    )
    cache = PagedKVCache(1, 2, SIZE, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE).layer(0)
    sizes = (2 * SIZE, *rows.stride()[:2], *rows.stride()[:2], *cache.key.stride()[:3], *cache.value.stride()[:3])
    args = (rows, rows, cache.key, cache.value, slots, None, None, 1.0, 1.0, *sizes, None, None)
    constants: dict[str, Any] = {"S": SIZE, "H": KV_HEADS, "D": DIM, "DV": DIM, "K_SCALES": 0, "V_SCALES": 0}
    constants |= dict.fromkeys(("K_FORMAT", "V_FORMAT"), NATIVE.key.kernels)
    constants |= dict.fromkeys(("K_SCALE_STRIDES", "V_SCALE_STRIDES")) | {"PDL": False}
    kernel: Any = module._reshape_and_cache_kernel
    launcher = module._launch
    made = launcher((1,), args, constants, num_warps=4)
    found = {
        "launch by Triton": host_us(lambda: kernel[(1,)](*args, **constants, num_warps=4)),
        "launch by the launcher": host_us(lambda: launcher((1,), args, constants, num_warps=4)),
    }
    if made is not None:
        replay = Replay([made])
        values = (*(x.data_ptr() for x in args[:5]), None, None, 1.0, 1.0, None, None)
        found["launch, repeated"] = host_us(lambda: replay(0, values))
    return found


def builds(requests: int) -> dict[str, float]:
    """A step's metadata for that number of decodes, by every backend that can run here."""
    common, found = common_of(requests, 1024, DEVICE), {}
    table = common.block_table
    for name in pagedattn.list_backends():
        try:
            layer = layer_of(name)
            layer.build(common)
        except (PagedAttnError, ImportError) as error:
            print(f"{name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        found[f"build, {name}"] = host_us(lambda layer=layer: layer.build(common), 20)
        if name == "TRITON":
            found["plan_step of 32 layers, TRITON"] = host_us(lambda layer=layer: plan_step([layer] * 32, common), 20)
    lens, keys = [1] * requests, [1024] * requests
    made = host_us(lambda: CommonAttentionMetadata.from_lengths(lens, keys, table, block_size=SIZE), 20)
    return {**found, "CommonAttentionMetadata.from_lengths": made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=256)
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    if not GPU:
        sys.path.append(str(Path(__file__).parent.parent / "tests"))
        import fake_gpu

        fake_gpu.install()
        fake_gpu.launched.keep = False
    with torch.no_grad():
        rows = {**stages(options.seqs), **launches(), **builds(options.requests)}
    for name, us in rows.items():
        print(f"{name:48} {us:8.2f} us")
    if options.json:
        meta = {
            "gpu": torch.cuda.get_device_name() if GPU else None,
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "commit": os.environ.get("COMMIT", "unknown"),
            "date": datetime.date.today().isoformat(),
        }
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
